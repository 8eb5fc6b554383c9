"""Prefill: packed ragged queries, causal, over blocks that earlier chunks filled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings, strategies as st

from nanovllm_attention_triton import hopper_prefill, prefill
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.prefill import (
    CAUSAL,
    count_row_blocks,
    describable,
    fits_hopper,
    prefill_attention,
)
from nanovllm_attention_triton.prefill_kernels import find_row_block
from nanovllm_attention_triton.prefill_tuning import PREFILL
from nanovllm_core.api import UnsupportedError

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there; see test_gpu.py"
)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (2, 2)])
def test_whole_prompts_equal_the_reference(paged_batch, heads, block_size):
    """Lengths around the tile, one empty, in shuffled blocks with NaN in every unused place."""
    lens = [1, 0, 31, 32, 33, 100]
    batch = paged_batch(lens, lens, heads=heads, block_size=block_size)
    batch.assert_right(batch.prefill())


def test_chunks_with_context_equal_the_reference(paged_batch):
    """The queries are the last positions of their sequences; one row brings one token."""
    batch = paged_batch([150, 64, 33, 200], [20, 64, 1, 70], block_size=32)
    batch.assert_right(batch.prefill())


def test_half_precision_and_head_size_128_equal_the_reference(paged_batch):
    """fp16 inputs, fp32 sums."""
    batch = paged_batch([150, 10], [140, 10], head_size=128, dtype=torch.float16)
    batch.assert_right(batch.prefill())


def test_a_row_without_queries_between_others_shifts_nothing(paged_batch):
    """A sequence of the batch may bring no query at all."""
    batch = paged_batch([40, 50, 60], [40, 0, 5])
    batch.assert_right(batch.prefill())


def test_the_sequences_may_begin_behind_rows_of_others(paged_batch):
    """As flash-attn's cu_seqlens may: the rows before the first sequence are left alone."""
    batch = paged_batch([70, 64, 33, 100], [70, 64, 33, 90])
    metadata = batch.prefill_metadata()
    later = replace(
        metadata,
        block_table=metadata.block_table[1:],
        seq_lens=metadata.seq_lens[1:],
        query_start_loc=metadata.query_start_loc[1:],
    )
    q, out = batch.packed_q, torch.full_like(batch.packed_q, float("nan"))
    backend = batch.backend()
    backend.plan_prefill(later)
    backend.run_prefill(q, batch.k_cache, batch.v_cache, later, out)
    assert torch.equal(out[70:], batch.prefill()[70:])
    assert out[:70].isnan().all()


