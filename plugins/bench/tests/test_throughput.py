"""The share of a throughput where several devices compute is that of the floor of one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nanovllm_bench import throughput
from nanovllm_bench.rates import model_costs
from nanovllm_bench.roofline import Rates, generate_floor, recompute
from nanovllm_bench.throughput import Gauge, computes_here, device_of
from nanovllm_bench.workloads import ragged_workload, recorded_workload
from nanovllm_core import LLM
from nanovllm_core.cli.main import make_app
from nanovllm_core.config import EngineConfig

for plugin in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

RATES = Rates(copy_bytes_per_s=1e10, matmul_flops_per_s=1e12)
WORKLOAD = ragged_workload(5, 8, 32)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement of this machine."""
    monkeypatch.setattr(throughput, "measure_rates", lambda *_: RATES)


def gauge_of(device: str, **settings: Any) -> Gauge:
    """Of an engine with these settings that says it runs on `device`."""
    config = EngineConfig(model="demo", device="cpu", **settings)
    llm: Any = SimpleNamespace(info=SimpleNamespace(device=device, dtype="float32"), config=config)
    return Gauge.of(llm)


def test_the_share_of_ranks_is_of_the_floor_of_one() -> None:
    """Each reads its own part of the weights and of the heads."""
    pytest.importorskip("nanovllm_executor_parallel", reason="needs executor_parallel")
    gauge = gauge_of("2 x cpu", tensor_parallel_size=2)
    of_rank = model_costs(EngineConfig(model="demo"), torch.float32, 2)
    floor = generate_floor(of_rank, WORKLOAD.lengths, 4, RATES)
    assert gauge.roofline(WORKLOAD, 4, 2 * floor.seconds)["share"] == 0.5
    assert gauge.device == torch.device("cpu")


def test_the_share_of_engines_is_of_the_requests_of_one() -> None:
    """They take turns, so the first of two has three of five requests."""
    pytest.importorskip("nanovllm_engine_processes", reason="needs engine_processes")
    gauge = gauge_of("2 of 2 engines x cpu", data_parallel_size=2)
    costs = model_costs(EngineConfig(model="demo"), torch.float32)
    lengths = [WORKLOAD.lengths[index] for index in (0, 2, 4)]
    floor = generate_floor(costs, lengths, 4, RATES)
    record = gauge.roofline(WORKLOAD, 4, 2 * floor.seconds)
    assert record["share"] == 0.5
    assert recompute(json.loads(json.dumps(record)), WORKLOAD.lengths, 4) == floor


def test_the_rates_of_the_device_are_measured_behind_the_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the kernels of the measurement would make those of the runs begin later."""
    seen: list[str] = []
    timed = throughput.timed_generate
    monkeypatch.setattr(
        throughput, "timed_generate", lambda *args: (seen.append("run"), timed(*args))[1]
    )
    monkeypatch.setattr(throughput, "measure_rates", lambda *_: (seen.append("rates"), RATES)[1])
    with LLM(model="demo", device="cpu", limits={"max_model_len": 64}) as llm:
        record = throughput.measure_throughput(llm, ragged_workload(2, 8, 16), runs=2)
    assert seen == ["run", "run", "run", "rates"]
    assert record["roofline"]["share"] > 0


def test_memory_and_utilisation_of_another_process_are_unknown() -> None:
    pytest.importorskip("nanovllm_engine_processes", reason="needs engine_processes")
    here, apart = gauge_of("cpu"), gauge_of("cpu", engine_client={"name": "processes"})
    assert apart.peak_memory_gib() is None
    with apart.utilisation() as utilisation:
        assert utilisation.mean is None
    assert here.peak_memory_gib() is None or here.peak_memory_gib() > 0
    assert here.roofline(WORKLOAD, 4, 1.0) == apart.roofline(WORKLOAD, 4, 1.0)


@pytest.mark.parametrize(
    ("settings", "here"),
    [
        ({}, True),
        ({"engine_client": {"name": "thread"}}, True),
        ({"engine_client": {"name": "processes"}}, False),
        ({"data_parallel_size": 2}, False),
        ({"tensor_parallel_size": 2}, False),
        ({"executor": {"name": "parallel"}}, False),
    ],
    ids=str,
)
def test_an_engine_computes_here_on_a_thread_with_its_only_rank(
    settings: dict[str, Any], here: bool
) -> None:
    for plugin in ("executor_parallel", "engine_processes"):
        pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")
    assert computes_here(EngineConfig(model="demo", **settings)) is here


@pytest.mark.parametrize("ran", ["NVIDIA H200", "2 x NVIDIA H200", "1 of 2 engines x NVIDIA H200"])
def test_rates_are_those_of_the_first_gpu_of_an_engine(
    ran: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the configuration, or else the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for configured, device in (("cuda:1", "cuda:1"), ("auto", "cuda:0"), ("cuda", "cuda:0")):
        config = EngineConfig(model="demo", device=configured)
        llm: Any = SimpleNamespace(info=SimpleNamespace(device=ran), config=config)
        assert device_of(llm) == torch.device(device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "plugin"),
    [
        ("tensor_parallel_size", "nanovllm_executor_parallel"),
        ("data_parallel_size", "nanovllm_engine_processes"),
    ],
)
@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_two_processes_of_a_cpu_are_measured(
    command: str, size: str, plugin: str, tmp_path: Path
) -> None:
    """Their memory is not that of the command, so the result has none."""
    pytest.importorskip(plugin, reason=f"needs {plugin}")
    out = tmp_path / "out.json"
    arguments = ["bench", command, "--model", "demo", "--device", "cpu", "--max-model-len", "64"]
    lengths = ["--num-seqs", "3", "--input-len", "8", "--output-len", "8"]
    settings = ["--set", f"{size}=2", "--set", "cache.num_blocks=64", "--out", str(out)]
    result = CliRunner().invoke(make_app(), [*arguments, *lengths, *settings])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "not known here" in result.output
    record = json.loads(out.read_text())
    assert record["peak_memory_gib"] is record["gpu_utilisation"] is None
    if command == "throughput":
        floor = recompute(
            record["roofline"], recorded_workload(record).lengths, record["max_num_seqs"]
        )
        assert record["roofline"]["floor_seconds"] == pytest.approx(floor.seconds, abs=1e-6)
