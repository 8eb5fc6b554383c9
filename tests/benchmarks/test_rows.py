"""`benchmarks/rows.py`: versions by turns, and what their figures become."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "rows.py"


def test_the_best_turn_counts_and_percentiles_are_of_all_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The largest rate, the smallest start and host; of latencies every value."""
    script = runpy.run_path(str(SCRIPT))
    turns: dict[str, list[dict[str, Any]]] = {
        "before": [
            {"nano": 100.0, "start": 5.0, "host of nano": 9.0, "first": [1.0, 2.0]},
            {"nano": 90.0, "start": 4.0, "host of nano": 8.0, "first": [3.0, 50.0]},
        ],
        "after": [{"nano": 99.0, "start": 5.0, "host of nano": 8.0, "first": [2.0]}],
    }
    rows = script["summarise"](turns)
    assert rows == {
        "nano": {"before": 100.0, "after": 99.0},
        "start": {"before": 4.0, "after": 5.0},
        "host of nano": {"before": 8.0, "after": 8.0},
        "first token p50, ms": {"before": 3.0, "after": 2.0},
        "first token p99, ms": {"before": 50.0, "after": 2.0},
    }
    script["show"](rows)
    assert "after is -1.0% of before" in capsys.readouterr().out


@pytest.mark.slow
def test_a_version_is_measured_on_every_row(tmp_path: Path) -> None:
    """Tiny requests of random weights on a CPU: every row of the result has a figure."""
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), f"now={ROOT}", "--turns", "1", "--out", str(out)]
    model = ["--model", str(ROOT / "benchmarks/configs/qwen3-6x512"), "--attention", "sdpa"]
    small = ["--max-model-len", "64", "--requests", "3", "--scale", "0.004"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *model, *small], env=environment, check=True, timeout=300)
    rows = json.loads(out.read_text())["rows"]
    assert {"nano", "1 x 512/512", "64 x 1024/1024", "1 streamed", "start"} < set(rows)
    assert all(figures["now"] > 0 for row, figures in rows.items() if "host" not in row)