class Grids:
    """Stands where the kernel does; notes the grids, runs nothing."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        self.seen.append(grid)
        return lambda *_args, **_constants: None


def test_the_grid_follows_from_the_tokens_not_from_the_longest_prompt(paged_batch, monkeypatch):
    """One long prompt beside many short ones: its blocks, and one more of each sequence."""
    grids = Grids()
    monkeypatch.setattr(prefill, "prefill_kernel", grids)
    batch = paged_batch([800, *[1] * 20], [800, *[1] * 20], heads=(4, 2))
    batch.prefill()
    block_m = PREFILL[4].block_m
    assert grids.seen[-1] == (2, 820 * 2 // block_m + 21)


@triton.jit
def note_row_blocks(out_ptr, query_start_ptr, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    row_block = tl.program_id(0)
    seq, start, length, first_row = find_row_block(
        row_block, query_start_ptr, num_seqs, GROUP, BLOCK_M
    )
    tl.store(out_ptr + row_block * 4, seq)
    tl.store(out_ptr + row_block * 4 + 1, start)
    tl.store(out_ptr + row_block * 4 + 2, length)
    tl.store(out_ptr + row_block * 4 + 3, first_row)


@settings(max_examples=40, deadline=None)
@given(
    before=st.integers(0, 9),
    lens=st.lists(st.sampled_from([0, 1, 7, 8, 9, 16, 33]), min_size=1, max_size=6),
    num_absent=st.integers(0, 9),
    group=st.sampled_from([1, 2, 3]),
)
def test_every_row_block_has_one_program_and_absent_sequences_have_the_last(
    before, lens, num_absent, group
):
    """A sequence's last rows first; rows of others before all, and empty sequences anywhere."""
    lens = [*lens, *[0] * num_absent]
    starts = torch.tensor([before, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    blocks = count_row_blocks(sum(lens), len(lens), group, 8)
    out = torch.zeros(blocks, 4, dtype=torch.int32)
    note_row_blocks[(blocks,)](out, starts, len(lens), GROUP=group, BLOCK_M=8)
    whole = [tuple(row) for row in out.tolist()]
    found = [(seq, first) for seq, _, _, first in whole if first >= 0]
    expected = [
        (seq, first)
        for seq, length in enumerate(lens)
        for first in reversed(range(0, length * group, 8))
    ]
    assert found == expected
    assert all(starts[seq] == start for seq, start, _, first in whole if first >= 0)
    assert all(lens[seq] == length for seq, _, length, first in whole if first >= 0)
    present = len(lens) - num_absent
    most = count_row_blocks(sum(lens), present, group, 8)
    assert all(first < 0 for _, _, _, first in whole[most:])


def test_more_queries_than_a_grid_holds_are_refused(paged_batch, monkeypatch):
    monkeypatch.setattr(prefill, "prefill_kernel", Grids())
    monkeypatch.setattr(prefill, "MAX_ROW_BLOCKS", 3)
    with pytest.raises(UnsupportedError, match=r"100 queries .* 7 row blocks .* holds 3; .* fewer"):
        paged_batch([100], [100], heads=(4, 2)).prefill()


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_key_is_seen_from_its_own_position_on(paged_batch, block_size):
    """The one key that matters: queries before it never see it, queries from it on see only it."""
    needles = [0, 31, 32, 63, 64, 99]
    batch = paged_batch([100] * 6, [100] * 6, needles=needles, block_size=block_size)
    out = batch.prefill().view(6, 100, 4, 64)
    batch.assert_right(out.flatten(0, 1))
    for row, needle in enumerate(needles):
        value = batch.v[row][needle].repeat_interleave(2, 0)
        near = (out[row] - value).abs().amax((1, 2)) < 2e-2
        assert not near[:needle].any()
        assert near[needle:].all()


def test_a_prompt_in_chunks_equals_the_prompt_at_once(paged_batch):
    """Chunk lengths that are no multiple of a tile, a block or each other."""
    batch = paged_batch([120], [120])
    whole = batch.prefill()
    parts = []
    for start, end in ((0, 7), (7, 64), (64, 119), (119, 120)):
        chunk = replace(
            batch, q=[batch.q[0][start:end]], k=[batch.k[0][:end]], v=[batch.v[0][:end]]
        )
        parts.append(chunk.prefill())
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-5)


def test_prefill_of_one_token_equals_decode(paged_batch):
    """The two kernels agree on a step that either may serve."""
    batch = paged_batch([77, 130, 1])
    torch.testing.assert_close(batch.prefill(), batch.decode(), atol=1e-6, rtol=1e-5)


def test_a_step_without_prompts_launches_nothing(paged_batch):
    """No sequence, no query: the output is empty and nothing fails."""
    batch = paged_batch([16], [16])
    metadata = batch.prefill_metadata()
    empty = replace(
        metadata,
        block_table=metadata.block_table[:0],
        seq_lens=metadata.seq_lens[:0],
        query_start_loc=metadata.query_start_loc[:1],
        max_query_len=0,
        max_seq_len=0,
    )
    q = batch.packed_q[:0]
    out = torch.empty_like(q)
    backend = batch.backend()
    backend.plan_prefill(empty)
    backend.run_prefill(q, batch.k_cache, batch.v_cache, empty, out)
    assert out.numel() == 0


@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("window", [CAUSAL, (-1, -1), (70, 0), (20, 30)])
def test_the_copy_engine_and_the_threads_load_the_same_tiles(paged_batch, window, head_size):
    """Both ways to load a tile give one result to the bit, output and log-sum-exp."""
    batch = paged_batch([200, 64, 1, 90], [150, 64, 1, 3], head_size=head_size, block_size=64,
                        dtype=torch.float16)  # fmt: skip
    metadata, results = batch.prefill_metadata(), []
    for copy_engine in (True, False):
        out = torch.full_like(batch.packed_q, float("nan"))
        lse = torch.full((out.shape[1], out.shape[0]), float("nan"))
        tuning = replace(PREFILL[2], copy_engine=copy_engine)
        prefill_attention(
            batch.packed_q, batch.k_cache, batch.v_cache, metadata.block_table, metadata.seq_lens,
            metadata.query_start_loc, metadata.max_query_len, batch.scale, out, tuning,
            window=window, lse_HT=lse,
        )  # fmt: skip
        results.append((out, lse))
    for described, loaded in zip(*results, strict=True):
        assert torch.equal(described, loaded)
        assert described.isfinite().all()


def test_only_tiles_within_a_block_and_aligned_are_described():
    """A tile that crosses a block, or rows off the 16-byte grid, are left to the threads."""
    cache = torch.empty(2, 64, 2, 64, dtype=torch.float16)
    assert describable(cache, cache, 64)
    assert not describable(cache, cache, 128)
    odd = torch.empty(2 * 64 * 2 * 64 + 1, dtype=torch.float16)[1:].view_as(cache)
    assert not describable(odd, cache, 64)
    assert not describable(cache[:, :48], cache[:, :48], 64)


@pytest.mark.parametrize(
    ("shape", "options", "runs"),
    [
        ({}, {}, True),
        ({"heads": (10, 2)}, {}, True),
        ({"block_size": 128, "dtype": torch.bfloat16}, {}, True),
        ({"head_size": 64}, {}, False),
        ({"block_size": 64}, {}, False),
        ({"dtype": torch.float32}, {}, False),
        ({"window": 50}, {}, False),
        ({"window": 10_000}, {}, True),
        ({"cap": 30.0}, {}, False),
        ({}, {"prefill_num_stages": 2}, False),
    ],
)
def test_the_hopper_kernel_runs_where_it_serves_and_nowhere_else(
    paged_batch, monkeypatch, shape, options, runs
):
    """By head size, block, dtype, window, cap and options; `describe` says so."""
    launches, others = [], Grids()
    monkeypatch.setattr(hopper_prefill, "on_hopper", lambda _device: True)
    monkeypatch.setattr(hopper_prefill, "run_hopper_kernel", lambda *all_: launches.append(all_))
    monkeypatch.setattr(prefill, "prefill_kernel", others)
    shape = {"head_size": 128, "block_size": 256, "dtype": torch.float16} | shape
    batch = paged_batch([1200, 1030], [1100, 1000], **shape)
    backend = batch.backend(TritonOptions(**options))
    batch.prefill(backend)
    # The first step has all kernels compiled, that of a plan's items too.
    assert (len(launches), len(others.seen)) == ((1, 2) if runs else (0, 2))
    batch.prefill(backend)
    assert (len(launches), len(others.seen)) == ((2, 2) if runs else (0, 3))
    assert ("by warp roles" in backend.describe()) == runs
    assert ("prefill_tickets" in backend.captured_tensors()) == runs


@pytest.mark.parametrize(
    ("lens", "multiprocessors", "runs"),
    [
        ([1024, 1024], 17, True),
        ([1024, 1024], 18, False),
        ([2047, 1], 4, True),
        ([2046, 1], 4, False),
    ],
)
def test_the_hopper_kernel_needs_long_prompts_and_blocks_for_every_multiprocessor(
    paged_batch, monkeypatch, lens, multiprocessors, runs
):
    """Else the plain kernel's smaller programs share the GPU better."""
    launches = []
    monkeypatch.setattr(hopper_prefill, "on_hopper", lambda _device: True)
    monkeypatch.setattr(hopper_prefill, "run_hopper_kernel", lambda *all_: launches.append(all_))
    monkeypatch.setattr(prefill, "num_multiprocessors", lambda _device: multiprocessors)
    monkeypatch.setattr(prefill, "prefill_kernel", Grids())
    shape = {"head_size": 128, "block_size": 256, "dtype": torch.float16}
    paged_batch(lens, lens, **shape).prefill()
    assert bool(launches) == runs


def test_rows_that_are_not_aligned_are_left_to_the_plain_kernel(paged_batch, monkeypatch):
    """A piece of a row is copied whole, and Triton must know that it begins on 16 bytes."""
    monkeypatch.setattr(hopper_prefill, "on_hopper", lambda _device: True)
    batch = paged_batch([300], [300], head_size=128, block_size=256, dtype=torch.float16)
    q, k, v = batch.packed_q, batch.k_cache, batch.v_cache
    wide = q.new_empty(q.numel() + 8)[8:].view_as(q)
    odd = q.new_empty(q.numel() + 1)[1:].view_as(q)
    far = q.new_empty(300, 4, 136)[:, :, :128]
    assert fits_hopper(q, k, v, wide)
    assert not fits_hopper(odd, k, v, q)
    assert not fits_hopper(q, k, v, odd)
    assert not fits_hopper(far, k, v, q)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_a_scale_that_is_not_positive_is_refused(paged_batch, scale):
    """The kernel takes a row's peak before it scales, which a negative scale would turn around."""
    batch = paged_batch([16], [16], scale=scale)
    with pytest.raises(UnsupportedError, match="positive"):
        batch.prefill()


@pytest.mark.parametrize("heads", [(6, 2), (5, 1), (80, 1)])
def test_groups_that_do_not_divide_a_block_equal_the_reference(paged_batch, heads):
    """A block of rows may begin and end within a group of heads."""
    batch = paged_batch([50, 70], [50, 9], heads=heads)
    batch.assert_right(batch.prefill())
