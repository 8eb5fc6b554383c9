"""`benchmarks/parallel.py`: layouts, workloads, and a record of a model on one rank and on two."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm_bench.roofline import Rates
from nanovllm_core.config import load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "parallel.py"


def test_a_layout_names_ranks_or_engines() -> None:
    """The way of all-reduces is an option of the executor; without one its default holds."""
    settings_of = runpy.run_path(str(SCRIPT))["settings_of"]
    assert settings_of("2") == ({"tensor_parallel_size": 2}, 1)
    assert settings_of("d3") == ({"data_parallel_size": 3}, 3)
    settings, engines = settings_of("4:nccl")
    assert settings["executor"] == {"name": "parallel", "options": {"all_reduce": "nccl"}}
    assert (settings["tensor_parallel_size"], engines) == (4, 1)


def test_engines_that_share_requests_get_each_as_often_as_there_are_engines() -> None:
    """Each engine's share has the lengths of the whole, and no prompt is another's."""
    workload_of = runpy.run_path(str(SCRIPT))["workload_of"]
    once, twice = workload_of("nano", 1), workload_of("nano", 2)
    assert once.lengths == twice.share(2).lengths
    assert twice.num_output_tokens == 2 * once.num_output_tokens
    assert len({tuple(prompt) for prompt in twice.prompts}) == 512
    assert workload_of("3 x 16/8", 2).lengths == [(16, 8)] * 6
    with pytest.raises(SystemExit, match="expected 'nano' or 'N x INPUT/OUTPUT'"):
        workload_of("3 by 16", 1)


def test_a_floor_is_that_of_one_rank_s_part() -> None:
    """Half of the layers' bytes with two ranks, and of the requests with two engines."""
    script = runpy.run_path(str(SCRIPT))
    config = load_config(str(ROOT / "benchmarks/configs/qwen3-8b"), env={})
    llm = SimpleNamespace(config=config, info=SimpleNamespace(dtype="bfloat16"))
    workload, rates = script["workload_of"]("4 x 512/64", 1), Rates(1e12, 1e15)

    def seconds(ranks: int, engines: int) -> float:
        floor: float = script["floor_seconds"](llm, ranks, workload, engines, rates)
        return floor

    assert seconds(2, 1) == pytest.approx(seconds(1, 1) / 2, rel=0.02)
    assert seconds(1, 2) < seconds(1, 1)


@pytest.mark.slow
def test_a_model_is_measured_on_each_layout(tmp_path: Path) -> None:
    """Random weights on a CPU; a layout that cannot start is recorded with its error."""
    pytest.importorskip("nanovllm_executor_parallel", reason="needs the plugin executor_parallel")
    out = tmp_path / "parallel.json"
    settings = {"device": "cpu", "attention": "sdpa"}
    written = json.loads((ROOT / "benchmarks/configs/qwen3-6x512/config.json").read_text())
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(written | sizes))
    command = [sys.executable, str(SCRIPT), "--layouts", "1", "2", "5", "--workloads", "2 x 8/4"]
    command += ["--model", str(tmp_path), "--device", "cpu"]
    command += ["--max-model-len", "64", "--settings", json.dumps(settings), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--runs", "1"], env=environment, check=True, timeout=300)
    layouts = json.loads(out.read_text())["layouts"]
    assert "heads" in layouts.pop("5")["error"]
    for layout in layouts.values():
        row = layout["workloads"]["2 x 8/4"]
        assert row["tokens_per_second"] > 0
        assert 0 < row["share_of_floor"] < 1.5
    assert layouts["1"]["late_steps"] == []
    assert all(late <= steps > 0 for late, steps in layouts["2"]["late_steps"])
    assert len(layouts["2"]["late_steps"]) == 2
