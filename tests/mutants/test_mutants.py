"""The tool that changes lines: what it changes, and what it says of tests that do not notice."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from . import sample
from .__main__ import PROJECT
from .operators import mutants_of
from .recording import Project
from .sample import affordable, examine, keys_of, read_equivalents

SOURCE = '''
"""The toy's only module."""

LIMIT = 3


def clipped(value: int) -> int:
    """Never above LIMIT."""
    return min(value, LIMIT)


def until_zero(count: int) -> int:
    while count:
        count -= 1
    return count


def forgotten(value: int) -> bool:
    return value > 7
'''

TESTS = """
import subprocess
import sys

import toy

def test_values_are_clipped():
    assert [toy.clipped(value) for value in (2, 3, 4)] == [2, 3, 3]

def test_zero_is_reached():
    assert toy.until_zero(2) == 0

def test_a_process_of_its_own_sees_the_change():
    assert toy.forgotten(9)
    code = "import sys, toy; sys.exit(not toy.forgotten(9))"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_that_fails_anyway():
    toy.clipped(1)
    raise AssertionError
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    (root / "toy").mkdir()
    (root / "toy" / "__init__.py").write_text(SOURCE)
    (root / "tests" / "test_toy.py").write_text(TESTS)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow', 'gpu']\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setattr(sample, "STALLED_S", 1.0)
    return Project(root=root, rooms=("toy",), tests=("tests/test_*.py",))


def run(toy: Project, listed: str = "") -> tuple[int, dict[str, str]]:
    """The exit status, and the fate of every mutant that was drawn by what it reads."""
    state = toy.root.parent / "state"
    equivalents = toy.root.parent / "equivalent.toml"
    equivalents.write_text(listed)
    folder = Path(tempfile.mkdtemp(dir=toy.root.parent))
    status = examine(toy, folder, state=state, equivalents=equivalents, seed=1, count=100, jobs=2)
    report = json.loads((state / "report.json").read_text())
    return status, {one["mutated"]: one["fate"] for one in report["mutants"]}


LISTED = """
[[equivalent]]
file = "toy/__init__.py"
function = "forgotten"
original = "return value > 7"
mutated = "{}"
reason = "Nobody asks for 7."
"""


@pytest.mark.slow
def test_a_change_that_no_test_notices_survives_and_all_others_are_killed(toy: Project) -> None:
    """Endless loops are stopped, and a constant counts for those that use it."""
    status, fates = run(toy)
    survivors = {mutated for mutated, fate in fates.items() if fate == "survived"}
    assert status == 1
    assert len(fates) == 6  # one on each line that can be changed
    assert survivors <= {mutated for mutated in fates if mutated.startswith("return value > ")} | {
        "return (value >= 7)"
    }
    status, again = run(toy, "".join(LISTED.format(mutated) for mutated in survivors))
    assert status == 0
    assert again == {**fates, **dict.fromkeys(survivors, "listed")}


def test_a_process_of_its_own_sees_the_change_and_nothing_of_the_checkout_does(
    toy: Project,
) -> None:
    """The only test asks in another process."""
    (toy.root / "toy" / "__init__.py").write_text("def forgotten(value):\n    return not value\n")
    code = "import sys, toy; sys.exit(toy.forgotten(9) is not False)"
    (toy.root / "tests" / "test_toy.py").write_text(
        "import subprocess, sys\nimport toy\n\ndef test_it():\n    toy.forgotten(0)\n"
        f"    subprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
    )
    status, fates = run(toy)
    assert (status, *fates.values()) == (0, "killed")
    assert "return not value" in (toy.root / "toy" / "__init__.py").read_text()


def test_a_listed_mutant_that_no_line_gives_any_more_is_an_error(tmp_path: Path) -> None:
    listed = tmp_path / "equivalent.toml"
    listed.write_text(LISTED.format("return (value >= 7)"))
    (known,) = [m.key for m in mutants_of("toy/__init__.py", SOURCE) if ">= 7" in m.mutated]
    assert read_equivalents(listed, {known}) == {known: "Nobody asks for 7."}
    with pytest.raises(LookupError, match="return \\(value >= 7\\)"):
        read_equivalents(listed, set())


@pytest.mark.parametrize(
    ("line", "mutated"),
    [
        ("a < b <= c", {"(a <= b <= c)", "(a >= b <= c)", "(a < b < c)", "(a < b > c)"}),
        ("f(a, key=b)", {"pass", "f(a)"}),
        ("x = a[0]", {"x = a[-1]"}),
        ("x = a[:n]", {"x = a[:n + 1]"}),
        ("x = min(a, 2)", {"x = max(a, 2)", "x = min(a, 3)", "x = min(a, 1)"}),
        ("x.y = not a", {"pass", "x.y = (a)"}),
        ("x = a and b", {"x = (a or b)", "x = (a)", "x = (b)"}),
        ("x += 1", {"pass", "x -= 1", "x += 2", "x += 0"}),
        (
            "x = 1 if a else b",
            {"x = 1 if (not (a)) else b", "x = 2 if a else b", "x = 0 if a else b"},
        ),
        ("assert a", {"pass"}),
        ("del a[b]", {"pass"}),
        # Nothing here changes what a program does.
        ("x: Literal[3]", set()),
        ("raise ValueError(f'{a + 1}')", {"pass"}),
        ("assert a is not None", set()),
        ("'a docstring'", set()),
        ("logger.info(a + 1)", set()),
        ("from a import b", set()),
    ],
)
def test_each_kind_of_syntax_has_its_changes(line: str, mutated: set[str]) -> None:
    source = f"def f():\n    {line}\n"
    found = {m.mutated for m in mutants_of("a.py", source)}
    assert {text.split(": ", 1)[-1] for text in found} == mutated


@pytest.mark.parametrize("last", ["break", "continue", "return 1"])
def test_ways_out_of_a_loop_are_changed(last: str) -> None:
    source = f"def f():\n    for _ in a:\n        {last}\n"
    found = {m.mutated for m in mutants_of("a.py", source)}
    assert (
        found >= {"break": {"continue"}, "continue": {"break", "pass"}, "return 1": {"pass"}}[last]
    )


def test_a_change_is_one_of_bytes_and_leaves_all_else() -> None:
    source = "def f(a):\n    return 'é', a + 1  # ü\n"
    changed = {m.apply(source) for m in mutants_of("a.py", source)}
    assert "def f(a):\n    return 'é', (a - 1)  # ü\n" in changed


def test_the_quickest_tests_are_run_and_at_least_one() -> None:
    seconds = {"a": 100.0, "b": 20.0, "c": 30.0, "d": 15.0}
    assert affordable(["a"], seconds) == ["a"]
    assert affordable(["b", "c", "d"], seconds) == ["b", "c"]


def test_the_mutants_that_are_listed_as_equivalent_exist() -> None:
    """A stale entry stops `make mutants` at its beginning."""
    listed = Path(__file__).with_name("equivalent.toml")
    assert read_equivalents(listed, keys_of(PROJECT))
