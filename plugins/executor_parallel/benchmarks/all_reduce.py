"""All-reduces between the GPUs of a host: microseconds a call, by size and way.

    python plugins/executor_parallel/benchmarks/all_reduce.py --out result.json

The ways are NCCL, the one-shot kernel (`ours`), and the two-shot kernel. Every way is checked
first, in eager calls and in replays of a graph with other data: the sum, and equal bits on all
ranks. Then 64 calls in bfloat16 are captured in a CUDA graph and replayed. At the end come the
limits that the figures with a residual propose for `all_reduce.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable
from math import gcd
from pathlib import Path

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from nanovllm_core.kernels import launch_options
from nanovllm_executor_parallel.process import ENVIRONMENT
from nanovllm_executor_parallel.slots import MAX_PROGRAMS, SlotAllReduce
from nanovllm_executor_parallel.symmetric import (
    PROGRAMS_PER_MULTIPROCESSOR,
    Limits,
    SymmetricAllReduce,
)

KB, MB = 1 << 10, 1 << 20
SIZES = (2 * KB, 8 * KB, 16 * KB, 32 * KB, 64 * KB, 128 * KB, 256 * KB, 512 * KB,
         MB, 2 * MB, 4 * MB, 8 * MB, 16 * MB, 64 * MB)  # fmt: skip
LIMITS = Limits(one_shot=SIZES[-1], two_shot=2 * SIZES[-1], norm_from=0)
BLOCKS = (64, 128, 256, 512)
CALLS = 64
REPLAYS = 5

Way = Callable[[Tensor, Tensor], Tensor]
"""(x, residual) -> the sum, or the residual plus the sum."""


def norm_behind(reduce: Way) -> Way:
    """The norm that follows, as a kernel of its own."""
    from nanovllm_kernels_triton.elementwise import rms_norm_kernel

    def run(x: Tensor, residual: Tensor) -> Tensor:
        out = reduce(x, residual)
        columns = min(4096, x.numel())
        weight = ones.setdefault(columns, torch.ones(columns, dtype=x.dtype, device=x.device))
        rms_norm_kernel[(x.numel() // columns,)](
            residual, weight, x, columns, EPS=1e-6, SIZE=columns,
            BLOCK=triton.next_power_of_2(columns), num_warps=max(columns // 256, 1),
            **launch_options(True),
        )  # fmt: skip
        return out

    ones: dict[int, Tensor] = {}
    return run


def with_norm(reduce: SlotAllReduce) -> Way:
    """The kernel of whole rows, which norms the sum too."""

    def run(x: Tensor, residual: Tensor) -> Tensor:
        columns = gcd(x.numel(), 4096)
        weight = ones.setdefault(columns, torch.ones(columns, dtype=x.dtype, device=x.device))
        reduce.add_norm(x.view(-1, columns), residual.view(-1, columns), weight, 1e-6)
        return residual

    ones: dict[int, Tensor] = {}
    return run


class Ways:
    """What is measured, by name."""

    def __init__(self, device: torch.device, programs: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.symmetric = SymmetricAllReduce(group, device, LIMITS, seconds=5)
        one_shot, two_shot = self.symmetric.ways
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        for way in self.symmetric.ways:
            way.max_programs = min(programs * multiprocessors, MAX_PROGRAMS)

        def nccl(x: Tensor, residual: Tensor) -> Tensor:
            dist.all_reduce(x)
            return x

        def nccl_add(x: Tensor, residual: Tensor) -> Tensor:
            dist.all_reduce(x)
            return residual.add_(x)

        self.functions: dict[str, Way] = {"NCCL": nccl, "NCCL, add": nccl_add}
        self.functions["NCCL, add, norm"] = norm_behind(nccl_add)
        for name, way in (("ours", one_shot), ("our two-shot", two_shot)):
            self.functions |= {f"{name} {4 * block} B": with_block(way, block) for block in BLOCKS}
            self.functions[f"{name}, add"] = way
            self.functions[f"{name}, add, norm"] = norm_behind(way)
            self.functions[f"{name}, add and norm"] = with_norm(way)


def with_block(reduce: SlotAllReduce, block: int) -> Way:
    """With a block of this many words."""
    return lambda x, residual: reduce(x, block=block)


def capture(
    way: Way, x: Tensor, residual: Tensor, calls: int
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of `calls` calls, and the result of the last; a first call outside it compiles."""
    out = way(x, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread
        for _ in range(calls):
            out = way(x, residual)
    return graph, out


def check(name: str, way: Way, device: torch.device) -> None:
    """The sum within rounding, and equal bits on all ranks, eager and in replays.

    Raises AssertionError with the way and the size.
    """
    size = dist.get_world_size()
    for numel in (8, 1032, 16 * KB, 3 * MB + 8):
        x, residual = (torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(2))
        graph, graph_out = capture(way, x, residual, 1)
        for attempt in range(8):
            generator = torch.Generator(device).manual_seed(10 * attempt + dist.get_rank())
            part = torch.randn(numel, device=device, generator=generator).bfloat16()
            part[::7] = -0.0
            parts = [torch.empty_like(part) for _ in range(size)]
            dist.all_gather(parts, part)
            x.copy_(part)
            residual.zero_()
            if attempt % 2:
                graph.replay()
                out = graph_out
            else:
                out = way(x, residual)
            expected = torch.stack(parts).float().sum(0)
            assert torch.allclose(out.float(), expected, atol=0.05, rtol=0.02), (name, numel)
            outs = [torch.empty_like(out) for _ in range(size)]
            dist.all_gather(outs, out)
            for other in outs:
                equal = torch.equal(other.view(torch.int16), out.view(torch.int16))
                assert equal, (name, numel, "bits differ between ranks")


def microseconds(way: Way, num_bytes: int, device: torch.device) -> float:
    """One call: the fastest replay, by the clock of the rank that waited least."""
    x, residual = (torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device) for _ in "ab")
    graph, _ = capture(way, x, residual, CALLS)
    times = torch.empty(REPLAYS + 1)
    for i in range(REPLAYS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier(group=None, device_ids=[device.index])
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times[i] = start.elapsed_time(end)
    dist.all_reduce(times, dist.ReduceOp.MIN)
    return float(times[1:].min()) / CALLS * 1e3


def run(rank: int, size: int, port: int, programs: int, out: Path | None) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    ways = Ways(device, programs)
    dist.barrier(device_ids=[rank])
    found: dict[str, dict[int, float]] = {}
    for name, way in ways.functions.items():
        check(name, way, device)
        found[name] = {
            num_bytes: round(microseconds(way, num_bytes, device), 2) for num_bytes in SIZES
        }
        if rank == 0:
            print(f"{name}: checked and measured", flush=True)
    assert ways.symmetric.missing() is None
    if rank == 0:
        report(found, size, programs, out)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


def report(found: dict[str, dict[int, float]], size: int, programs: int, out: Path | None) -> None:
    """The table; the limits; the file."""
    print(f"\n{'µs a call, bytes':>16}" + "".join(f"{name:>28}" for name in found))
    for num_bytes in SIZES:
        print(f"{num_bytes:16}" + "".join(f"{found[name][num_bytes]:28.2f}" for name in found))
    proposed = propose(found)
    print(f'limits: "{size}": {json.dumps(proposed)}')
    record = {
        "ranks": size,
        "dtype": "bfloat16",
        "calls_in_a_graph": CALLS,
        "programs_per_multiprocessor": programs,
        "microseconds": found,
        "limits": proposed,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    if out:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def propose(found: dict[str, dict[int, float]]) -> dict[str, int]:
    """The limits by which the fastest way serves."""
    one_shot, two_shot, nccl = (found[f"{way}, add"] for way in ("ours", "our two-shot", "NCCL"))
    one_limit = max((n for n in SIZES if one_shot[n] <= min(two_shot[n], nccl[n])), default=0)
    two_limit = max((n for n in SIZES if two_shot[n] <= nccl[n]), default=0)
    norm_from = 2 * SIZES[-1]
    for n in reversed(SIZES):
        name = "ours" if n <= one_limit else "our two-shot"
        if found[f"{name}, add and norm"][n] > found[f"{name}, add, norm"][n]:
            break
        norm_from = n
    return {"one_shot": one_limit, "two_shot": two_limit, "norm_from": norm_from}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="how many GPUs; default: all that are visible")
    parser.add_argument("--programs", type=int, default=PROGRAMS_PER_MULTIPROCESSOR,
                        help="of our kernels on a multiprocessor (%(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    size = arguments.ranks or torch.cuda.device_count()
    if not 2 <= size <= torch.cuda.device_count():
        parser.error(f"--ranks {size}: needs 2 to {torch.cuda.device_count()} CUDA GPUs")
    os.environ.update(ENVIRONMENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(run, (size, port, arguments.programs, arguments.out), nprocs=size)


if __name__ == "__main__":
    main()
