"""Offline throughput: output tokens per second of one `generate` call, prefill included."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from nanovllm_bench.apart import run_aside
from nanovllm_bench.device import GpuUtilisation, gib, peak_memory_bytes
from nanovllm_bench.rates import measure_rates, model_costs
from nanovllm_bench.record import describe_engine
from nanovllm_bench.roofline import (
    ModelCosts,
    Rates,
    decode_step_seconds,
    generate_floor,
    roofline_record,
)
from nanovllm_bench.workloads import Workload
from nanovllm_core.config import EngineConfig
from nanovllm_core.engine import EngineStats
from nanovllm_core.errors import InconsistentStateError
from nanovllm_core.frontend import LLM, Door
from nanovllm_core.interfaces.sampling_params import NEUTRAL, SamplingParams
from nanovllm_core.selection import Decisions


@dataclass(frozen=True)
class Gauge:
    """The quantities behind a share: the costs of a rank, and the rates of its device.

    `is_here`: the engine computes in this process, where its memory and its GPU can be observed.
    """

    device: torch.device
    dtype: torch.dtype
    costs: ModelCosts
    num_engines: int = 1
    is_here: bool = True

    @classmethod
    def of(cls, llm: Door) -> Gauge:
        """Of the device that `llm` runs on, or one of several."""
        device, dtype = device_of(llm), getattr(torch, llm.info.dtype)
        costs = run_aside(model_costs, llm.config, dtype, llm.config.tensor_parallel_size)
        return cls(device, dtype, costs, llm.config.data_parallel_size, computes_here(llm.config))

    @cached_property
    def rates(self) -> Rates:
        """Measured at the first use, which comes behind all runs of an engine in this process.

        After some ten kernels on another stream, each kernel of an engine's steps begins later:
        see "What is captured" in docs/architecture.md.
        """
        return measure_rates(self.device, self.dtype)

    def utilisation(self) -> GpuUtilisation:
        """Of the engine's GPU; unknown where the engine is in another process."""
        return GpuUtilisation(self.device if self.is_here else None)

    def peak_memory_gib(self) -> float | None:
        """The peak so far: of a GPU since the engine's start, without one of the whole process.

        None where the engine is in another process, or the system does not tell.
        """
        return gib(peak_memory_bytes(self.device) if self.is_here else None)

    def roofline(self, workload: Workload, max_num_seqs: int, seconds: float) -> dict[str, Any]:
        """Floor and share of a workload that took `seconds`: of the requests of one engine."""
        lengths = workload.share(self.num_engines).lengths
        floor = generate_floor(self.costs, lengths, max_num_seqs, self.rates)
        return roofline_record(self.costs, self.rates, floor, seconds, num_engines=self.num_engines)

    def step_roofline(self, rows: float, context: float, seconds: float) -> dict[str, Any]:
        """Floor and share of one decode step of an engine that took `seconds`.

        The share is None where these are 0: tokens of several steps were seen at once.
        """
        floor = decode_step_seconds(self.costs, rows, context, self.rates)
        return {
            "share": round(floor / seconds, 4) if seconds else None,
            "floor_seconds": round(floor, 7),
            "costs": self.costs.as_record(),
            "rates": asdict(self.rates),
        }


def device_of(llm: Door) -> torch.device:
    """The device of an engine; the first of several GPUs."""
    if llm.info.device.endswith("cpu"):
        return torch.device("cpu")
    _, _, index = llm.config.device.partition(":")
    # An engine of this process makes its GPU the current one.
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())


def computes_here(config: EngineConfig) -> bool:
    """Whether the engine is on a thread of this process, and so is its only rank."""
    decisions = Decisions(config)
    [client], [executor] = decisions.named("engine_client"), decisions.named("executor")
    return (client.name, executor.name) == ("thread", "single")


@dataclass(frozen=True, slots=True)
class Runs:
    """The raw wall times of the counted runs, and the engine's counters around the last one."""

    seconds: list[float]
    before: EngineStats
    after: EngineStats
    gpu_utilisation: float | None

    @property
    def steps(self) -> int:
        """Steps of the last run."""
        return self.after.steps - self.before.steps

    @property
    def host_us_per_step(self) -> float:
        """Planning, submitting and absorbing in the last run, without waiting."""
        return _microseconds(self.after.host_seconds - self.before.host_seconds, self.steps)

    @property
    def host_us_per_steady_step(self) -> float:
        """The same over decode steps of unchanged rows."""
        return _microseconds(
            self.after.steady_seconds - self.before.steady_seconds,
            self.after.steady_steps - self.before.steady_steps,
        )


def measure_throughput(
    llm: LLM, workload: Workload, *, temperature: float = 0.6, runs: int = 3
) -> dict[str, Any]:
    """Run the workload once to warm up, then `runs` times; the record of a result file.

    Every run computes its prompts anew and must give every token. `tokens_per_second` is output
    tokens over the best run's time; `seconds` are all counted runs.
    """
    workload = workload.within(llm.info.vocab_size)
    gauge = Gauge.of(llm)
    timed_generate(llm, workload, temperature)
    measured = measure_runs(llm, workload, gauge, temperature=temperature, runs=runs)
    return describe_runs(llm, workload, gauge, measured, temperature)


def describe_runs(
    llm: LLM, workload: Workload, gauge: Gauge, measured: Runs, temperature: float
) -> dict[str, Any]:
    """The record of a result file."""
    best = min(measured.seconds)
    return {
        "benchmark": "throughput",
        "tokens_per_second": round(workload.num_output_tokens / best, 1),
        "workload": workload.name,
        "num_seqs": len(workload.prompts),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "temperature": temperature,
        "seconds": [round(seconds, 4) for seconds in measured.seconds],
        "steps": measured.steps,
        "host_us_per_step": measured.host_us_per_step,
        "host_us_per_steady_step": measured.host_us_per_steady_step,
        "gpu_utilisation": measured.gpu_utilisation,
        "peak_memory_gib": gauge.peak_memory_gib(),
        "roofline": gauge.roofline(workload, llm.config.limits.max_num_seqs, best),
        **describe_engine(llm),
    }


def measure_runs(
    llm: LLM, workload: Workload, gauge: Gauge, *, temperature: float, runs: int
) -> Runs:
    """`runs` timed runs, with the GPU's utilisation over all of them."""
    seconds: list[float] = []
    before = llm.stats
    with gauge.utilisation() as utilisation:
        for _ in range(runs):
            before = llm.stats
            seconds.append(timed_generate(llm, workload, temperature))
    return Runs(seconds, before, llm.stats, utilisation.mean)


def timed_generate(llm: LLM, workload: Workload, temperature: float) -> float:
    """Seconds of one `generate` call with an empty prefix cache; every token must come."""
    params = sampling_params(workload, temperature)
    llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    produced = sum(len(output.token_ids) for output in outputs)
    if produced != workload.num_output_tokens:
        raise InconsistentStateError(
            f"the workload asks for {workload.num_output_tokens} output tokens, {produced} came"
        )
    return elapsed


def sampling_params(workload: Workload, temperature: float) -> list[SamplingParams]:
    """Those of each request: as many tokens as the workload says, by temperature alone."""
    choice = {**NEUTRAL, "temperature": temperature}
    return [
        SamplingParams(**choice, max_tokens=length, ignore_eos=True)
        for length in workload.output_lens
    ]


def _microseconds(seconds: float, count: int) -> float:
    return round(seconds / max(count, 1) * 1e6, 1)
