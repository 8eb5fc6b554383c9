"""`benchmarks/sampling_over_ranks.py`: what sampling parameters cost beside plain rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_kind_of_row_is_measured_beside_plain_ones(tmp_path: Path) -> None:
    """Two ranks on a CPU: a rate for each kind, and its share of the first."""
    pytest.importorskip("nanovllm_executor_parallel", reason="needs the plugin executor_parallel")
    out = tmp_path / "sampling.json"
    command = [sys.executable, str(ROOT / "benchmarks/sampling_over_ranks.py"), "--model", "demo"]
    command += ["--rows", "2", "--output-tokens", "3", "--out", str(out)]
    command += ["--settings", json.dumps({"device": "cpu", "max_model_len": 512})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=300)
    kinds = json.loads(out.read_text())["rows"]["2"]
    assert kinds["plain"]["to_plain"] == 1
    assert len(kinds) == 6
    plain = kinds["plain"]["tokens_per_second"]
    for one in kinds.values():
        assert one["tokens_per_second"] / plain == pytest.approx(one["to_plain"], abs=0.02)
