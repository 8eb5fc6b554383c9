"""From the command `nanovllm serve` to its first served token.

    python benchmarks/serve_start.py --out FILE [--model demo] [--set device=cpu] [--runs 5]

Each run starts a server, and asks it every 20 ms for a completion of one token until that comes.
The first run may read files that the others find in memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from serve_table import served, start_record

from nanovllm_bench.record import write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--model", default="demo", help="as `nanovllm serve` takes it")
    parser.add_argument("--set", action="append", default=[], help="a setting of the engine")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    arguments = ["--model", given.model, *(part for one in given.set for part in ("--set", one))]
    runs = []
    for _ in range(given.runs):
        with served(arguments, given.port) as (_url, seconds):
            runs.append(seconds)
        print(f"first served token after {runs[-1]:.2f} s", flush=True)
    write_record(given.out, start_record(arguments, runs))


if __name__ == "__main__":
    main()
