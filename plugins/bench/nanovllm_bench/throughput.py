"""Offline throughput: output tokens per second of one `generate` call, prefill included."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nanovllm_bench.device import GpuUtilisation, gib, peak_memory_bytes, reset_peak_memory
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
from nanovllm_core.engine import EngineStats
from nanovllm_core.errors import InconsistentStateError
from nanovllm_core.frontend import LLM, Door
from nanovllm_core.interfaces.sampling_params import NEUTRAL, SamplingParams


@dataclass(frozen=True, slots=True)
class Gauge:
    """What shares are taken of: the costs of the model that runs and the rates of its device."""

    device: torch.device
    costs: ModelCosts
    rates: Rates
    peak_at_start: int | None

    @classmethod
    def measure(cls, llm: Door) -> Gauge:
        """Measure the device that `llm` runs on, beside its idle engine."""
        on_cpu = llm.info.device == "cpu"
        # An engine makes its GPU the current one.
        device = (
            torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        )
        dtype = getattr(torch, llm.info.dtype)
        peak = peak_memory_bytes(device)
        rates = measure_rates(device, dtype)
        reset_peak_memory(device)  # the buffers of the measurement are not the engine's
        return cls(device, model_costs(llm.config, dtype), rates, peak)

    def peak_memory_gib(self) -> float | None:
        """The engine's peak, its start included; None where the system does not tell."""
        peak = peak_memory_bytes(self.device)
        return None if peak is None else gib(max(peak, self.peak_at_start or 0))

    def roofline(self, workload: Workload, max_num_seqs: int, seconds: float) -> dict[str, Any]:
        """Floor and share of a workload that took `seconds`."""
        floor = generate_floor(self.costs, workload.lengths, max_num_seqs, self.rates)
        return roofline_record(self.costs, self.rates, floor, seconds)

    def step_roofline(self, rows: float, context: float, seconds: float) -> dict[str, Any]:
        """Floor and share of one decode step that took `seconds`.

        The share is None where these are 0: tokens of several steps were seen at once.
        """
        floor = decode_step_seconds(self.costs, rows, context, self.rates)
        return {
            "share": round(floor / seconds, 4) if seconds else None,
            "floor_seconds": round(floor, 7),
            "costs": asdict(self.costs),
            "rates": asdict(self.rates),
        }


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
    gauge = Gauge.measure(llm)
    timed_generate(llm, workload, temperature)
    measured = measure_runs(llm, workload, gauge.device, temperature=temperature, runs=runs)
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
    llm: LLM, workload: Workload, device: torch.device, *, temperature: float, runs: int
) -> Runs:
    """`runs` timed runs, with the GPU's utilisation over all of them."""
    seconds: list[float] = []
    before = llm.stats
    with GpuUtilisation(device) as utilisation:
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
