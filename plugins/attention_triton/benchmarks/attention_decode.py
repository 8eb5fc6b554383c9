"""Decode bandwidth of the Triton backend on one GPU.

    python benchmarks/attention_decode.py [--block-size 256] [--sweep] [--out FILE]

The contexts of the nano workload's live requests at several steps, and uniform batches; one plan
and 28 layers inside a captured CUDA graph, each layer over a cache of its own, with the L2 flushed
before each replay. TB/s counts the K and V bytes of the contexts, once. Every configuration is
checked against torch in fp32 before it is timed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.decode_tuning import DECODE_FEW, DECODE_MANY, DecodeTuning
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_core.api import AttentionConfig, DecodeMetadata

HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 128
LAYERS = 28
MAX_MODEL_LEN, MAX_NUM_SEQS = 4096, 256
STEPS = (1, 100, 300, 500, 800, 950)
UNIFORM = tuple((batch, length) for batch in (1, 4, 16, 64) for length in (768, 1536, 2560))
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
        contexts[f"s{step}"] = live
    for batch, length in UNIFORM:
        contexts[f"{batch}x{length}"] = [length] * batch
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


def make_cases(block_size: int, num_blocks: int) -> list[Case]:
    cases = []
    generator = torch.Generator().manual_seed(0)
    width = -(-MAX_MODEL_LEN // block_size)
    for name, contexts in nano_workload_contexts().items():
        rows = bucket(len(contexts))
        blocks = torch.randperm(num_blocks, generator=generator).int()
        table = torch.zeros(rows, width, dtype=torch.int32)
        used = 0
        for row, context in enumerate(contexts):
            count = -(-context // block_size)
            table[row, :count] = blocks[used : used + count]
            used += count
        lens = torch.tensor(contexts + [0] * (rows - len(contexts)), dtype=torch.int32)
        q = torch.randn(rows, HEADS, HEAD_SIZE, dtype=DTYPE, device="cuda")
        metadata = DecodeMetadata(table.cuda(), lens.cuda(), max_seq_len=MAX_MODEL_LEN)
        cases.append(Case(name, contexts, metadata, q, torch.empty_like(q)))
    return cases


def make_backend(block_size: int, tuning: DecodeTuning | None) -> TritonAttention:
    config = AttentionConfig(
        device=torch.device("cuda"),
        dtype=DTYPE,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        scale=SCALE,
        block_size=block_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=16384,
    )
    backend = TritonAttention(TritonOptions(), config)
    if tuning is not None:
        backend.decode_tunings = [(MAX_NUM_SEQS, tuning)]
    backend.allocate()
    return backend


def check_decode(case: Case, k_cache: Tensor, v_cache: Tensor) -> None:
    """The first and the longest row equal torch's attention."""
    block_size = k_cache.shape[1]
    longest = max(range(len(case.contexts)), key=case.contexts.__getitem__)
    for row in {0, longest}:
        context = case.contexts[row]
        blocks = case.metadata.block_table[row, : -(-context // block_size)].long()
        k = k_cache[blocks].flatten(0, 1)[:context].transpose(0, 1)[None].float()
        v = v_cache[blocks].flatten(0, 1)[:context].transpose(0, 1)[None].float()
        q = case.q_BHD[row][None, :, None].float()
        expected = scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True)[0, :, 0]
        error = ((case.out_BHD[row].float() - expected).norm() / expected.norm()).item()
        if not error < 4e-3:
            raise SystemExit(f"{case.name} row {row}: relative error {error:.2e}: not timing it")


def time_decode(
    backend: TritonAttention, case: Case, caches: list[tuple[Tensor, Tensor]], other: Tensor
) -> float:
    """Seconds per layer of one plan and LAYERS runs, replayed as one graph; best of 5.

    `other` is read before each replay and leaves nothing of the caches in the L2.
    """

    def step() -> None:
        backend.plan_decode(case.metadata)
        for layer in range(LAYERS):
            k, v = caches[layer]
            backend.run_decode(case.q_BHD, k, v, case.metadata, case.out_BHD)

    step()
    torch.cuda.synchronize()
    check_decode(case, *caches[-1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return best_time(graph.replay, repeats=5, before=other.sum) / LAYERS


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap


def best_time(
    call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """The shortest of `repeats` runs in seconds on the device; `before` each is not counted."""
    call()
    times = []
    for _ in range(repeats):
        before()
        start, end = (_event(), _event())
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e-3)
    return min(times)


FEW, MANY = DECODE_FEW[DTYPE.itemsize], DECODE_MANY
SHIPPED = None
"""What the backend chooses by the number of rows."""
SWEEP = (
    SHIPPED,
    FEW,
    replace(FEW, registers=None, wave_programs=2),
    replace(FEW, registers=None, max_programs=24),
    replace(FEW, registers=None, max_chunk=512, max_programs=8),
    replace(FEW, num_stages=4),
    MANY,
    replace(MANY, max_chunk=256, max_programs=16),
    replace(MANY, wave_programs=4),
    replace(MANY, num_warps=2, num_stages=2),
)


def describe(tuning: DecodeTuning | None) -> str:
    if tuning is None:
        return "shipped"
    return (
        f"{tuning.tile:3d}/{tuning.num_warps}/{tuning.num_stages} wave {tuning.wave_programs} "
        f"chunk {tuning.min_chunk}-{tuning.max_chunk} max {tuning.max_programs}"
    )


def bench_decode(
    block_size: int, tunings: Sequence[DecodeTuning | None], deadline: float
) -> list[dict[str, Any]]:
    num_blocks = max(
        sum(-(-context // block_size) for context in contexts)
        for contexts in nano_workload_contexts().values()
    )
    blocks_of_a_cache = (num_blocks, block_size, KV_HEADS, HEAD_SIZE)
    caches = [
        (
            torch.randn(blocks_of_a_cache, dtype=DTYPE, device="cuda"),
            torch.randn(blocks_of_a_cache, dtype=DTYPE, device="cuda"),
        )
        for _ in range(LAYERS)
    ]
    other = torch.ones(2**26, device="cuda")
    cases = make_cases(block_size, num_blocks)
    print(f"\ndecode, blocks of {block_size} tokens, TB/s (28 layers and one plan per graph)")
    print(f"{'tile/warps/stages':36s}" + " ".join(f"{case.name:>7s}" for case in cases))
    print(" " * 36 + " ".join(f"{len(case.contexts):7d}" for case in cases))
    rows = []
    for tuning in tunings:
        if time.monotonic() > deadline:
            print("time is up: the rest of the sweep is left out")
            break
        try:
            backend = make_backend(block_size, tuning)
            seconds = [time_decode(backend, case, caches, other) for case in cases]
        except Exception as error:  # one that does not compile is a row of the table
            print(f"{describe(tuning)}  {type(error).__name__}: {str(error)[:80]}")
            continue
        rates = [case.kv_bytes / s / 1e12 for case, s in zip(cases, seconds, strict=True)]
        print(f"{describe(tuning):36s}" + " ".join(f"{rate:7.2f}" for rate in rates), flush=True)
        microseconds = " ".join(f"{s * 1e6:7.2f}" for s in seconds)
        print(f"{'  us per layer':36s}{microseconds}", flush=True)
        rows.append(
            {
                "phase": "decode",
                "block_size": block_size,
                "tuning": describe(tuning).strip(),
                "ran": backend.describe(),
                "seconds_per_layer": dict(zip([c.name for c in cases], seconds, strict=True)),
                "tb_per_s": dict(zip([c.name for c in cases], rates, strict=True)),
            }
        )
    return rows


def copy_bandwidth() -> float:
    """TB/s of a large device copy, bytes read plus bytes written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / best_time(lambda: target.copy_(source), repeats=10) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode TB/s")
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--sweep", action="store_true", help="more than the default constants")
    parser.add_argument("--seconds", type=float, default=90, help="stop the sweep after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; torch sees none")
    start = time.monotonic()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.2f} TB/s")
    tunings = SWEEP if arguments.sweep else SWEEP[:1]
    rows = bench_decode(arguments.block_size, tunings, start + arguments.seconds)
    print(f"{time.monotonic() - start:.0f} s")
    if arguments.out:
        arguments.out.write_text(
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
