"""Offline throughput: output tokens per second of one `generate` call, prefill included."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from nanovllm_core.bench.environment import describe_environment
from nanovllm_core.bench.workloads import Workload
from nanovllm_core.errors import InconsistentStateError
from nanovllm_core.llm import LLM
from nanovllm_core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """`seconds` are the raw wall times of the counted runs; the first run is never counted.

    `host_us_per_step` is what the host spent planning, submitting and absorbing in the last run,
    without waiting; `host_us_per_steady_step` the same over decode steps of unchanged rows.
    """

    workload: str
    num_seqs: int
    prompt_tokens: int
    output_tokens: int
    temperature: float
    device: str
    attention: str
    scheduler: str
    cuda_graphs: bool
    block_size: int
    num_blocks: int
    load_seconds: float
    capture_seconds: float
    seconds: list[float]
    steps: int
    host_us_per_step: float
    host_us_per_steady_step: float
    peak_memory_gib: float | None
    config: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=describe_environment)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the best run's time."""
        return self.output_tokens / min(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """Everything, for a result file."""
        return {"tokens_per_second": round(self.tokens_per_second, 1), **asdict(self)}


def measure_throughput(
    llm: LLM, workload: Workload, *, temperature: float = 0.6, runs: int = 3
) -> ThroughputResult:
    """Run the workload once to warm up, then `runs` times; every run must give every token."""
    workload = workload.within(llm.info.vocab_size)
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
        for length in workload.output_lens
    ]
    seconds: list[float] = []
    before = after = llm.stats
    for run in range(runs + 1):
        llm.reset_prefix_cache()
        before = llm.stats
        started = time.perf_counter()
        outputs = llm.generate(workload.prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - started
        produced = sum(len(output.token_ids) for output in outputs)
        if produced != workload.num_output_tokens:
            raise InconsistentStateError(
                f"the workload asks for {workload.num_output_tokens} output tokens, {produced} came"
            )
        if run:
            seconds.append(elapsed)
            after = llm.stats
    return ThroughputResult(
        workload=workload.name,
        num_seqs=len(workload.prompts),
        prompt_tokens=workload.num_prompt_tokens,
        output_tokens=workload.num_output_tokens,
        temperature=temperature,
        device=llm.info.device,
        attention=llm.info.attention,
        scheduler=llm.config.scheduler.name,
        cuda_graphs=llm.info.cuda_graphs,
        block_size=llm.info.block_size,
        num_blocks=llm.info.num_blocks,
        load_seconds=round(llm.info.load_seconds, 3),
        capture_seconds=round(llm.info.capture_seconds, 3),
        seconds=[round(s, 4) for s in seconds],
        steps=after.steps - before.steps,
        host_us_per_step=_microseconds(
            after.host_seconds - before.host_seconds, after.steps - before.steps
        ),
        host_us_per_steady_step=_microseconds(
            after.steady_seconds - before.steady_seconds, after.steady_steps - before.steady_steps
        ),
        peak_memory_gib=_peak_memory_gib(),
        config=llm.config.model_dump(mode="json"),
    )


def _microseconds(seconds: float, count: int) -> float:
    return round(seconds / max(count, 1) * 1e6, 1)


def _peak_memory_gib() -> float | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return round(torch.cuda.max_memory_reserved() / 2**30, 2)
