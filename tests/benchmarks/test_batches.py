"""`benchmarks/batches.py`: a recorded batch by two schedulers, on a CPU."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from nanovllm_core import EngineConfig

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "batches.py"


def test_a_recorded_batch_runs_by_both_schedulers_and_its_waits_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four rows for six requests, so two wait; lpt has steps of its own size."""
    config = EngineConfig.model_validate(
        {
            "model": "demo",
            "device": "cpu",
            "limits": {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 200},
            "cache": {"num_blocks": 40, "block_size": 16},
        }
    )
    record = {"benchmark": "throughput", "workload": "6 x 20/9", "num_seqs": 6, "temperature": 0.0}
    file = tmp_path / "record.json"
    file.write_text(json.dumps({**record, "config": config.model_dump(mode="json")}), "utf-8")
    out = tmp_path / "out"
    command = ["batches.py", str(file), "--tokens", "24", "--runs", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.count("tok/s") == 2
    budgets = {}
    for name in ("fcfs", "lpt"):
        measured = json.loads((out / f"batch_demo_6_x_20_9_{name}.json").read_text("utf-8"))
        assert (measured["scheduler"], measured["output_tokens"]) == (name, 54)
        assert 0 < measured["mean_wait_seconds"] < measured["mean_end_seconds"]
        assert measured["preemptions"] == 0
        budgets[name] = measured["config"]["limits"]["max_num_batched_tokens"]
    assert budgets == {"fcfs": 200, "lpt": 24}
