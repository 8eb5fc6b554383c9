"""The folder of a server's counts: who removes it, and when."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nanovllm_server.watch.folder import metrics_folder

PROGRAM = """\
import os, signal, sys
from nanovllm_server.watch.folder import metrics_folder
with metrics_folder() as folder:
    (folder / "1-x.values").write_text("counts")
    print(folder, flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.parametrize("name", ["SIGKILL", "SIGQUIT"])
def test_the_folder_of_a_killed_server_goes_at_the_start_of_the_next(
    place: Path, name: str
) -> None:
    program = [sys.executable, "-c", PROGRAM, name]
    killed = subprocess.run(program, stdout=subprocess.PIPE, text=True)
    left = Path(killed.stdout.strip())
    assert killed.returncode < 0
    assert left.parent == place
    assert left.is_dir()
    with metrics_folder() as folder:
        assert [*place.iterdir()] == [folder]
    assert [*place.iterdir()] == []


def test_servers_beside_each_other_keep_their_folders(place: Path) -> None:
    """So does one of which nobody knows whether it runs."""
    unknown = place / "nanovllm-metrics-unknown"
    unknown.mkdir()
    with metrics_folder() as first:
        with metrics_folder() as second:
            assert {*place.iterdir()} == {first, second, unknown}
        assert {*place.iterdir()} == {first, unknown}
    assert [*place.iterdir()] == [unknown]
