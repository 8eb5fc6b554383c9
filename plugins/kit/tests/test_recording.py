"""The CPU's stand-in for CUDA graphs: it repeats device work, and freezes what the host did."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_kit.recording import HostReadError, ReplayError, record


@triton.jit
def add_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes, mask=lanes < n)
    tl.store(out_ptr + lanes, x + 1, mask=lanes < n)


def test_a_replay_reads_the_memory_as_it_is_now() -> None:
    """Views, temporaries, `out=` and in-place operations alike."""
    x, out = torch.arange(4.0), torch.zeros(2)
    with record() as recording:
        doubled = x[1:3] * 2
        torch.add(doubled, 1, out=out)
        out.mul_(10)
    assert out.tolist() == [30, 50]
    x.add_(1)
    recording.replay()
    assert out.tolist() == [50, 70]


def test_recording_runs_the_work_once() -> None:
    x = torch.zeros(1)
    with record() as recording:
        x.add_(1)
    assert x.item() == 1
    recording.replay()
    assert x.item() == 2


def test_composite_operations_are_recorded_too() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    out = torch.empty_like(q)
    with record() as recording:
        out.copy_(scaled_dot_product_attention(q, k, v))
    k.normal_()
    recording.replay()
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels compile for the GPU there")
def test_interpreted_kernels_are_recorded() -> None:
    x, out = torch.zeros(8), torch.zeros(8)
    with record() as recording:
        add_kernel[(1,)](x * 2, out, 8, BLOCK=8)
    assert out.tolist() == [1] * 8
    x.fill_(3)
    recording.replay()
    assert out.tolist() == [7] * 8


def test_numbers_that_the_host_worked_out_are_frozen() -> None:
    """Just as in a graph: this is the bug that a replay must show."""
    sizes, out = [1], torch.zeros(4)
    with record() as recording:
        out[: sizes[0]] = 1
    sizes[0] = 3
    out.zero_()
    recording.replay()
    assert out.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.item, int, bool, float])
def test_reading_a_value_on_the_host_is_refused(read) -> None:
    x = torch.ones(1)
    with pytest.raises(HostReadError, match=r"shape \(1,\) on the host"), record():
        read(x)


def test_memory_that_its_owner_dropped_is_an_error_of_the_replay() -> None:
    """The graph would read freed memory: the error says which operation, and the remedy."""
    x, out = torch.ones(3), torch.zeros(3)
    with record() as recording:
        torch.add(x, 1, out=out)
    recording.replay()
    x = torch.ones(3)
    with pytest.raises(ReplayError, match=r"aten\.add.*\(3,\).*allocate"):
        recording.replay()


def test_memory_made_while_recording_is_the_recordings_own() -> None:
    """As a graph's pool keeps it."""
    out = torch.zeros(3)

    def step() -> None:
        out.copy_(torch.full((3,), 2.0) + 1)

    with record() as recording:
        step()
    out.zero_()
    recording.replay()
    assert out.tolist() == [3] * 3
