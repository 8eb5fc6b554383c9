"""The captured tail on a GPU: microseconds a call, by rows and by what all rows ask for.

    python plugins/kernels_triton/benchmarks/tail.py --out result.json

Calls are captured in a CUDA graph. "nothing" is the sampler's own kernel with the tail's beside it,
as every step has them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from nanovllm_core.api import (
    MAX_DEVICE_STOP_IDS,
    MAX_ROW_BIASES,
    NUM_ROW_COLUMNS,
    RowColumn,
    RowFlag,
    TailTables,
)
from nanovllm_kernels_triton.captured_tail import TritonTail

VOCAB_SIZE = 151_936
KNOWN = 64
ROWS = (1, 16, 64, 256)
NEUTRAL = {
    RowColumn.TOP_K: VOCAB_SIZE,
    RowColumn.TOP_P: 2.0,
    RowColumn.LOG_MIN_P: float("-inf"),
    RowColumn.REPETITION: 1.0,
    RowColumn.PRESENCE: 0.0,
    RowColumn.FREQUENCY: 0.0,
    RowColumn.NUM_TOP: -1,
    RowColumn.COUNTED: -1,
}
ASKED: dict[str, dict[RowColumn, float]] = {
    "nothing": {},
    "top_k 20, top_p 0.95": {
        RowColumn.FLAGS: RowFlag.CUT, RowColumn.TOP_K: 20, RowColumn.TOP_P: 0.95
    },
    "top_p 0.95": {RowColumn.FLAGS: RowFlag.CUT, RowColumn.TOP_P: 0.95},
    "top_k 100": {RowColumn.FLAGS: RowFlag.CUT, RowColumn.TOP_K: 100},
    "repetition_penalty 1.1": {RowColumn.FLAGS: RowFlag.PENALISED, RowColumn.REPETITION: 1.1},
    "logprobs 5": {RowColumn.NUM_TOP: 5},
}  # fmt: skip


def tables(rows: int, asked: dict[RowColumn, float]) -> TailTables:
    """Rows that all ask for this, at temperature 0.6."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    parameters = ints(rows, NUM_ROW_COLUMNS)
    for column, value in {**NEUTRAL, **asked}.items():
        as_float = isinstance(value, float)
        part = parameters.view(torch.float32) if as_float else parameters
        part[:, column] = value
    return TailTables(
        parameters=parameters,
        biases=ints(rows, 2, MAX_ROW_BIASES),
        stop_ids=ints(rows, MAX_DEVICE_STOP_IDS),
        min_tokens=ints(rows),
        num_prompt=ints(rows) + KNOWN // 2,
        token_ids=torch.randint(0, VOCAB_SIZE, (rows, 2 * KNOWN), device="cuda").int(),
        temperature=torch.full((rows,), 0.6, device="cuda"),
        seed=torch.arange(rows, device="cuda"),
    )


def microseconds(rows: int, asked: dict[RowColumn, float], calls: int = 16) -> float:
    """One call, the fastest of five replays of `calls` over four batches of logits."""
    tail = TritonTail(tables(rows, asked), VOCAB_SIZE, rows)
    logits = [(torch.randn(rows, VOCAB_SIZE, device="cuda") * 3).bfloat16() for _ in range(4)]
    entries = torch.arange(rows, dtype=torch.int32, device="cuda")
    known, out, never = torch.full_like(entries, KNOWN), torch.zeros_like(entries), entries[:1] * 0

    def run() -> None:
        for i in range(calls):
            tail.sample(logits[i % 4], entries, known, known - KNOWN // 2, out, never)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(round(min(times[1:]) / calls * 1e3, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    found = {}
    for rows in ROWS:
        found[rows] = {name: microseconds(rows, asked) for name, asked in ASKED.items()}
        print(rows, found[rows], flush=True)
    record = {
        "vocab_size": VOCAB_SIZE,
        "microseconds": found,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
