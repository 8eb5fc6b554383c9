"""Attention alone: each backend through its own contract, and a naive one, over lengths.

A batch of sequences of one length attends once, as it does in the engine: in a captured graph where
the backend supports it for that phase, else launched from Python. A graph, and every decode, has
one plan and many layers, each layer with blocks of its own, so that no cache holds what memory
should give; a prefill from Python has a plan and one layer. Launches are those of a plan and a
layer. Error is the relative norm of the difference to float64, peak memory what the backend and the
call take beyond their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm_bench.attention_cases import AttentionCase, AttentionSetup, make_case
from nanovllm_bench.device import available_memory_bytes
from nanovllm_bench.launches import count_launches
from nanovllm_bench.rates import measure_rates, times_of
from nanovllm_bench.roofline import Rates
from nanovllm_bench.table import OOM, OUT_OF_MEMORY, attention_named
from nanovllm_core.config import AttentionChoice
from nanovllm_core.errors import (
    ConfigError,
    NanoVLLMError,
    OutOfMemoryError,
    UnsupportedError,
    shown,
)
from nanovllm_core.interfaces.attention import (
    AttentionBackend,
)
from nanovllm_core.registry import get_plugin_manager, make_plugin
from nanovllm_core.selection import SMALLEST_BLOCK, evaluate

NAIVE = "naive"
LENGTHS = tuple(2**n for n in range(4, 14))
CACHE_BYTES = 2**28
"""Blocks of the layers of one timed call together: more than a GPU's cache holds."""

MAX_LAYERS = 256


@dataclass(frozen=True, slots=True)
class Contender:
    """What is measured: a backend and how it is made, or the naive attention."""

    name: str
    block_size: int
    captured: bool
    make: Callable[[AttentionCase], Any]


def contenders(setup: AttentionSetup, names: Sequence[str]) -> list[Contender]:
    """The backends by name; UnsupportedError where one cannot serve here."""
    return [_naive(setup) if name == NAIVE else _backend(setup, name) for name in names]


def able_backends(setup: AttentionSetup) -> list[str]:
    """Every installed backend that can serve here, and the naive one."""
    able = []
    for name in get_plugin_manager().names("attention"):
        try:
            able.append(_backend(setup, name).name)
        except NanoVLLMError:
            continue
    return [*able, NAIVE]


def _backend(setup: AttentionSetup, name: str) -> Contender:
    plugins = get_plugin_manager()
    if "+" in name:
        raise ConfigError(
            f"attention {shown(name)}: one phase has one backend; name the two by a comma"
        )
    choice = attention_named(name)
    choice = AttentionChoice(**(choice if isinstance(choice, dict) else {"backend": choice}))
    found = evaluate(plugins, choice, setup.requirements())
    if found.reasons:
        raise UnsupportedError(
            f"attention {shown(name)} cannot serve {setup.phase} here: {'; '.join(found.reasons)}",
            found.reasons,
        )
    # As the engine asks, for providers of one backend differ in what can be recorded of them.
    recorded = replace(setup.requirements(), cuda_graphs=True)
    captured = setup.device.type == "cuda" and not evaluate(plugins, choice, recorded).reasons
    multiple = found.layouts[0].block_multiple

    def make(case: AttentionCase) -> AttentionBackend:
        backend: AttentionBackend = make_plugin(found.resolved, case.config())
        backend.allocate()
        return backend

    return Contender(name, math.lcm(multiple, SMALLEST_BLOCK), captured, make)


def _naive(setup: AttentionSetup) -> Contender:
    """Captured in decode alone: a graph of prompts would keep their scores beside those outside."""
    captured = setup.device.type == "cuda" and setup.phase == "decode"
    return Contender(NAIVE, SMALLEST_BLOCK, captured, lambda _case: NaiveAttention())


class NaiveAttention:
    """softmax(q k^T) v with the scores of the whole batch in memory, as a text book has it."""

    def describe(self) -> str:
        """What runs."""
        return f"torch {torch.__version__}, scores in memory"

    def attend(self, case: AttentionCase, layer: int) -> None:
        """Attend the last `Q` positions of every sequence to the keys up to each."""
        rows, queries, length = case.batch, case.queries_per_row, case.length
        num_bytes = 3 * 4 * rows * case.num_heads * queries * length
        _check_host_memory(case.q_THD.device, "scores", num_bytes)
        group = case.num_heads // case.num_kv_heads
        k_BHLD, v_BHLD = (
            x.repeat_interleave(group, dim=1) for x in case.dense_keys_and_values(layer)
        )
        q_BHQD = case.q_THD.view(rows, queries, case.num_heads, -1).transpose(1, 2)
        scores_BHQL = (q_BHQD @ k_BHLD.transpose(-1, -2)).float() * case.scale
        if queries > 1:
            future_QL = torch.ones(queries, length, dtype=torch.bool, device=q_BHQD.device)
            scores_BHQL.masked_fill_(future_QL.triu(1 + length - queries), -torch.inf)
        out_BHQD = scores_BHQL.softmax(-1).to(q_BHQD.dtype) @ v_BHLD
        case.out_THD.copy_(out_BHQD.transpose(1, 2).flatten(0, 1))


