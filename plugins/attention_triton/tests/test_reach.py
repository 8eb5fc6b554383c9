"""Every head size, sliding windows and soft caps, alone and together, in decode and prefill."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from nanovllm_attention_triton.decode import DecodeShape, DecodeWorkspace
from nanovllm_attention_triton.decode_tuning import DECODE_FEW
from nanovllm_attention_triton.options import TritonOptions

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there; see test_gpu.py"
)
HEAD_SIZES = (1, 64, 128, 192, 256, *Random(0).sample(range(2, 256), 4))
"""Powers of two, and sizes that are padded to one."""
WINDOWS = (None, 1, 5, 16, 40, 100, 1000)
"""None, one key, within a block, a block, across blocks, across chunks, beyond every sequence."""


@pytest.mark.parametrize("chunk", [64, None])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", WINDOWS)
def test_decode_sees_its_window_and_caps_its_scores(paged_batch, window, cap, chunk):
    """Rows shorter and longer than the window, one empty, in one chunk and in several."""
    batch = paged_batch([1, 0, 40, 63, 64, 200], window=window, cap=cap)
    batch.assert_right(batch.decode(batch.backend(TritonOptions(chunk_size=chunk))))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", WINDOWS)
def test_prefill_sees_its_window_and_caps_its_scores(paged_batch, window, cap):
    """Whole prompts and chunks behind a prefix: a window is counted from each query's position."""
    batch = paged_batch([1, 0, 150, 64, 200], [1, 0, 20, 64, 70], window=window, cap=cap)
    batch.assert_right(batch.prefill())


@pytest.mark.parametrize(
    ("block_size", "dtype", "window", "cap"),
    [(16, torch.float32, 40, 2.0), (64, torch.float16, None, None)],
)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_head_size_with_window_and_cap(
    paged_batch, head_size, block_size, window, cap, dtype
):
    """Sizes that are no power of two are padded inside the kernels and nowhere else."""
    shape = {"head_size": head_size, "block_size": block_size, "dtype": dtype}
    shape |= {"window": window, "cap": cap}
    rows = paged_batch([130, 7, 0], **shape)
    rows.assert_right(rows.decode(rows.backend(TritonOptions(chunk_size=64))))
    chunks = paged_batch([130, 33], [40, 33], **shape)
    chunks.assert_right(chunks.prefill())


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("chunk", [64, None])
def test_decode_windows_end_at_the_exact_key(paged_batch, block_size, chunk):
    """A needle at the window's first key is seen, one right before it is not."""
    window, keys = 70, 300
    for needle, seen in ((keys - window, True), (keys - window - 1, False)):
        batch = paged_batch([keys], needles=[needle], block_size=block_size, window=window)
        out = batch.decode(batch.backend(TritonOptions(chunk_size=chunk)))
        batch.assert_right(out)
        value = batch.v[0][needle].repeat_interleave(2, 0)
        assert ((out[0] - value).abs().max() < 2e-2) == seen


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("start", [0, 37, 150])
def test_prefill_windows_are_counted_from_positions_not_from_the_chunk(
    paged_batch, block_size, start
):
    """In a chunk behind a prefix a needle is seen by the positions up to a window after it."""
    window, keys, needle = 50, 200, 160
    batch = paged_batch(
        [keys], [keys - start], needles=[needle], block_size=block_size, window=window
    )
    out = batch.prefill()
    batch.assert_right(out)
    value = batch.v[0][needle].repeat_interleave(2, 0)
    near = (out - value).abs().amax((1, 2)) < 2e-2
    positions = torch.arange(start, keys)
    assert torch.equal(near, (positions >= needle) & (positions < needle + window))


def test_a_window_is_counted_alike_however_a_prompt_is_cut(paged_batch):
    """Chunks, and decode as the last of them, give what the whole prompt gives."""
    batch = paged_batch([120], [120], window=33, cap=3.0)
    whole = batch.prefill()
    parts = []
    for start, end in ((0, 7), (7, 64), (64, 119), (119, 120)):
        chunk = replace(
            batch, q=[batch.q[0][start:end]], k=[batch.k[0][:end]], v=[batch.v[0][:end]]
        )
        parts.append(chunk.prefill())
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-5)
    last = replace(batch, q=[batch.q[0][-1:]])
    torch.testing.assert_close(last.decode(), whole[-1:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [64, None])
def test_blocks_before_the_window_are_not_read(paged_batch, chunk):
    """Neither their contents, which are NaN here, nor their entries in the block table."""
    window, block_size = 40, 16
    for queries in (1, 30):
        batch = paged_batch([200], [queries], window=window, block_size=block_size)
        expected = batch.reference(torch.float32)
        # The blocks of the tile (32 tokens at most 64) that holds the first visible key are read.
        first = (200 - queries - window + 1) // 64 * 64 // block_size
        batch.k_cache[batch.block_table[0, :first].long()] = float("nan")
        batch.v_cache[batch.block_table[0, :first].long()] = float("nan")
        batch.block_table[0, :first] = 2**30
        backend = batch.backend(TritonOptions(chunk_size=chunk))
        out = batch.decode(backend) if queries == 1 else batch.prefill(backend)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 500, 2048, 5000])
@pytest.mark.parametrize("fixed", [None, 64])
def test_a_window_bounds_the_work_of_decode(window, fixed):
    """Items cover exactly the keys that are seen, none is empty, and grid and memory shrink."""
    shape = DecodeShape(
        num_heads=2, num_kv_heads=2, head_size=64, max_num_seqs=8, max_seq_len=2048,
        num_multiprocessors=16, window=window,
    )  # fmt: skip
    tuning = replace(DECODE_FEW[2], fixed_chunk=fixed)
    workspace = DecodeWorkspace(shape, tuning, torch.device("cpu"))
    lens = [0, 1, 31, 32, 33, 600, 2047, 2048]
    block_size = 64
    table = torch.arange(8 * 2048 // block_size, dtype=torch.int32).view(8, -1)
    workspace.plan(torch.tensor(lens, dtype=torch.int32), table, block_size)
    count = int(workspace.num_items)
    assert count <= shape.max_items(8, 2048, tuning) <= workspace.capacity
    assert (
        workspace.capacity
        <= DecodeWorkspace(replace(shape, window=None), tuning, torch.device("cpu")).capacity
    )
    items = workspace.items[:, :count].T.tolist()
    for row, length in enumerate(lens):
        mine = [item for item in items if item[0] == row]
        begins, ends = [item[1] for item in mine], [item[2] for item in mine]
        assert (begins[0], ends[-1]) == (max(0, length - window), length)
        assert begins[1:] == ends[:-1]
        assert all(begin % tuning.tile == 0 for begin in begins[1:])
        assert length == 0 or all(a < b for a, b in zip(begins, ends, strict=True))
        assert all(item[5] == table[row, item[1] // block_size] for item in mine if length)


def test_a_window_beyond_the_longest_sequence_is_none_at_all(paged_batch):
    """The kernels are then the plain ones, at no cost, bit for bit."""
    batch = paged_batch([40, 64])
    wide = replace(batch, window=64)
    assert torch.equal(batch.decode(), wide.decode())
    assert wide.backend()._workspaces[0].shape.window is None
