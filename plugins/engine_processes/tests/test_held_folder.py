"""A process's private folder: who removes it, and when."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nanovllm_engine_processes.held_folder import HeldFolder, make_again, sweep

PREFIX = "nanovllm-test-"
PROGRAM = """\
import os, signal, sys
from nanovllm_engine_processes.held_folder import HeldFolder
held = HeldFolder(sys.argv[1])
(held.path / "1-x.values").write_text("counts")
print(held.path, flush=True)
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.parametrize("name", ["SIGKILL", "SIGQUIT"])
def test_the_folder_of_a_killed_process_goes_when_the_next_is_made(place: Path, name: str) -> None:
    """And one of another prefix stays."""
    program = [sys.executable, "-c", PROGRAM, PREFIX, name]
    killed = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=60)
    left = Path(killed.stdout.strip())
    assert killed.returncode < 0
    assert left.parent == place
    other = HeldFolder("nanovllm-other-")
    assert {*place.iterdir()} == {left, other.path}
    held = HeldFolder(PREFIX)
    assert {*place.iterdir()} == {held.path, other.path}
    held.remove()
    assert [*place.iterdir()] == [other.path]


def test_the_folder_itself_is_locked_for_cleaners_of_temporary_files(place: Path) -> None:
    """systemd-tmpfiles leaves a folder alone that another process has locked."""
    held = HeldFolder(PREFIX)
    folder = os.open(held.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    held.remove()
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)


def test_a_folder_that_another_program_removed_is_made_again(place: Path) -> None:
    """It is locked again, and removed like the first. One that is there stays as it is."""
    held = HeldFolder(PREFIX)
    shutil.rmtree(held.path)
    make_again(held.path)
    (held.path / "1-x.values").write_text("counts")
    make_again(held.path)
    sweep(PREFIX)
    assert (held.path / "1-x.values").exists()
    assert held.path.stat().st_mode & 0o777 == 0o700
    held.remove()
    make_again(held.path)
    make_again(place / "another")
    assert [*place.iterdir()] == []


def test_folders_beside_each_other_stay_until_they_are_removed(place: Path) -> None:
    """So does one of which nobody knows whether its process runs."""
    unknown = place / f"{PREFIX}unknown"
    unknown.mkdir()
    first, second = HeldFolder(PREFIX), HeldFolder(PREFIX)
    assert {*place.iterdir()} == {first.path, second.path, unknown}
    assert first.path.stat().st_mode & 0o777 == 0o700
    second.remove()
    second.remove()
    assert {*place.iterdir()} == {first.path, unknown}
    del first  # a program that ends drops it too
    assert [*place.iterdir()] == [unknown]


def test_a_folder_goes_though_another_process_writes_into_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine that starts does, after the files are listed and before the folder is removed.

    Left without its lock, it would stay for ever.
    """
    held = HeldFolder(PREFIX)
    rmdir = os.rmdir

    def write_and_rmdir(*path: Any, **options: Any) -> None:
        with suppress(FileNotFoundError):
            (held.path / "late.values").touch()
        rmdir(*path, **options)

    monkeypatch.setattr(os, "rmdir", write_and_rmdir)
    held.remove()
    assert [*place.iterdir()] == []


FORKED = """\
import os, signal, sys, time
from nanovllm_engine_processes.held_folder import HeldFolder
held = HeldFolder(sys.argv[1])
if os.fork() == 0:
    print(os.getpid(), flush=True)  # it has closed the files by now
    time.sleep(1000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_that_lives_on_holds_no_folder(place: Path) -> None:
    program = [sys.executable, "-c", FORKED, PREFIX]
    killed = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    child = int(killed.stdout.readline())
    try:
        killed.wait(60)
        assert len([*place.iterdir()]) == 1
        held = HeldFolder(PREFIX)
        assert [*place.iterdir()] == [held.path]
    finally:
        os.kill(child, signal.SIGKILL)
        killed.stdout.close()


def test_a_fork_leaves_the_folder_of_its_parent(place: Path) -> None:
    """It has the object, and removes it where it ends as Python does."""
    held = HeldFolder(PREFIX)
    if (child := os.fork()) == 0:
        held.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert held.path.is_dir()