def _check_host_memory(device: torch.device, what: str, num_bytes: int) -> None:
    """A CPU grants memory that it does not have and then kills the process; refuse before."""
    if device.type == "cpu":
        free = available_memory_bytes()
        if num_bytes > free:
            raise OutOfMemoryError(
                f"{what} need {num_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; "
                "measure shorter lengths or a smaller batch"
            )


def measure_attention(
    setup: AttentionSetup, names: Sequence[str], lengths: Iterable[int], repeats: int = 5
) -> dict[str, Any]:
    """Every contender at every length; the fields of a result file, without the environment."""
    rates = measure_rates(setup.device, setup.dtype)
    entered = contenders(setup, names)
    described: dict[str, str] = {}
    rows = []
    for length in lengths:
        cells: dict[str, Any] = {}
        for contender in entered:
            try:
                cells[contender.name] = _measure(
                    setup, contender, length, rates, repeats, described
                )
            except OUT_OF_MEMORY as error:
                cells[contender.name] = {"ms": OOM, "reason": str(error).splitlines()[0]}
            if setup.device.type == "cuda":
                torch.cuda.empty_cache()
        timed = {name: cell["ms"] for name, cell in cells.items() if cell["ms"] != OOM}
        winner = min(timed, key=timed.__getitem__) if timed else None
        rows.append({"length": length, "winner": winner, "backends": cells})
    return {
        "benchmark": "attention",
        "phase": setup.phase,
        "batch": setup.batch,
        "num_heads": setup.num_heads,
        "num_kv_heads": setup.num_kv_heads,
        "head_size": setup.head_size,
        "dtype": setup.requirements().dtype,
        "rates": {
            "copy_bytes_per_s": rates.copy_bytes_per_s,
            "matmul_flops_per_s": rates.matmul_flops_per_s,
        },
        "ran": described,
        "rows": rows,
    }


def _measure(
    setup: AttentionSetup,
    contender: Contender,
    length: int,
    rates: Rates,
    repeats: int,
    described: dict[str, str],
) -> dict[str, Any]:
    """One contender at one length."""
    layers = 1
    if contender.captured or setup.phase == "decode":
        layers = min(MAX_LAYERS, max(1, CACHE_BYTES // max(1, setup.kv_bytes(length))))
    needed = layers * setup.kv_bytes(length) + 2 * setup.query_bytes(length)
    _check_host_memory(setup.device, "queries, keys and values", needed)
    case = make_case(setup, contender.block_size, length, layers)
    inputs = _allocated(setup.device)
    backend = contender.make(case)
    described[contender.name] = backend.describe()
    call = _caller(setup, backend, case, layers)
    peak = _peak_bytes(setup.device, call)
    error = case.relative_error()
    launches = count_launches(_caller(setup, backend, case, 1), setup.device)
    timed = _capture(call) if contender.captured else call
    seconds = [taken / layers for taken in times_of(timed, setup.device, repeats)]
    best = min(seconds)
    return {
        "ms": round(1e3 * best, 6),
        "raw_ms": [round(1e3 * taken, 6) for taken in seconds],
        **_rate(setup, length, best, rates),
        "layers_per_call": layers,
        "cuda_graph": contender.captured,
        "launches": None if launches is None else len(launches),
        "grid": None if not launches else max(launches, key=lambda one: one.microseconds).grid,
        "relative_error": error,
        "peak_mib": None if peak is None else round((peak - inputs) / 2**20, 2),
    }


def _rate(setup: AttentionSetup, length: int, seconds: float, rates: Rates) -> dict[str, float]:
    """Bytes or operations per second, and the share of what the device reached alone."""
    if setup.phase == "decode":
        achieved = setup.kv_bytes(length) / seconds
        return {"tb_per_s": achieved / 1e12, "share": achieved / rates.copy_bytes_per_s}
    achieved = setup.flops(length) / seconds
    return {"tflop_per_s": achieved / 1e12, "share": achieved / rates.matmul_flops_per_s}


def _caller(
    setup: AttentionSetup, backend: Any, case: AttentionCase, layers: int
) -> Callable[[], None]:
    """One plan and the runs of `layers` layers, as the engine calls them."""
    if isinstance(backend, NaiveAttention):

        def run_naive() -> None:
            for layer in range(layers):
                backend.attend(case, layer)

        return run_naive
    if setup.phase == "decode":
        decode = case.decode_metadata()

        def run_decode() -> None:
            backend.plan_decode(decode)
            for k, v in case.caches[:layers]:
                backend.run_decode(case.q_THD, k, v, decode, case.out_THD)

        return run_decode
    prefill = case.prefill_metadata()

    def run_prefill() -> None:
        backend.plan_prefill(prefill)
        for k, v in case.caches[:layers]:
            backend.run_prefill(case.q_THD, k, v, prefill, case.out_THD)

    return run_prefill


def _allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def _peak_bytes(device: torch.device, call: Callable[[], None]) -> int | None:
    """What is allocated at most during a call, after one that compiles; None on a CPU."""
    call()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device))


def _capture(call: Callable[[], None]) -> Callable[[], None]:
    """The call as a captured graph, after a run on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
