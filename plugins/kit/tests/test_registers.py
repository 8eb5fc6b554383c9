"""A kernel that takes more than its line, or has none, fails with the numbers and the remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from nanovllm_kit.aot import AotReport
from nanovllm_kit.registers import assert_within_list, list_of, write_list

ROOT = Path(__file__).parents[3]
LISTS = sorted([*ROOT.glob("tests/**/*.registers.json"), *ROOT.glob("plugins/**/*.registers.json")])

JOBS = """
from nanovllm_kit.aot import AotJob

JOBS = {
    "scatter": AotJob(
        kernel="nanovllm_core.worker.rows_triton:_scatter_kernel",
        signature={"arena": "*i32", "updates": "*i32", "num_updates": "i32"},
        constexprs={"BLOCK": 64},
    )
}
"""


def report(registers: int = 64, spills: int = 0, shared: int = 1024) -> AotReport:
    return AotReport(registers, spills, shared, ptx="")


@pytest.fixture
def kernels_file(tmp_path: Path) -> Path:
    """A test file whose list has one kernel of 64 registers, no spills and 1024 bytes shared."""
    file = tmp_path / "test_kernels.py"
    write_list(file, {"copy": report()})
    return file


@pytest.mark.parametrize("found", [report(), report(registers=63), report(shared=0)])
def test_as_much_as_listed_or_less_passes(kernels_file: Path, found: AotReport) -> None:
    assert_within_list(kernels_file, {"copy": found})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (report(registers=65), "copy: 65 registers, listed 64"),
        (report(spills=4), "copy: 4 spills, listed 0"),
        (report(shared=1025), "copy: 1025 shared, listed 1024"),
    ],
)
def test_more_than_listed_fails_and_names_the_command(
    kernels_file: Path, found: AotReport, message: str
) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        assert_within_list(kernels_file, {"copy": found})
    assert f"python -m nanovllm_kit.registers {kernels_file}" in str(caught.value)


def test_kernels_and_lines_must_match(kernels_file: Path) -> None:
    """A new kernel needs a line, and a line needs its kernel."""
    with pytest.raises(AssertionError, match=r"scale: not listed, found .*'registers': 64"):
        assert_within_list(kernels_file, {"copy": report(), "scale": report()})
    with pytest.raises(AssertionError, match="copy: listed, but not compiled"):
        assert_within_list(kernels_file, {})


def test_a_version_of_triton_without_a_list_fails(
    kernels_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code has not been looked at yet; its list is written beside the others."""
    known = triton.__version__
    monkeypatch.setattr(triton, "__version__", "99.0.0")
    with pytest.raises(AssertionError, match=f"no list for this version, only for {known}"):
        assert_within_list(kernels_file, {"copy": report()})
    write_list(kernels_file, {"copy": report(registers=80)})
    assert_within_list(kernels_file, {"copy": report(registers=80)})
    monkeypatch.setattr(triton, "__version__", known)
    with pytest.raises(AssertionError, match="80 registers, listed 64"):
        assert_within_list(kernels_file, {"copy": report(registers=80)})


def test_a_list_is_written_with_one_kernel_a_line(kernels_file: Path) -> None:
    """So that a change of one kernel is a change of one line."""
    lines = list_of(kernels_file).read_text(encoding="utf-8").splitlines()
    assert lines[2] == '  "copy": {"registers": 64, "spills": 0, "shared": 1024}'


@pytest.mark.slow
def test_the_command_lists_what_a_files_jobs_compile_to(tmp_path: Path) -> None:
    file = tmp_path / "test_scatter.py"
    file.write_text(JOBS)
    command = [sys.executable, "-m", "nanovllm_kit.registers", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    assert re.search(
        r'"scatter": {"registers": \d+, "spills": 0, "shared": 0}', list_of(file).read_text()
    )


def test_every_list_has_the_version_of_triton_that_is_pinned() -> None:
    """Another pin comes with new lists."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^triton==(\S+)", constraints, re.MULTILINE)
    assert pinned is not None
    assert len(LISTS) >= 5
    for file in LISTS:
        assert f'"{pinned[1]}": {{' in file.read_text(encoding="utf-8"), file.name
