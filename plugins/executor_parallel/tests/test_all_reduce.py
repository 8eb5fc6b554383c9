"""All-reduces between GPUs, each in a process; and who takes which size, which needs no GPU."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nanovllm_executor_parallel.process import ENVIRONMENT
from nanovllm_executor_parallel.symmetric import (
    DTYPES,
    Limits,
    SymmetricAllReduce,
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

rank, size, port, first_way = map(int, sys.argv[1:])
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

def check(out, numel, dtype, draw, others=()):
    expected = sum(part(r, numel, dtype, draw).float() for r in (*range(size), *others))
    # NCCL rounds after each addition, of numbers up to about 8.
    torch.testing.assert_close(out.float(), expected, atol=0.06, rtol=2 ** -7)
    check_equal(out)

def check_equal(out):
    outs = [torch.empty_like(out) for _ in range(size)]
    dist.all_gather(outs, out)
    assert all(torch.equal(o.view(torch.uint8), out.view(torch.uint8)) for o in outs)
"""

SUMS = (
    PROGRAM
    + """
numbers = torch.Generator().manual_seed(5)
one_shot, *two_shot = group.symmetric.ways
assert len(two_shot) == (size == 4)
for dtype in torch.bfloat16, torch.float16, torch.float32:
    sizes = [8, 12, 37 * 8, *(2 ** e * 8 for e in range(3, 20, 4))]
    exponents = torch.rand(6, generator=numbers) * math.log2(one_shot.capacity // 16)
    sizes += [4 * int(2 ** e) for e in exponents] + [one_shot.capacity // dtype.itemsize]
    for way in two_shot:  # both ends, and parts of blocks and shards
        units = one_shot.capacity // 16
        drawn = torch.randint(1, 10 * units, (4,), generator=numbers).tolist()
        sizes += [16 // dtype.itemsize * (units + n) for n in (1, *drawn)]
        sizes += [way.capacity // dtype.itemsize, 3 * way.capacity // (2 * dtype.itemsize)]
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
            kept, residual = x.clone(), part(size, x.numel(), dtype, draw)
            is_ours = group.symmetric.find(x, residual) is not None
            added = group.all_reduce_add(x, residual)
            check(added, x.numel(), dtype, draw, others=(size,))
            assert not is_ours or torch.equal(x, kept)
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
    for rows, columns in ((2, 64), (7, 5120), (40, 2880), (257, 4096), (1500, 8192), (9000, 1024)):
        for weight_dtype in dict.fromkeys((dtype, torch.float32)):
            n, weight = rows * columns, part(3, columns, torch.float32, 5).to(weight_dtype)
            x = torch.empty(rows, columns, dtype=dtype, device=device)
            residual, graph = x.clone(), torch.cuda.CUDAGraph()
            def norm_of(draw):
                x.copy_(part(rank, n, dtype, draw).view_as(x))
                residual.copy_(part(size, n, dtype, draw).view_as(x))
            def check_norm(found, draw):
                total, normed = found
                check(total.view(-1), n, dtype, draw, others=(size,))
                check_equal(normed)
                exact = total.double()
                exact = exact * (exact.square().mean(-1, True) + 1e-6).rsqrt() * weight.double()
                torch.testing.assert_close(normed.double(), exact, atol=1e-5, rtol=2 ** -6)
            norm_of(1)
            found = group.all_reduce_add_norm(x, residual, weight, 1e-6)
            if found is None:
                assert group.symmetric.find_for_norm(x, residual, weight) is None
                continue
            check_norm(found, 1)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found = group.all_reduce_add_norm(x, residual, weight, 1e-6)
            for draw in range(2, 6):
                norm_of(draw)
                graph.replay()
                check_norm(found, draw)
group.check()
dist.barrier(device_ids=[rank])
"""
)

ABSENT = (
    PROGRAM
    + """
ways = group.symmetric.ways[first_way:] + group.symmetric.ways[:first_way]
xs = [torch.ones(way.capacity // 2, dtype=torch.bfloat16, device=device) for way in ways]
for x in xs:
    group.all_reduce(x)
torch.cuda.synchronize()
group.check()
group.bound(1)
absent = size - 1
if rank != absent:
    began = time.monotonic()
    for x in xs:
        for _ in range(20):
            group.all_reduce(x)
    torch.cuda.synchronize()
    assert 0.9 < time.monotonic() - began < 3
    says = f"{ways[0].name} all_reduce 2 on the device: rank {absent} did not come within 1 s"
    try:
        group.check()
    except LostPeerError as error:
        assert says in str(error), error
    else:
        raise AssertionError("no error")
group.min_over_ranks(1)
"""
)


def run_ranks(program: str, size: int, first_way: int = 0) -> None:
    """The program on each of `size` GPUs; raises AssertionError with what a failing one wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *map(str, (rank, size, port, first_way))],
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
@pytest.mark.parametrize(("size", "first_way"), [(2, 0), (4, 0), (4, 1)])
def test_a_rank_that_does_not_come_is_a_typed_error_in_time(size: int, first_way: int) -> None:
    """It names the way, the call and the rank; the calls behind it do not wait again."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA GPUs")
    run_ranks(ABSENT, size, first_way)


def test_the_table_of_limits_is_whole() -> None:
    """What was measured has a limit, and every limit is a number of whole blocks."""
    slots = pytest.importorskip("nanovllm_executor_parallel.slots", reason="needs Triton")
    table = read_table()
    assert all(read_limits(size).one_shot for size in table["measured"])
    assert all(
        limit % (4 * slots.BLOCK) == 0
        for limits in table["limits"].values()
        for limit in limits.values()
    )


@pytest.mark.parametrize(
    ("size", "capability", "says"),
    [
        (2, (9, 0), ""),
        (2, (12, 0), ""),
        (2, (8, 0), r"of compute capability \(8, 0\)"),
        (3, (9, 0), "with 3 ranks"),
        (4, (9, 0), ""),
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
    assert read_limits(9) == Limits(0, 0, 0)
    assert 0 < read_limits(4).one_shot < read_limits(4).two_shot


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
def test_what_the_kernels_take(x: Tensor, is_taken: bool) -> None:
    """Floats of 16 and 32 bits, in whole units of 16 bytes, side by side, up to the capacity."""
    assert fits(x, DTYPES, CAPACITY) == is_taken


def test_the_first_way_that_takes_x_and_the_residual_serves() -> None:
    """By bytes; a residual of another dtype or layout is added apart. NCCL takes what is larger."""
    symmetric = SymmetricAllReduce.__new__(SymmetricAllReduce)
    ways = [SimpleNamespace(name=name, capacity=n) for name, n in (("few", 4096), ("more", 8192))]
    symmetric.ways = ways  # type: ignore[assignment]
    symmetric._limits = [way.capacity for way in ways]
    few, more, many = (torch.zeros(n, dtype=torch.float16) for n in (2048, 2056, 4104))
    assert [symmetric.find(x) for x in (few, more, many)] == [*ways, None]
    assert [symmetric.find(x, x.clone()) for x in (few, more, many)] == [*ways, None]
    assert symmetric.find(few, few.float()) is None
    assert symmetric.find(few.view(64, 32), few.view(32, 64).T) is None
    assert str(symmetric) == "few kernel to 4 KiB, more kernel to 8 KiB, nccl above"
