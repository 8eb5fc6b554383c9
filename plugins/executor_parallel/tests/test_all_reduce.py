"""All-reduces between GPUs, each in a process; and who takes which size, which needs no GPU."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from nanovllm_executor_parallel.process import ENVIRONMENT
from nanovllm_executor_parallel.symmetric import (
    ONE_SHOT_DTYPES,
    Limits,
    find_obstacle,
    find_unmeasured,
    fits,
    read_limits,
    read_table,
)

pytestmark = pytest.mark.whole_gpu

PROGRAM = """
import math, sys, time
import torch
import torch.distributed as dist
from nanovllm_executor_parallel.group import Progress, TensorParallelGroup
from nanovllm_executor_parallel.messages import LostPeerError

rank, size, port = map(int, sys.argv[1:])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group(
    "cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
)
group = TensorParallelGroup(rank, size, Progress())
group.open([torch.device("cuda", r) for r in range(size)], 60, "symmetric")
assert "one-shot" in group.all_reduces, group.all_reduces

def part(r, numel, dtype, draw):
    generator = torch.Generator(device).manual_seed(100 * draw + r)
    x = torch.randn(numel, generator=generator, device=device).to(dtype)
    x[torch.rand(numel, generator=generator, device=device) < 0.3] = -0.0
    return x

def check(out, numel, dtype, draw):
    expected = sum(part(r, numel, dtype, draw).float() for r in range(size))
    # NCCL and two-shot round after each addition, of numbers up to about 8.
    torch.testing.assert_close(out.float(), expected, atol=0.06, rtol=2 ** -7)
    outs = [torch.empty_like(out) for _ in range(size)]
    dist.all_gather(outs, out)
    assert all(torch.equal(o.view(torch.uint8), out.view(torch.uint8)) for o in outs)
"""

SUMS = (
    PROGRAM
    + """
numbers = torch.Generator().manual_seed(5)
capacity = group.symmetric.one_shot.capacity
for dtype in torch.bfloat16, torch.float16, torch.float32:
    sizes = [8, 12, 37 * 8, *(2 ** e * 8 for e in range(3, 20, 4))]
    exponents = torch.rand(6, generator=numbers) * math.log2(capacity // 16)
    sizes += [4 * int(2 ** e) for e in exponents] + [capacity // dtype.itemsize]
    xs = [torch.empty(n, dtype=dtype, device=device) for n in sizes]
    def fill(draw):
        for x in xs:
            x.copy_(part(rank, x.numel(), dtype, draw))
    for draw in range(4):
        fill(draw)
        for x in xs:
            check(group.all_reduce(x), x.numel(), dtype, draw)
        fill(draw)
        for x in xs:
            added = group.all_reduce_add(x, torch.ones_like(x))
            check(added - 1, x.numel(), dtype, draw)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for x in xs:
            group.all_reduce(x)
    for draw in range(4, 12):  # changed data; calls outside the graph between its replays
        fill(draw)
        graph.replay()
        for x in xs:
            check(x, x.numel(), dtype, draw)
        if draw % 2:
            fill(draw)
            check(group.all_reduce(xs[0]), xs[0].numel(), dtype, draw)
group.check()
dist.barrier(device_ids=[rank])
"""
)

ABSENT = (
    PROGRAM
    + """
x = torch.ones(group.symmetric.one_shot.capacity // 2, dtype=torch.bfloat16, device=device)
group.all_reduce(x)
torch.cuda.synchronize()
group.check()
group.bound(1)
if rank == 0:
    began = time.monotonic()
    for _ in range(20):
        group.all_reduce(x)
    torch.cuda.synchronize()
    assert 0.9 < time.monotonic() - began < 3
    try:
        group.check()
    except LostPeerError as error:
        assert "all_reduce 2 on the device: rank 1 did not come within 1 s" in str(error), error
    else:
        raise AssertionError("no error")
group.min_over_ranks(1)
"""
)


def run_ranks(program: str, size: int) -> None:
    """The program on each of `size` GPUs; raises AssertionError with what a failing one wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *map(str, (rank, size, port))],
            env=os.environ | ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_right_and_equal_on_all_ranks(size: int) -> None:
    """Of drawn sizes by every way, in eager calls and in replays with other data."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA GPUs")
    run_ranks(SUMS, size)


@pytest.mark.gpu
def test_a_rank_that_does_not_come_is_a_typed_error_in_time() -> None:
    """It names the rank and the call; the calls behind it do not wait again."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    run_ranks(ABSENT, 2)


def test_the_table_of_limits_is_whole() -> None:
    """What was measured has a limit, and every limit is a number of whole blocks."""
    one_shot = pytest.importorskip("nanovllm_executor_parallel.one_shot", reason="needs Triton")
    table = read_table()
    assert all(read_limits(size).one_shot for size in table["measured"])
    assert all(
        limits["one_shot"] % (4 * one_shot.BLOCK) == 0 for limits in table["limits"].values()
    )


@pytest.mark.parametrize(
    ("size", "capability", "says"),
    [
        (2, (9, 0), ""),
        (2, (12, 0), ""),
        (2, (8, 0), r"of compute capability \(8, 0\)"),
        (4, (9, 0), ""),
        (3, (9, 0), "with 3 ranks"),
    ],
)
def test_ways_are_measured_by_ranks_and_gpus(
    size: int, capability: tuple[int, int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` leaves all sums to NCCL elsewhere."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    reason = find_unmeasured([torch.device("cuda", index) for index in range(size)], 0)
    assert re.fullmatch(f"symmetric was not measured .*{says}" if says else "", reason)


def test_limits_of_a_number_of_ranks_are_those_of_the_next_larger_one() -> None:
    """Above the largest one NCCL takes everything."""
    assert read_limits(3) == read_limits(4)
    assert read_limits(5) == read_limits(8)
    assert read_limits(9) == Limits(0, 0)
    assert 0 < read_limits(8).one_shot < read_limits(8).two_shot


def test_gpus_that_cannot_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank that this one cannot reach."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 2)
    devices = [torch.device("cuda", index) for index in range(4)]
    obstacle = find_obstacle(devices, 1)
    assert obstacle == "cuda:1 cannot access the memory of rank 2's cuda:2"


def test_more_ranks_than_the_table_has_are_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 9 ranks none takes memory of no size."""
    pytest.importorskip("triton", reason="or its absence is the obstacle")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    devices = [torch.device("cuda", index) for index in range(9)]
    assert find_obstacle(devices, 1) == "all_reduce.json has no one-shot limit for 9 ranks"
    assert find_obstacle(devices[:8], 1) == ""


CAPACITY = 8192


@pytest.mark.parametrize(
    ("x", "is_taken"),
    [
        (torch.zeros(CAPACITY // 2, dtype=torch.bfloat16), True),
        (torch.zeros(CAPACITY // 2 + 8, dtype=torch.bfloat16), False),
        (torch.zeros(7, dtype=torch.float16), False),
        (torch.zeros(9, dtype=torch.float32)[1:], False),
        (torch.zeros(4, dtype=torch.float32)[None, :], True),
        (torch.zeros(4, 8, dtype=torch.float32).T, False),
        (torch.zeros(4, dtype=torch.int32), False),
        (torch.zeros(0), False),
    ],
)
def test_what_the_one_shot_kernel_takes(x: Tensor, is_taken: bool) -> None:
    """Floats of 16 and 32 bits, in whole units of 16 bytes, side by side, up to the capacity."""
    assert fits(x, ONE_SHOT_DTYPES, CAPACITY) == is_taken
