"""All-reduces between the GPUs of a host: microseconds a call, by size and way.

    python plugins/executor_parallel/benchmarks/all_reduce.py --out result.json

Every way is checked first, in eager calls and in replays of a graph with other data: the sum, and
equal bits on all ranks. Then 64 calls in bfloat16 are captured in a CUDA graph and replayed. At the
end come the limits that the figures propose for `all_reduce.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from nanovllm_core.kernels import launch_options
from nanovllm_executor_parallel.one_shot import BLOCK
from nanovllm_executor_parallel.process import ENVIRONMENT
from nanovllm_executor_parallel.symmetric import Limits, SymmetricAllReduce

KB, MB = 1 << 10, 1 << 20
SIZES = (2 * KB, 8 * KB, 16 * KB, 32 * KB, 64 * KB, 128 * KB, 256 * KB, 512 * KB,
         MB, 2 * MB, 4 * MB, 8 * MB, 16 * MB, 64 * MB)  # fmt: skip
LIMITS = Limits(one_shot=16 * MB, two_shot=64 * MB)
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


class Ways:
    """What is measured, by name, each with the largest size that it takes."""

    def __init__(self, device: torch.device) -> None:
        group = dist.group.WORLD
        assert group is not None
        symmetric = SymmetricAllReduce(group, device, LIMITS, seconds=5)
        ours, two_shot = symmetric.one_shot, symmetric.two_shot
        assert two_shot is not None, "two-shot is for 2, 4 and 8 ranks"
        self.symmetric = symmetric
        buffer = two_shot._buffer

        def nccl(x: Tensor, residual: Tensor) -> Tensor:
            dist.all_reduce(x)
            return x

        def nccl_add(x: Tensor, residual: Tensor) -> Tensor:
            dist.all_reduce(x)
            return residual.add_(x)

        def torch_one_shot(x: Tensor, residual: Tensor) -> Tensor:
            sent = buffer[: x.nbytes].view(x.dtype)
            name = group.group_name
            out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(sent, x, "sum", name)
            return out

        def two_shot_in_place(x: Tensor, residual: Tensor) -> Tensor:
            sent = buffer[: x.nbytes].view(x.dtype).copy_(x)
            return x.copy_(torch.ops.symm_mem.two_shot_all_reduce_(sent, "sum", group.group_name))

        def ours_add(x: Tensor, residual: Tensor) -> Tensor:
            return ours(x, residual)

        self.functions: dict[str, tuple[Way, int]] = {
            "NCCL": (nccl, SIZES[-1]),
            "NCCL, add": (nccl_add, SIZES[-1]),
            "torch one-shot": (torch_one_shot, MB),
            "two-shot _": (two_shot_in_place, SIZES[-1]),
            "two-shot": (lambda x, residual: two_shot(x), SIZES[-1]),
            **{f"ours {4 * b} B": (ours_of(ours, b), SIZES[-1]) for b in BLOCKS},
            "ours, add": (ours_add, LIMITS.one_shot),
            "ours, add, norm": (norm_behind(ours_add), MB),
        }


def ours_of(reduce: Any, block: int) -> Way:
    """With a block of this many words; an x above the limit goes in pieces."""

    def run(x: Tensor, residual: Tensor) -> Tensor:
        for piece in x.split(LIMITS.one_shot // x.element_size()):
            reduce(piece, block=block)
        return x

    return run


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


def run(rank: int, size: int, port: int, out: Path | None) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    ways = Ways(device)
    dist.barrier(device_ids=[rank])
    found: dict[str, dict[int, float]] = {}
    for name, (way, limit) in ways.functions.items():
        check(name, way, device)
        found[name] = {
            num_bytes: round(microseconds(way, num_bytes, device), 2)
            for num_bytes in SIZES
            if num_bytes <= limit
        }
        if rank == 0:
            print(f"{name}: checked and measured", flush=True)
    assert ways.symmetric.one_shot.missing() is None
    if rank == 0:
        report(found, size, out)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


def report(found: dict[str, dict[int, float]], size: int, out: Path | None) -> None:
    """The table; the limits; the file."""
    print(f"\n{'µs a call, bytes':>16}" + "".join(f"{name:>16}" for name in found))
    for num_bytes in SIZES:
        row = (f"{found[name].get(num_bytes, float('nan')):16.2f}" for name in found)
        print(f"{num_bytes:16}" + "".join(row))
    ours, two_shot, nccl = found[f"ours {4 * BLOCK} B"], found["two-shot"], found["NCCL"]
    proposed = {
        "one_shot": max(
            (n for n in ours if ours[n] <= min(two_shot[n], nccl[n])), default=0
        ),
        "two_shot": max((n for n in two_shot if two_shot[n] <= nccl[n]), default=0),
    }  # fmt: skip
    print(f'limits: "{size}": {json.dumps(proposed)}')
    record = {
        "ranks": size,
        "dtype": "bfloat16",
        "calls_in_a_graph": CALLS,
        "microseconds": found,
        "limits": proposed,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    if out:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="how many GPUs; default: all that are visible")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    size = arguments.ranks or torch.cuda.device_count()
    if not 2 <= size <= torch.cuda.device_count():
        parser.error(f"--ranks {size}: needs 2 to {torch.cuda.device_count()} CUDA GPUs")
    os.environ.update(ENVIRONMENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(run, (size, port, arguments.out), nprocs=size)


if __name__ == "__main__":
    main()
