"""`benchmarks/asking.py`: what requests that ask for more cost beside plain ones."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from nanovllm_bench.workloads import Workload
from nanovllm_core import LLM

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "asking.py"


def test_every_kind_of_request_is_measured_beside_plain_ones() -> None:
    """On a CPU: the time of each turn, and the best of a kind over the best of plain requests."""
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")
    measure = runpy.run_path(str(SCRIPT))["measure"]
    workload = Workload("two", [[1, 2, 3], [4, 5]], [4, 3])
    with LLM("demo", device="cpu", max_model_len=64, max_num_seqs=2) as llm:
        kinds = measure(llm, workload, turns=2)
    assert kinds["plain"]["to_plain"] == 1
    assert len(kinds) == 4
    for one in kinds.values():
        assert len(one["seconds"]) == 2
        best = min(one["seconds"])
        assert one["tokens_per_second"] == pytest.approx(7 / best, rel=0.05)
        assert one["to_plain"] == pytest.approx(min(kinds["plain"]["seconds"]) / best, rel=0.05)
