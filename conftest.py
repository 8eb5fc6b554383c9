"""Fixtures that test files of several folders share; reports on request.

Before any test imports Triton: without a GPU, kernels are interpreted.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from nanovllm_kit.interpreter import interpret_triton_without_cuda, quicken_interpreter

if interpret_triton_without_cuda():
    quicken_interpreter()

# A shell's background jobs begin without these signals, and so would the programs of the tests.
for number, action in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)

collect_ignore_glob = ["plugins/kit/nanovllm_kit/scaffold/templates/*"]
"""Their tests run in the packages that are made of them."""

Install = Callable[..., None]
SLOW_CASES = tuple(
    line
    for line in (Path(__file__).parent / "tests/slow_cases.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
KEPT_BYTES = 1 << 30
"""What a process may keep of a GPU's memory between its tests."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution for one test: metadata and modules in a folder on sys.path.

    `install("nanovllm-x", {"nanovllm.attention": {"x": "x_plugin"}}, {"x_plugin": "source"})`.
    """
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def install_distribution(
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str],
        version: str = "1.2.3",
    ) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for group, entries in entry_points.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source)

    yield install_distribution
    for module in set(sys.modules) - known:
        if (tmp_path / f"{module}.py").exists():
            del sys.modules[module]


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/generate.py, which writes the documents' tables; its own modules lie beside it."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "docs")
    return import_module("generate")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests/slow_cases.txt to the full run.

    Suites that plugins inherit cannot say so themselves: authors run them whole.
    """
    for item in items:
        if item.nodeid.startswith(SLOW_CASES):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what is imported out of all later garbage collections.

    An engine collects when it starts and, with all objects thawed, when it closes. Each collection
    would walk what pytest, torch and transformers have imported: most of a small engine's time.
    tests/e2e/test_start.py tests freezing and thawing in processes of their own.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give the GPU's memory back after each of its tests: other processes test beside this one."""
    if item.get_closest_marker("gpu") is None or (torch := sys.modules.get("torch")) is None:
        return
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        if torch.cuda.memory_reserved() > KEPT_BYTES:  # something of it is in a cycle
            gc.collect()
            torch.cuda.empty_cache()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report-json", type=Path, help="Write outcomes, environment and commit to this file."
    )


def seconds_by_distribution(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Seconds of setup, test and teardown, by the distribution whose folder a test lies in."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        parts = Path(report.nodeid.partition("::")[0]).parts
        owner = parts[1] if parts[0] == "plugins" else "examples" if "examples" in parts else "core"
        seconds[owner] += report.duration
    return dict(sorted(seconds.items(), key=lambda one: -one[1]))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Seconds of each distribution's tests; on request, what was run where as a result file."""
    stats = terminalreporter.stats
    every = [one for found in stats.values() for one in found if hasattr(one, "duration")]
    # Some reports of a test are in two lists: its setup in "", its call in "passed".
    spent = seconds_by_distribution({id(one): one for one in every}.values())
    if len(spent) > 1:
        shown = ", ".join(f"{owner} {seconds:.0f}" for owner, seconds in spent.items())
        terminalreporter.write_line(f"seconds of tests by distribution: {shown}")
    file: Path | None = config.getoption("--report-json")
    if file is None:
        return
    from nanovllm_bench.environment import describe_environment

    kinds = ("passed", "failed", "error", "skipped")
    outcomes = Counter({kind: len(stats.get(kind, ())) for kind in kinds})
    report = {
        "command": " ".join(("pytest", *config.invocation_params.args)),
        "exit_status": int(exitstatus),
        "outcomes": dict(outcomes),
        "failures": [r.nodeid for kind in ("failed", "error") for r in stats.get(kind, ())],
        "skips": sorted({str(r.longrepr[2]) for r in stats.get("skipped", ())}),
        "tests": {r.nodeid: round(r.duration, 2) for r in stats.get("passed", ())},
        "environment": describe_environment(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
