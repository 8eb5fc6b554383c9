"""Against transformers' `generate`: the same requests and shapes, greedy, in one process.

transformers is measured in the two ways in which one can give it requests of different lengths: all
in one batch, padded on the left and run until the longest output is done, and one after another.
Only the tokens that were asked for count. All sides run as often, and the best run counts. Each
engine is closed before the next starts; ours streams its first tokens from a second one.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria

from nanovllm_bench.device import gib, peak_memory_bytes, reset_peak_memory
from nanovllm_bench.latency import percentiles, trace_requests
from nanovllm_bench.record import describe_engine
from nanovllm_bench.throughput import Gauge, timed_generate
from nanovllm_bench.workloads import Workload
from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import ConfigError, InconsistentStateError
from nanovllm_core.frontend import LLM, AsyncLLM
from nanovllm_core.registry import get_plugin_manager
from nanovllm_core.selection import find_checkpoint

MODES = ("batch", "single")


def compare_with_transformers(
    config: EngineConfig,
    workload: Workload,
    *,
    runs: int = 2,
    modes: Sequence[str] = MODES,
    threads: int | None = None,
) -> dict[str, Any]:
    """Throughput, time to first token and peak memory of both; the record of a result file.

    `threads` sets torch's CPU threads for both. `speed_up` holds our throughput over transformers'.
    """
    unknown = set(modes) - set(MODES)
    if unknown:
        raise ConfigError(f"transformers runs as {' or '.join(MODES)}, not as {sorted(unknown)}")
    if threads is not None:
        torch.set_num_threads(threads)
    ours, engine = _measure_ours(config, workload, runs)
    place, dtype = torch.device(ours.pop("place")), getattr(torch, engine["dtype"])
    model = _load(config, place, dtype)
    ids = workload.within(model.config.vocab_size)
    _runner(model, ids, modes[0])()  # as ours: a whole run that does not count
    theirs = {mode: _measure(_runner(model, ids, mode), ids, place, runs) for mode in modes}
    return {
        "benchmark": "compare",
        "against": "transformers",
        "workload": workload.name,
        "num_seqs": len(workload.prompts),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "threads": torch.get_num_threads(),
        "tokens_per_second": ours["tokens_per_second"],
        "speed_up": {
            mode: round(ours["tokens_per_second"] / result["tokens_per_second"], 3)
            for mode, result in theirs.items()
        },
        "ours": ours,
        "transformers": theirs,
        **engine,
    }


def _measure_ours(
    config: EngineConfig, workload: Workload, runs: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    with LLM.from_config(config) as llm:
        ids = workload.within(llm.info.vocab_size)
        gauge = Gauge.of(llm)
        timed_generate(llm, ids, 0.0)
        seconds = [timed_generate(llm, ids, 0.0) for _ in range(runs)]
        peak, engine = gauge.peak_memory_gib(), describe_engine(llm)
    result = {
        **_summary(ids, seconds, _first_token_ms(config, ids), peak),
        "roofline": gauge.roofline(ids, config.limits.max_num_seqs, min(seconds)),
        "place": str(gauge.device),
    }
    return result, engine


def _first_token_ms(config: EngineConfig, workload: Workload) -> list[float]:
    """Of a second run of the requests, all at once, on an engine that streams."""
    at_once = [0.0] * len(workload.prompts)
    with closing(AsyncLLM.from_config(config)) as llm:
        asyncio.run(trace_requests(llm, workload, at_once, 0.0))
        llm.reset_prefix_cache()
        return asyncio.run(trace_requests(llm, workload, at_once, 0.0)).first_token_ms()


def _summary(
    workload: Workload, seconds: Sequence[float], first_ms: Sequence[float], peak: float | None
) -> dict[str, Any]:
    return {
        "tokens_per_second": round(workload.num_output_tokens / min(seconds), 1),
        "seconds": [round(one, 4) for one in seconds],
        "ttft_ms": percentiles(first_ms),
        "raw_ttft_ms": [round(ms, 3) for ms in first_ms],
        "peak_memory_gib": peak,
    }


def _load(config: EngineConfig, place: torch.device, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers loads it, or random weights of its shapes."""
    gc.collect()
    checkpoint: Path = find_checkpoint(get_plugin_manager(), config.model)
    if config.load_format == "dummy":
        shape = AutoConfig.from_pretrained(checkpoint)
        make: Any = AutoModelForCausalLM.from_config  # not annotated by transformers
        with place:  # so that the numbers are drawn on a GPU too
            model = make(shape, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    return model.to(place).eval()


@dataclass(slots=True)
class FirstToken(StoppingCriteria):
    """Notes when the first token of a `generate` call is there; stops nothing."""

    seen: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.seen is None:
            if input_ids.device.type == "cuda":
                torch.cuda.synchronize(input_ids.device)
            self.seen = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _runner(model: Any, workload: Workload, mode: str) -> Callable[[], list[float]]:
    """A call that answers all requests and returns when each had its first token, in seconds."""
    groups = [slice(None)] if mode == "batch" else [slice(i, i + 1) for i in _indices(workload)]

    def run() -> list[float]:
        first: list[float] = []
        started = time.perf_counter()
        for group in groups:
            prompts = workload.prompts[group]
            seen = generate_padded(model, prompts, max(workload.output_lens[group]))
            first += [seen - started] * len(prompts)
        return first

    return run


def _indices(workload: Workload) -> range:
    return range(len(workload.prompts))


def generate_padded(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Greedy `generate` of one left-padded batch; the time at which its first tokens were there."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    first = FirstToken()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[first],
        )
    if out.shape[1] != longest + num_tokens or first.seen is None:
        raise InconsistentStateError(
            f"transformers gave {out.shape[1] - longest} tokens, {num_tokens} were asked for"
        )
    return first.seen


def _measure(
    run: Callable[[], list[float]], workload: Workload, place: torch.device, runs: int
) -> dict[str, Any]:
    """Run `runs` times; a synchronised wall time each, and the peak of these runs alone."""
    seconds, first = [], []
    reset_peak_memory(place)
    for _ in range(runs):
        started = time.perf_counter()
        first = run()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - started)
    peak = gib(peak_memory_bytes(place))
    return _summary(workload, seconds, [1e3 * one for one in first], peak)
