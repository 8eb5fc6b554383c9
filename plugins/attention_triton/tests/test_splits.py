"""Few rows of prompts behind long contexts: their keys are split among programs, and merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm_attention_triton import backend as triton_backend, split_work
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.split_work import SplitShape, SplitWork
from nanovllm_core.api import InconsistentStateError, PrefillMetadata
from nanovllm_kit.attention_checks import run_prefill
from nanovllm_kit.latent_attention import LatentSizes, make_latent_case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there; see test_gpu_splits.py"
)


@pytest.fixture
def multiprocessors(monkeypatch):
    """Backends that are made now take the device for one of so many; the interpreter has one."""

    def pretend(number):
        monkeypatch.setattr(triton_backend, "num_multiprocessors", lambda _device: number)

    return pretend


def split_counts(backend):
    """The number of splits of every row block that the last plan has."""
    work = backend._splits
    num_items, num_blocks = work.counts.tolist()
    counts = work.items[6, work.first_items[:num_blocks]].tolist()
    assert sum(counts) == num_items
    return counts


def made_work(lens, query_lens, shape):
    """The plan of chunks of such lengths, and what it was made of."""
    work = SplitWork(shape, torch.device("cpu"))
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    table = torch.zeros(len(lens), 1, dtype=torch.int32)
    lens_S = torch.tensor(lens, dtype=torch.int32)
    metadata = PrefillMetadata(table, lens_S, starts, max(query_lens), max(lens))
    work.plan(metadata)
    return work, metadata


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 6000)), min_size=1, max_size=9)
    | st.lists(st.tuples(st.integers(0, 2), st.integers(0, 900)), min_size=1, max_size=40),
    heads=st.sampled_from([(1, 1), (1, 4), (2, 2), (8, 3), (8, 8), (16, 1)]),
    multiprocessors=st.sampled_from([1, 4, 20, 132]),
    resident=st.sampled_from([1, 2]),
    window=st.sampled_from([None, 100, 2000]),
)
def test_a_plan_has_each_row_block_once_in_splits_that_fit_the_grid(
    chunks, heads, multiprocessors, resident, window
):
    """A launch relies on it, whatever the lengths, heads and device."""
    query_lens = [length for length, _ in chunks]
    lens = [length + context if length else 0 for length, context in chunks]
    num_kv_heads, group = heads
    shape = SplitShape(
        num_kv_heads=num_kv_heads, group=group, block_m=32, block_n=32, block_d=16,
        num_multiprocessors=multiprocessors, resident=resident, max_num_seqs=40, window=window,
    )  # fmt: skip
    work, metadata = made_work(lens, query_lens, shape)
    if not work.serves(metadata, sum(query_lens)):
        return
    num_items, num_blocks = work.counts.tolist()
    items = work.items[:, :num_items].T.tolist()
    blocks = [
        (seq, first_row)
        for seq, length in enumerate(query_lens)
        for first_row in reversed(range(0, length * group, 32))
    ]
    found = [(item[0], item[4]) for item in items if item[5] == 0]
    assert found == blocks
    firsts = [place for place, item in enumerate(items) if item[5] == 0]
    assert work.first_items[:num_blocks].tolist() == firsts
    for place in firsts:
        own = items[place : place + items[place][6]]
        assert [item[5] for item in own] == list(range(items[place][6]))
        assert len({(*item[:5], item[6]) for item in own}) == 1
    assert num_items == sum(items[place][6] for place in firsts)
    starts = [sum(query_lens[:seq]) for seq in range(len(query_lens))]
    for seq, start, query_len, seq_len, _first_row, _split, splits in items:
        assert (start, query_len, seq_len) == (starts[seq], query_lens[seq], lens[seq])
        assert 1 <= splits <= 64
    most_blocks = sum(query_lens) * group // 32 + len(query_lens)
    assert num_blocks <= most_blocks
    assert num_items <= shape.most_items(most_blocks)
    assert num_items <= work.capacity
    if num_items > num_blocks:
        assert num_items * num_kv_heads <= len(work.partial)
        assert num_items <= shape.most_parts


@pytest.mark.parametrize(
    ("queries", "context", "window", "splits"),
    [
        # Qwen3-8B on 132 multiprocessors: 8 KV heads of 4 query heads, tiles of 64 by 64.
        (100, 500, None, 1),
        (16, 2000, None, 8),
        (16, 16000, None, 16),
        (16, 64000, None, 33),
        (100, 16000, None, 4),
        (500, 16000, None, 1),
        (700, 16000, None, 3),
        (16, 64000, 2000, 8),
    ],
)
def test_short_contexts_stay_whole_and_long_ones_fill_the_gpu(queries, context, window, splits):
    """The plan chooses the numbers of splits that were the fastest on an H200."""
    shape = replace(GQA, window=window)
    work, metadata = made_work([context + queries], [queries], shape)
    assert work.serves(metadata, queries)
    assert work.items[6, 0] == splits
    assert work.counts[0] <= shape.most_items(queries * 4 // 64 + 1)


GQA = SplitShape(
    num_kv_heads=8, group=4, block_m=64, block_n=64, block_d=128, num_multiprocessors=132,
    resident=2, max_num_seqs=256,
)  # fmt: skip


def test_no_row_block_has_more_splits_than_are_merged_at_once():
    """However long its context is, and however many multiprocessors idle."""
    work, _ = made_work([400_000], [1], replace(GQA, num_kv_heads=1))
    assert work.items[6, 0] == 64


@pytest.mark.parametrize("heads", [(1, 4), (8, 4), (2, 8)])
@pytest.mark.parametrize("queries", [1, 16, 100])
def test_what_is_too_short_to_split_is_never_split(heads, queries):
    """So a step that the host knows to be short is planned as if it had no items."""
    shape = replace(GQA, num_kv_heads=heads[0], group=heads[1])
    long = [keys for keys in range(queries, 1000, 8) if shape.may_split(keys)]
    assert long[0] <= 456
    for keys in range(queries, long[0], 16):
        work, metadata = made_work([keys], [queries], shape)
        assert not work.serves(metadata, queries)
        work.plan(replace(metadata, max_seq_len=10_000))
        assert work.items[6, 0] == 1, keys


def test_more_prompts_than_the_workspace_holds_are_refused():
    """And not left out."""
    with pytest.raises(InconsistentStateError, match=r"3 prompts.*max_num_seqs=2"):
        made_work([900] * 3, [4] * 3, replace(GQA, max_num_seqs=2))


class Launches:
    """Stands where a kernel does: counts its launches, and runs it."""

    def __init__(self, kernel):
        self.kernel, self.number = kernel, 0

    def __getitem__(self, grid):
        self.number += 1
        return self.kernel[grid]


SHAPES = [
    {},
    {"heads": (6, 2), "block_size": 64},
    {"heads": (5, 1), "head_size": 80, "dtype": torch.float16},
    {"window": 400},
    {"window": 650, "block_size": 64, "dtype": torch.float16},
    {"cap": 5.0, "heads": (4, 4)},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_split_contexts_equal_the_reference(paged_batch, multiprocessors, shape):
    """Rows of one token and of many, one without keys, behind contexts of unequal lengths."""
    multiprocessors(64)
    batch = paged_batch([300, 1, 777, 0, 64, 450], [20, 1, 5, 0, 60, 1], **shape)
    backend = batch.backend()
    batch.assert_right(batch.prefill(backend))
    counts = split_counts(backend)
    assert max(counts) > 1
    assert 1 in counts


@pytest.mark.parametrize(
    ("lens", "queries", "heads", "window"),
    [
        ([3000], [90], (4, 1), None),  # more items of a sequence than are listed at a time
        ([3000, 700], [5, 40], (4, 2), 1000),  # splits that have no tile of the window
    ],
)
def test_many_items_and_empty_ones_equal_the_reference(
    paged_batch, multiprocessors, lens, queries, heads, window
):
    """Of a large GPU."""
    multiprocessors(300)
    batch = paged_batch(lens, queries, heads=heads, window=window, dtype=torch.float16)
    backend = batch.backend()
    batch.assert_right(batch.prefill(backend))
    assert max(split_counts(backend)) > 1


def test_the_first_step_has_kernels_of_items_compiled_and_keeps_its_result(
    paged_batch, multiprocessors, monkeypatch
):
    """No request shall wait for a compiler, and a long step is attended by row blocks."""
    plans = Launches(split_work.plan_splits_kernel)
    merges = Launches(split_work.merge_splits_kernel)
    monkeypatch.setattr(split_work, "plan_splits_kernel", plans)
    monkeypatch.setattr(split_work, "merge_splits_kernel", merges)
    multiprocessors(1)
    batch = paged_batch([900], [800], heads=(4, 2))
    backend = batch.backend()
    batch.assert_right(batch.prefill(backend))
    assert (plans.number, merges.number) == (2, 1)  # the step's own plan, which nothing reads
    batch.assert_right(batch.prefill(backend))
    assert (plans.number, merges.number) == (3, 1)


@pytest.mark.parametrize("num_heads", [3, 16])
def test_split_latent_contexts_equal_the_reference(multiprocessors, num_heads):
    """Prompts over the rows of a latent cache."""
    multiprocessors(12)
    sizes = LatentSizes(latent=32, rotated=16)
    case = make_latent_case([300, 0, 257, 90], sizes, query_lens=[3, 0, 1, 1], num_heads=num_heads)
    backend = triton_backend.TritonAttention(TritonOptions(), case.config())
    backend.allocate()
    case.assert_close(run_prefill(backend, case))
    assert max(split_counts(backend)) > 1


def test_a_needle_is_found_in_whichever_split_it_lies(paged_batch, multiprocessors):
    """The one key that matters, at both sides of every border of splits."""
    multiprocessors(16)
    needles = [0, 159, 160, 191, 192, 319, 320, 599]
    batch = paged_batch([600] * 8, [1] * 8, needles=needles, heads=(2, 1))
    backend = batch.backend()
    out = batch.prefill(backend)
    batch.assert_right(out)
    assert min(split_counts(backend)) > 1
    for row, needle in enumerate(needles):
        assert (out[row] - batch.v[row][needle]).abs().max() < 2e-2


def test_results_of_one_plan_serve_every_layer_and_the_next_plan_replaces_them(
    paged_batch, multiprocessors
):
    """As a captured step runs them: one workspace, other lengths, no trace of the step before."""
    multiprocessors(24)
    long = paged_batch([700, 300], [4, 9], seed=1)
    short = paged_batch([240, 20], [4, 9], seed=2)
    backend = long.backend()
    first = long.prefill(backend)
    short.assert_right(short.prefill(backend))
    assert split_counts(backend) == [1, 1]
    again = long.prefill(backend)
    assert torch.equal(first, again)
    q, metadata = long.packed_q, long.prefill_metadata()
    other_layer = torch.full_like(q, float("nan"))
    backend.run_prefill(q, long.k_cache, long.v_cache, metadata, other_layer)
    assert torch.equal(first, other_layer)


def test_chunks_of_a_fixed_length_leave_prompts_whole(paged_batch, multiprocessors):
    """`chunk_size` promises the same bits in every batch, and a split depends on the others."""
    multiprocessors(24)
    batch = paged_batch([700, 300], [4, 9])
    backend = batch.backend(TritonOptions(chunk_size=64))
    alone = replace(batch, q=batch.q[1:], k=batch.k[1:], v=batch.v[1:],
                    block_table=batch.block_table[1:])  # fmt: skip
    assert torch.equal(batch.prefill(backend)[4:], alone.prefill(backend))
    assert "split_items" not in backend.captured_tensors()
    assert "split_items" in batch.backend().captured_tensors()
