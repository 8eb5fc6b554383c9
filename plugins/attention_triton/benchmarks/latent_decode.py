"""Decode bandwidth over latent rows on one GPU.

    python benchmarks/latent_decode.py [--kernel hopper] [--shipped] [--heads 16 128] [--out FILE]

Rows of 512 + 64 numbers in bf16, in shuffled blocks of 256 tokens; one plan and LAYERS layers
inside a captured CUDA graph, each layer over a cache of its own, with the L2 flushed before each
replay. TB/s counts the rows of the contexts, once. Every configuration is checked against float64
before it is timed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from attention_decode import best_time, copy_bandwidth
from torch import Tensor

from nanovllm_attention_triton.decode import triton_version
from nanovllm_attention_triton.decode_tuning import HOPPER_LATENT, LatentTuning, latent_tuning
from nanovllm_attention_triton.hopper_latent import make_latent_workspace
from nanovllm_attention_triton.hopper_limits import hopper_latent_limits
from nanovllm_attention_triton.latent_decode import LatentWorkspace
from nanovllm_attention_triton.options import TritonOptions

VALUE_SIZE, REST_SIZE = 512, 64
ROW_SIZE = VALUE_SIZE + REST_SIZE
SCALE = 192**-0.5
BLOCK_SIZE = 256
LAYERS = 8
DTYPE = torch.bfloat16
UNIFORM = tuple((batch, length) for batch in (1, 16, 64, 256) for length in (512, 2048, 8192))
MAX_MODEL_LEN, MAX_NUM_SEQS = 8192, 256


def all_lengths() -> dict[str, list[int]]:
    """The lengths of each batch that is timed; one of them is ragged."""
    draws = random.Random(0)
    lengths = {f"{batch}x{length}": [length] * batch for batch, length in UNIFORM}
    lengths["ragged 200"] = [draws.randint(100, 2000) for _ in range(200)]
    return lengths


@dataclass
class Case:
    """One batch in device memory."""

    name: str
    lengths: list[int]
    block_table: Tensor
    seq_lens: Tensor
    q_BHD: Tensor  # noqa: N815 - shape suffix
    out_BHV: Tensor  # noqa: N815 - shape suffix

    @property
    def cache_bytes(self) -> int:
        """What a layer must read."""
        return sum(self.lengths) * ROW_SIZE * DTYPE.itemsize


def make_cases(num_heads: int, num_blocks: int) -> list[Case]:
    cases = []
    generator = torch.Generator().manual_seed(0)
    for name, lengths in all_lengths().items():
        blocks = torch.randperm(num_blocks, generator=generator).int()
        table = torch.zeros(len(lengths), MAX_MODEL_LEN // BLOCK_SIZE, dtype=torch.int32)
        used = 0
        for row, length in enumerate(lengths):
            count = -(-length // BLOCK_SIZE)
            table[row, :count] = blocks[used : used + count]
            used += count
        q = torch.randn(len(lengths), num_heads, ROW_SIZE, dtype=DTYPE, device="cuda")
        out = q.new_full((len(lengths), num_heads, VALUE_SIZE), float("nan"))
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        cases.append(Case(name, lengths, table.cuda(), seq_lens, q, out))
    return cases


def make_workspace(num_heads: int, tuning: LatentTuning) -> LatentWorkspace:
    return make_latent_workspace(
        tuning,
        torch.device("cuda"),
        num_heads=num_heads,
        value_size=VALUE_SIZE,
        rest_size=REST_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_seq_len=MAX_MODEL_LEN,
    )


def why_not_hopper() -> list[str]:
    """Why the kernel for Hopper cannot serve here."""
    return hopper_latent_limits(
        TritonOptions(latent_kernel="hopper"),
        device="cuda",
        capability=torch.cuda.get_device_capability(),
        triton_version=triton_version(),
        dtype=str(DTYPE).removeprefix("torch."),
        value_size=VALUE_SIZE,
        rest_size=REST_SIZE,
        block_size=BLOCK_SIZE,
    )


def relative_error(case: Case, cache: Tensor) -> float:
    """Of the first row and the longest one, against float64: the norm of the difference."""
    longest = max(range(len(case.lengths)), key=case.lengths.__getitem__)
    errors = []
    for row in {0, longest}:
        length = case.lengths[row]
        blocks = case.block_table[row, : -(-length // BLOCK_SIZE)].long()
        keys = cache[blocks].flatten(0, 2)[:length].double()
        weights = (case.q_BHD[row].double() @ keys.T * SCALE).softmax(-1)
        expected = weights @ keys[:, :VALUE_SIZE]
        errors.append(((case.out_BHV[row].double() - expected).norm() / expected.norm()).item())
    return max(errors)


def time_decode(
    workspace: LatentWorkspace, case: Case, caches: list[Tensor], other: Tensor
) -> float:
    """Seconds per layer of one plan and LAYERS runs, replayed as one graph; best of 5."""

    def step() -> None:
        workspace.plan(case.seq_lens, case.block_table, BLOCK_SIZE)
        for cache in caches:
            workspace.run(
                case.q_BHD, cache, cache, case.block_table, MAX_MODEL_LEN, SCALE, case.out_BHV
            )

    step()
    torch.cuda.synchronize()
    error = relative_error(case, caches[-1])
    if not error < 4e-3:
        raise SystemExit(f"{case.name}: relative error {error:.2e}: not timing it")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return best_time(graph.replay, repeats=5, before=other.sum) / LAYERS


def sweep(shipped: LatentTuning, num_heads: int) -> list[LatentTuning]:
    """The shipped constants and their like."""
    if shipped.persistent:
        return [replace(shipped, min_chunk=chunk) for chunk in (64, 128, 256)]
    if num_heads <= 16:
        small = replace(shipped, tile=32, num_warps=4, num_stages=3)
        tiny = replace(shipped, tile=16, num_warps=4, num_stages=3)
        return [
            *(replace(small, wave_programs=wave) for wave in (1, 2, 4)),
            *(replace(tiny, wave_programs=wave) for wave in (2, 4)),
            replace(tiny, num_stages=4, wave_programs=3),
        ]
    half = replace(shipped, tile=32, num_warps=4, num_stages=3, most_heads=32)
    whole = replace(shipped, tile=32, num_warps=8, num_stages=3, most_heads=64)
    return [
        *(replace(half, wave_programs=wave) for wave in (2, 4)),
        *(replace(whole, wave_programs=wave) for wave in (1, 2)),
        replace(whole, num_stages=4),
    ]


def describe(tuning: LatentTuning) -> str:
    hopper = "hopper " if tuning.persistent else ""
    return (
        f"{hopper}{tuning.tile}/{tuning.num_warps}/{tuning.num_stages} heads {tuning.most_heads} "
        + (f"chunk {tuning.min_chunk}" if hopper else f"wave {tuning.wave_programs}")
    )


def bench(
    num_heads: int, tunings: Sequence[LatentTuning], caches: list[Tensor], deadline: float
) -> list[dict[str, Any]]:
    """A table as it is measured: microseconds and TB/s by configuration and batch."""
    other = torch.ones(2**26, device="cuda")
    cases = make_cases(num_heads, len(caches[0]))
    print(f"\n{num_heads} heads{'':28s}" + " ".join(f"{case.name:>10s}" for case in cases))
    rows = []
    for tuning in tunings:
        if time.monotonic() > deadline:
            print("time is up: the rest of the sweep is left out")
            break
        try:
            workspace = make_workspace(num_heads, tuning)
            seconds = [time_decode(workspace, case, caches, other) for case in cases]
        except Exception as error:  # one that does not compile is a row of the table
            print(f"{describe(tuning)}  {type(error).__name__}: {str(error)[:80]}")
            continue
        rates = [case.cache_bytes / s / 1e12 for case, s in zip(cases, seconds, strict=True)]
        print(f"{describe(tuning):30s}{'TB/s':>6s} " + " ".join(f"{r:10.2f}" for r in rates))
        print(f"{'us':>36s} " + " ".join(f"{s * 1e6:10.2f}" for s in seconds), flush=True)
        names = [case.name for case in cases]
        rows.append(
            {
                "num_heads": num_heads,
                "tuning": asdict(tuning),
                "seconds_per_layer": dict(zip(names, seconds, strict=True)),
                "tb_per_s": dict(zip(names, rates, strict=True)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Latent decode TB/s")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument(
        "--kernel",
        choices=("portable", "hopper"),
        default="portable",
        help="hopper needs compute capability 9.0",
    )
    parser.add_argument("--shipped", action="store_true", help="no other than shipped constants")
    parser.add_argument("--seconds", type=float, default=80, help="stop the sweep after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; torch sees none")
    by_hopper = arguments.kernel == "hopper"
    if by_hopper and (reasons := why_not_hopper()):
        raise SystemExit("; ".join(reasons))
    start = time.monotonic()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.2f} TB/s")
    num_blocks = max(
        sum(-(-length // BLOCK_SIZE) for length in lengths) for lengths in all_lengths().values()
    )
    caches = [
        torch.randn(num_blocks, BLOCK_SIZE, 1, ROW_SIZE, dtype=DTYPE, device="cuda")
        for _ in range(LAYERS)
    ]
    rows = []
    for num_heads in arguments.heads:
        portable = latent_tuning(DTYPE.itemsize, num_heads, TritonOptions())
        shipped = HOPPER_LATENT if by_hopper else portable
        tunings = [shipped] if arguments.shipped else sweep(shipped, num_heads)
        rows += bench(num_heads, tunings, caches, start + arguments.seconds)
    print(f"{time.monotonic() - start:.0f} s")
    if arguments.out:
        result = {
            "device": torch.cuda.get_device_name(),
            "copy_tb_per_s": bandwidth,
            "torch": torch.__version__,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
