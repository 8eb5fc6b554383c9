"""top_k and top_p over a whole vocabulary on a GPU: the kernel, by tile and warps, beside a sort.

    python benchmarks/truncation.py --out result.json

Each line is checked: the kernel keeps as many ids as sorting does, but for one where rounding
decides a top_p.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from nanovllm_bench.environment import describe_environment
from nanovllm_core.kernels import truncation_reference, truncation_triton

VOCAB_SIZE = 151_936
ROWS = (1, 16, 64, 128)
CUTS = {"top_k 50": (50, 2.0), "top_p 0.9": (VOCAB_SIZE, 0.9), "both": (50, 0.9)}
TILES = ((1024, 8), (2048, 8), (2048, 16), (4096, 16), (4096, 32), (8192, 32))


def measure(
    cut: Callable[..., None], logits: Tensor, limits: tuple[Tensor, ...]
) -> tuple[float, Tensor]:
    """Milliseconds of the fastest of four calls after one, and how many ids each row keeps."""
    times = []
    for _ in range(5):
        work = logits.clone()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        cut(work, *limits)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return round(min(times[1:]), 4), (work > -math.inf).sum(dim=1)


def measure_line(rows: int, cut: str) -> dict[str, object]:
    """One batch and one cut, by sorting and by the kernel in each of `TILES`."""
    top_k, top_p = CUTS[cut]
    logits = torch.randn(rows, VOCAB_SIZE, device="cuda") * 3
    values = (torch.full((rows,), value, device="cuda") for value in (top_k, top_p, 0.8))
    limits = (torch.arange(rows, device="cuda"), *values)
    line: dict[str, object] = {"rows": rows, "cut": cut}
    line["sort"], wanted = measure(truncation_reference.cut_top_k_top_p, logits, limits)
    for truncation_triton.TILE, truncation_triton.NUM_WARPS in TILES:
        name = f"{truncation_triton.TILE}/{truncation_triton.NUM_WARPS}"
        line[name], kept = measure(truncation_triton.cut_top_k_top_p, logits, limits)
        off = int((kept - wanted).abs().max())
        if off > int(top_p <= 1.0):
            raise SystemExit(f"{rows} rows, {cut}, tile {name}: {off} ids more or fewer are kept")
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    lines = []
    for rows in ROWS:
        for cut in CUTS:
            lines.append(measure_line(rows, cut))
            print(lines[-1], flush=True)
    record = {
        "vocab_size": VOCAB_SIZE,
        "milliseconds": lines,
        "environment": describe_environment(),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
