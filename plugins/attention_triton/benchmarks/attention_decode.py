"""Decode bandwidth and prefill throughput of the Triton backend on one GPU.

    python benchmarks/attention_decode.py [--page 16] [--quick] [--json FILE]

Decode: the contexts of the nano workload's live requests at several steps, and uniform batches;
one plan and 28 layers inside a captured CUDA graph, over distinct caches (no layer is served by the
L2). TB/s counts the K and V bytes of the contexts, once. Prefill: causal, against torch's SDPA.
Every configuration is checked against torch before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.prefill import prefill_attention
from nanovllm_attention_triton.tuning import DecodeTuning, PrefillTuning
from nanovllm_core.interfaces.attention import AttentionConfig, DecodeMetadata

HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 128
LAYERS, CACHES = 28, 6
MAX_MODEL_LEN, MAX_NUM_SEQS = 4096, 256
STEPS = (1, 100, 300, 500, 800, 950)
UNIFORM = ((1, 768), (16, 768), (64, 768), (64, 1536))
DTYPE = torch.bfloat16
SCALE = HEAD_SIZE**-0.5


def nano_workload_contexts() -> dict[str, list[int]]:
    """The context lengths of the live requests at each decode step of the nano workload."""
    random.seed(0)
    prompts = []
    for _ in range(256):
        length = random.randint(100, 1024)
        prompts.append(length)
        for _ in range(length):
            random.randint(0, 10000)
    outputs = [random.randint(100, 1024) for _ in range(256)]
    contexts = {}
    for step in STEPS:
        live = [p + step for p, o in zip(prompts, outputs, strict=True) if o > step]
        contexts[f"step {step}"] = live
    for batch, length in UNIFORM:
        contexts[f"{batch} x {length}"] = [length] * batch
    return contexts


def bucket(batch: int) -> int:
    """The captured batch that serves `batch` rows: 1, 2, 4, then steps of 8."""
    return batch if batch in (1, 2, 4) else -(-batch // 8) * 8


@dataclass
class Case:
    """One batch in device memory: the metadata, the queries and the bytes a layer must read."""

    name: str
    contexts: list[int]
    metadata: DecodeMetadata
    q_BHD: Tensor  # noqa: N815 - shape suffix
    out_BHD: Tensor  # noqa: N815 - shape suffix

    @property
    def kv_bytes(self) -> int:
        return sum(self.contexts) * 2 * KV_HEADS * HEAD_SIZE * DTYPE.itemsize


def make_cases(page: int, num_pages: int) -> list[Case]:
    cases = []
    generator = torch.Generator().manual_seed(0)
    width = -(-MAX_MODEL_LEN // page)
    for name, contexts in nano_workload_contexts().items():
        rows = bucket(len(contexts))
        pages = torch.randperm(num_pages, generator=generator).int()
        table = torch.zeros(rows, width, dtype=torch.int32)
        used = 0
        for row, context in enumerate(contexts):
            count = -(-context // page)
            table[row, :count] = pages[used : used + count]
            used += count
        lens = torch.tensor(contexts + [0] * (rows - len(contexts)), dtype=torch.int32)
        q = torch.randn(rows, HEADS, HEAD_SIZE, dtype=DTYPE, device="cuda")
        metadata = DecodeMetadata(table.cuda(), lens.cuda(), max_seq_len=MAX_MODEL_LEN)
        cases.append(Case(name, contexts, metadata, q, torch.empty_like(q)))
    return cases


def make_backend(page: int, tuning: DecodeTuning) -> TritonAttention:
    config = AttentionConfig(
        device=torch.device("cuda"),
        dtype=DTYPE,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        scale=SCALE,
        block_size=page,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=16384,
    )
    backend = TritonAttention(config, TritonOptions())
    backend.decode_tuning = tuning
    backend.allocate()
    return backend


def check_decode(case: Case, k_cache: Tensor, v_cache: Tensor) -> None:
    """The first and the longest row equal torch's attention."""
    page = k_cache.shape[1]
    longest = max(range(len(case.contexts)), key=case.contexts.__getitem__)
    for row in {0, longest}:
        context = case.contexts[row]
        pages = case.metadata.block_table[row, : -(-context // page)].long()
        k = k_cache[pages].flatten(0, 1)[:context].transpose(0, 1)[None].float()
        v = v_cache[pages].flatten(0, 1)[:context].transpose(0, 1)[None].float()
        q = case.q_BHD[row][None, :, None].float()
        expected = scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True)[0, :, 0]
        error = ((case.out_BHD[row].float() - expected).norm() / expected.norm()).item()
        if not error < 4e-3:
            raise SystemExit(f"{case.name} row {row}: relative error {error:.2e}: not timing it")


def time_decode(backend: TritonAttention, case: Case, caches: list[tuple[Tensor, Tensor]]) -> float:
    """Seconds per layer of one plan and LAYERS runs, replayed as one graph; best of 5."""

    def step() -> None:
        backend.plan_decode(case.metadata)
        for layer in range(LAYERS):
            k, v = caches[layer % CACHES]
            backend.run_decode(case.q_BHD, k, v, case.metadata, case.out_BHD)

    step()
    torch.cuda.synchronize()
    check_decode(case, *caches[(LAYERS - 1) % CACHES])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return best_time(graph.replay, repeats=5) / LAYERS


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap


def best_time(call: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` runs in seconds, measured on the device."""
    call()
    times = []
    for _ in range(repeats):
        start, end = (_event(), _event())
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e-3)
    return min(times)


def decode_sweep(quick: bool) -> list[DecodeTuning]:
    """Ways to cut the work at the default compilation, then compilations at the default cut."""
    base = DecodeTuning()
    if quick:
        return [base]
    cuts = [
        replace(base, wave_programs=wave, max_chunk=chunk, max_programs=programs)
        for wave, chunk, programs in (
            (3, 512, 16),
            (3, 512, 8),
            (3, 512, 32),
            (3, 1024, 8),
            (3, 256, 32),
            (6, 512, 16),
            (2, 512, 16),
            (12, 512, 16),
        )
    ]
    compilations = [
        replace(base, tile=tile, num_warps=warps, num_stages=stages)
        for tile, warps, stages in itertools.product((64, 128), (2, 4), (2, 3, 4))
        if (tile, warps) != (128, 2) and (tile, warps, stages) != (64, 4, 3)
    ] + [
        replace(base, tile=32, num_warps=warps, num_stages=stages)
        for warps, stages in ((2, 3), (2, 5), (1, 4))
    ]
    return cuts + compilations


def describe(tuning: DecodeTuning) -> str:
    return (
        f"tile {tuning.tile:3d} warps {tuning.num_warps} stages {tuning.num_stages} "
        f"wave {tuning.wave_programs:2d} chunk <= {tuning.max_chunk:4d} "
        f"max {tuning.max_programs:2d}"
    )


def bench_decode(page: int, quick: bool, deadline: float) -> list[dict[str, Any]]:
    num_pages = max(
        sum(-(-context // page) for context in contexts)
        for contexts in nano_workload_contexts().values()
    )
    pages_of_a_cache = (num_pages, page, KV_HEADS, HEAD_SIZE)
    caches = [
        (
            torch.randn(pages_of_a_cache, dtype=DTYPE, device="cuda"),
            torch.randn(pages_of_a_cache, dtype=DTYPE, device="cuda"),
        )
        for _ in range(CACHES)
    ]
    cases = make_cases(page, num_pages)
    print(f"\ndecode, page {page}, TB/s (28 layers and one plan per graph)")
    print(" " * 52 + " ".join(f"{case.name:>9s}" for case in cases))
    print(" " * 52 + " ".join(f"{len(case.contexts):9d}" for case in cases))
    rows = []
    for tuning in decode_sweep(quick):
        if time.monotonic() > deadline:
            print("time is up: the rest of the sweep is left out")
            break
        try:
            backend = make_backend(page, tuning)
            seconds = [time_decode(backend, case, caches) for case in cases]
        except Exception as error:  # one that does not compile is a row of the table
            print(f"{describe(tuning)}  {type(error).__name__}: {str(error)[:80]}")
            continue
        rates = [case.kv_bytes / s / 1e12 for case, s in zip(cases, seconds, strict=True)]
        print(f"{describe(tuning):52s}" + " ".join(f"{rate:9.2f}" for rate in rates), flush=True)
        rows.append(
            {
                "phase": "decode",
                "page": page,
                "tuning": asdict(tuning),
                "ran": backend.describe(),
                "seconds_per_layer": dict(zip([c.name for c in cases], seconds, strict=True)),
                "tb_per_s": dict(zip([c.name for c in cases], rates, strict=True)),
            }
        )
    return rows


PREFILL_SHAPES = ((16, 1024), (4, 4096), (1, 8192))
PREFILL_SWEEP = (
    PrefillTuning(block_m=128, block_n=64, num_warps=8, num_stages=3),
    PrefillTuning(block_m=128, block_n=64, num_warps=8, num_stages=2),
    PrefillTuning(block_m=128, block_n=128, num_warps=8, num_stages=2),
    PrefillTuning(block_m=128, block_n=128, num_warps=8, num_stages=3),
    PrefillTuning(block_m=128, block_n=64, num_warps=4, num_stages=2),
    PrefillTuning(block_m=64, block_n=64, num_warps=4, num_stages=2),
    PrefillTuning(block_m=64, block_n=128, num_warps=4, num_stages=2),
    PrefillTuning(block_m=64, block_n=64, num_warps=4, num_stages=3),
)


@dataclass
class Prompts:
    """`batch` whole prompts of `length` tokens, dense for torch and in shuffled pages for us."""

    batch: int
    length: int
    q_THD: Tensor  # noqa: N815 - shape suffix
    k_THD: Tensor  # noqa: N815 - shape suffix
    v_THD: Tensor  # noqa: N815 - shape suffix
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out_THD: Tensor  # noqa: N815 - shape suffix

    @property
    def flops(self) -> int:
        """Two products of half the square, 2 operations per multiply-add."""
        return 2 * self.batch * self.length**2 * HEADS * HEAD_SIZE

    def run_torch(self, kernel: SDPBackend) -> Tensor:
        """torch's SDPA -> [batch, heads, length, head size]."""
        q, k, v = (
            x.view(self.batch, self.length, -1, HEAD_SIZE).transpose(1, 2)
            for x in (self.q_THD, self.k_THD, self.v_THD)
        )
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def run_triton(self, tuning: PrefillTuning) -> None:
        """Our kernel, into `out_THD`."""
        prefill_attention(
            self.q_THD,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.length,
            SCALE,
            self.out_THD,
            tuning,
        )


def make_prompts(batch: int, length: int, page: int) -> Prompts:
    tokens = batch * length
    q = torch.randn(tokens, HEADS, HEAD_SIZE, dtype=DTYPE, device="cuda")
    k, v = (torch.randn(tokens, KV_HEADS, HEAD_SIZE, dtype=DTYPE, device="cuda") for _ in range(2))
    pages = torch.randperm(tokens // page, device="cuda")
    k_cache, v_cache = (torch.empty_like(x).view(-1, page, KV_HEADS, HEAD_SIZE) for x in (k, v))
    k_cache[pages], v_cache[pages] = k.view_as(k_cache), v.view_as(v_cache)
    table = pages.int().view(batch, -1)
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    out = torch.empty_like(q)
    return Prompts(batch, length, q, k, v, k_cache, v_cache, table, lens, starts, out)


def bench_prefill(page: int, quick: bool, deadline: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(f"\nprefill, page {page}, TFLOP/s, causal")

    def record(prompts: Prompts, name: str, call: Callable[[], object]) -> None:
        rate = prompts.flops / best_time(call, repeats=10) / 1e12
        print(f"{prompts.batch:3d} x {prompts.length}  {name:32s} {rate:6.0f}", flush=True)
        shape = [prompts.batch, prompts.length]
        rows.append({"phase": "prefill", "shape": shape, "ran": name, "tflop_per_s": rate})

    for batch, length in PREFILL_SHAPES:
        prompts = make_prompts(batch, length, page)
        expected = prompts.run_torch(SDPBackend.FLASH_ATTENTION).transpose(1, 2).flatten(0, 1)
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                record(prompts, f"torch {kernel.name}", partial(prompts.run_torch, kernel))
            except RuntimeError as error:
                print(f"{batch:3d} x {length}  torch {kernel.name}: {str(error)[:60]}")
        for tuning in PREFILL_SWEEP[:1] if quick else PREFILL_SWEEP:
            if time.monotonic() > deadline:
                print("time is up: the rest of the sweep is left out")
                break
            name = (
                f"triton {tuning.block_m}x{tuning.block_n} warps {tuning.num_warps} "
                f"stages {tuning.num_stages}"
            )
            try:
                prompts.run_triton(tuning)
            except Exception as error:  # one that does not compile is a row of the table
                print(f"{batch:3d} x {length}  {name}: {type(error).__name__}")
                continue
            difference = prompts.out_THD.float() - expected.float()
            error_norm = (difference.norm() / expected.float().norm()).item()
            if not error_norm < 8e-3:
                raise SystemExit(f"{name}: differs from torch by {error_norm:.2e}: not timing it")
            record(prompts, name, partial(prompts.run_triton, tuning))
    return rows


def copy_bandwidth() -> float:
    """TB/s of a large device copy, bytes read plus bytes written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / best_time(lambda: target.copy_(source), repeats=10) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode TB/s and prefill TFLOP/s")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="the default constants only")
    parser.add_argument("--seconds", type=float, default=95, help="stop the sweeps after this long")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; torch sees none")
    start = time.monotonic()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.2f} TB/s")
    prefill_deadline = start + 0.35 * arguments.seconds
    rows = bench_prefill(arguments.page, arguments.quick, prefill_deadline)
    rows += bench_decode(arguments.page, arguments.quick, start + arguments.seconds)
    best = max(
        (row for row in rows if row["phase"] == "decode"),
        key=lambda row: math.prod(row["tb_per_s"].values()),
        default=None,
    )
    if best is not None:
        print(f"\nbest decode constants by geometric mean: {best['tuning']}")
    print(f"{time.monotonic() - start:.0f} s")
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {
                    "device": torch.cuda.get_device_name(),
                    "copy_tb_per_s": bandwidth,
                    "torch": torch.__version__,
                    "rows": rows,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
