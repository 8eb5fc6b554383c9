"""The tutorials, followed word for word in a fresh environment: every command, every file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from nanovllm_kit.scaffold import new_plugin

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))
STEP = re.compile(r'^```(console|\w+ title="([^"]+)")\n(.*?)^```', re.MULTILINE | re.DOTALL)
ANYTHING = "..."


@dataclass(frozen=True)
class Write:
    """Write a file that the tutorial shows."""

    name: str
    text: str


@dataclass(frozen=True)
class Run:
    """Type a command, and see what the tutorial says one sees."""

    command: str
    output: str


def steps(tutorial: Path) -> Iterator[Write | Run]:
    for kind, name, text in STEP.findall(tutorial.read_text(encoding="utf-8")):
        if kind != "console":
            yield Write(name, text)
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield Run(command, output)


class Shell:
    """One bash for a whole tutorial, so that what is activated stays so."""

    def __init__(self, folder: Path) -> None:
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("NANOVLLM_", "PYTHON", "COV_", "COVERAGE_", "PYTEST_"))
        }
        # Nothing is built in an environment of its own, nor fetched where this one has it, nor
        # compiled that no command imports. 0 is how pip spells that these `no` hold.
        pip = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_COMPILE": "0", "PIP_QUIET": "2"}
        calm = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
        cpu = {"CUDA_VISIBLE_DEVICES": ""}
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=variables | pip | calm | cpu,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> tuple[str, int]:
        """Output and exit status; the status can be asked for again as `$?`."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        end = "--end of the command--"
        self._bash.stdin.write(f"{command}\nstatus=$?; echo; echo {end} $status; (exit $status)\n")
        self._bash.stdin.flush()
        output = ""
        for line in self._bash.stdout:
            if line.startswith(end):
                return output, int(line.split()[-1])
            output += line
        raise AssertionError(f"bash ended during {command!r}: {output}")

    def close(self) -> None:
        self._bash.communicate(timeout=60)


def is_as_shown(shown: str, printed: str) -> bool:
    """Line by line but for spaces at the ends; `...` stands for anything."""

    def trimmed(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip().splitlines())

    parts = [re.escape(part) for part in trimmed(shown).split(ANYTHING)]
    return re.fullmatch(".*".join(parts), trimmed(printed), re.DOTALL) is not None


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This environment's libraries without nanovllm: torch alone takes longer than all else."""
    # Hypothesis reads the source of every imported module in a folder of another name.
    folder = tmp_path_factory.mktemp("libraries") / "site-packages"
    folder.mkdir()
    for site in (path for path in sys.path if path.endswith("-packages")):
        for entry in Path(site).iterdir():
            ours = "nanovllm" in entry.name.lower() or entry.suffix == ".pth"
            if not ours and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.mark.long
@pytest.mark.slow  # an environment and several suites each
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_holds_word_for_word(
    tutorial: Path, wheels: dict[str, Path], libraries: Path, tmp_path: Path
) -> None:
    """It ends with a conformance suite that passes, on a plugin that was not there before."""
    checkout, folder = tmp_path / "nanovllm", tmp_path / "empty"
    (checkout / "dist").mkdir(parents=True)
    folder.mkdir()
    for name, wheel in wheels.items():
        if not name.startswith("nanovllm_example_"):  # what `make wheels` builds
            shutil.copy(wheel, checkout / "dist")
    # The libraries are this environment's, whatever their versions.
    (checkout / "constraints.txt").touch()
    shell = Shell(folder)
    try:
        for step, following in pairwise([*steps(tutorial), None]):
            if isinstance(step, Write):
                (folder / step.name).write_text(step.text, encoding="utf-8")
            elif isinstance(step, Run):
                printed, status = shell.run(step.command)
                told = f"$ {step.command}\n{printed}"
                assert is_as_shown(step.output, printed), f"{told}\nnot as shown:\n{step.output}"
                asked = isinstance(following, Run) and following.command == "echo $?"
                assert asked or status == 0, f"{told}\nexit status {status}"
            for site in folder.glob("fresh/lib/*/site-packages"):
                (site / "libraries.pth").write_text(f"{libraries}\n")
    finally:
        shell.close()


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_goes_from_the_scaffold_to_a_suite_that_passes(tutorial: Path) -> None:
    """What the test above executes is what makes it a tutorial, and the last suite is green."""
    commands = [step.command for step in steps(tutorial) if isinstance(step, Run)]
    assert any(command.startswith("nanovllm plugins new ") for command in commands)
    assert any(isinstance(step, Write) and step.name.endswith(".py") for step in steps(tutorial))
    suites = [
        step.output
        for step in steps(tutorial)
        if isinstance(step, Run) and step.command.startswith("nanovllm plugins test")
    ]
    assert "keeps the contract" in suites[-1]
    assert any("BREAKS the contract" in suite for suite in suites), "it is seen to fail, too"


def paste(tutorial: Path, into: Path) -> Path:
    """The package that a tutorial's reader has at the end, without an environment to run it in."""
    package = into
    for step in steps(tutorial):
        if isinstance(step, Write):
            (into / step.name).write_text(step.text, encoding="utf-8")
        elif step.command.startswith("nanovllm plugins new "):
            kind, name = step.command.split()[3:]
            package = new_plugin(kind, name, into)
    return package


def workflow(package: Path, tool: str) -> list[str]:
    """The commands of a package's own CI file that begin with this tool's name."""
    file = (package / ".github/workflows/test.yml").read_text(encoding="utf-8")
    lines = re.findall(rf"- run: ({tool} .*)", file)
    assert lines, file
    return lines


def check(package: Path, tool: str) -> None:
    for line in workflow(package, tool):
        result = subprocess.run(
            f'PATH="{Path(sys.executable).parent}:$PATH"; {line}',
            shell=True,
            cwd=package,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_s_package_passes_its_own_linter(tutorial: Path, tmp_path: Path) -> None:
    """As its CI file runs ruff: lines that are too long stand out here, before anyone pastes."""
    check(paste(tutorial, tmp_path), "ruff")


@pytest.mark.slow  # mypy reads torch
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_s_package_passes_its_own_type_checker(
    tutorial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its CI file runs mypy, strictly."""
    monkeypatch.setenv("MYPY_CACHE_DIR", str(ROOT / ".mypy_cache"))
    check(paste(tutorial, tmp_path), "mypy")


def test_a_tutorial_s_readme_names_the_options_of_its_policy(tmp_path: Path) -> None:
    """Those of the template are gone."""
    package = paste(ROOT / "docs/tutorials/scheduler_policy.md", tmp_path)
    declared = (package / "nanovllm_scheduler_lanes/plugin.py").read_text(encoding="utf-8")
    readme = (package / "README.md").read_text(encoding="utf-8")
    [options] = re.findall(r"options: \{(.*)\}", readme)
    names = re.findall(r"(\w+):", options)
    assert names == re.findall(r"^    (\w+): int = Field", declared, re.MULTILINE)
    assert "ageing" not in readme
