"""Before any test imports Triton: without a GPU, kernels are interpreted. Reports on request."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from nanovllm_core.testing.interpreter import interpret_triton_without_cuda

interpret_triton_without_cuda()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report-json", type=Path, help="Write outcomes, environment and commit to this file."
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """What was run where, as a result file beside the benchmarks'."""
    file: Path | None = config.getoption("--report-json")
    if file is None:
        return
    from nanovllm_core.bench.environment import describe_environment

    stats = terminalreporter.stats
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
