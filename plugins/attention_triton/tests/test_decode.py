"""Decode: every key counts once, whatever the blocks, the cut of the context and the neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.decode import DecodeShape, DecodeWorkspace
from nanovllm_attention_triton.decode_tuning import (
    DECODE_EIGHT_HEADS,
    DECODE_FEW,
    DECODE_FOUR,
    DECODE_FOUR_HEADS,
    DECODE_MANY,
    DECODE_SIX,
    DECODE_THREE,
    DECODE_WHOLE,
    WIDE_DECODE,
    WIDE_HEADS,
    decode_tunings,
    program_memory,
)
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_core.api import DecodeMetadata, InconsistentStateError, UnsupportedError

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there; see test_gpu.py"
)


@pytest.mark.parametrize("chunk", [64, 128, None])
def test_half_precision_and_head_size_128_equal_the_reference(paged_batch, chunk):
    """fp16 inputs, fp32 sums, one chunk or several."""
    batch = paged_batch([130, 7, 0, 257], head_size=128, block_size=32, dtype=torch.float16)
    batch.assert_right(batch.decode(batch.backend(TritonOptions(chunk_size=chunk))))


def test_a_group_larger_than_one_program_is_cut_into_blocks_of_heads(paged_batch):
    """80 query heads of one KV head take two programs, the second partly filled."""
    batch = paged_batch([70, 129], heads=(80, 1))
    batch.assert_right(batch.decode(batch.backend(TritonOptions(chunk_size=64))))


@pytest.mark.parametrize("chunk", [64, None])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_no_key_is_lost_at_the_edges_of_blocks_tiles_and_chunks(paged_batch, block_size, chunk):
    """The one key that matters sits in a different place in each row; its value is the output."""
    needles = [0, 15, 16, 31, 32, 63, 64, 127, 128, 298, 299]
    batch = paged_batch([300] * len(needles), needles=needles, block_size=block_size)
    out = batch.decode(batch.backend(TritonOptions(chunk_size=chunk)))
    batch.assert_right(out)
    for row, needle in enumerate(needles):
        value = batch.v[row][needle].repeat_interleave(2, 0)
        torch.testing.assert_close(out[row], value, atol=2e-2, rtol=0)


def test_a_padded_row_reads_nothing_and_writes_zeros(paged_batch):
    """Length 0 with a block table that names no block: zeros, though the output held NaN."""
    batch = paged_batch([0, 40, 0])
    out = batch.decode()
    assert (out[0] == 0).all()
    assert (out[2] == 0).all()
    batch.assert_right(out)


def test_strided_queries_and_a_shared_cache_tensor_are_read_in_place(paged_batch):
    """q is a slice of packed qkv; K and V are the two halves of one tensor."""
    batch = paged_batch([33, 90])
    expected = batch.decode()
    packed = torch.full((2, 8, 64), float("nan"))
    packed[:, :4] = batch.packed_q
    both = torch.stack([batch.k_cache, batch.v_cache])
    backend, metadata = batch.backend(), batch.decode_metadata()
    out = torch.empty(2, 4, 64)
    backend.plan_decode(metadata)
    backend.run_decode(packed[:, :4], both[0], both[1], metadata, out)
    torch.testing.assert_close(out, expected, atol=0, rtol=0)


def test_repeated_runs_are_bitwise_equal_and_leave_the_tickets_at_zero(paged_batch):
    """One plan serves many layers: what a layer leaves behind must not reach the next."""
    batch = paged_batch([300, 64, 129])
    backend = batch.backend(TritonOptions(chunk_size=64))
    first = batch.decode(backend)
    metadata = batch.decode_metadata()
    for _ in range(2):
        again = torch.empty_like(first)
        backend.run_decode(batch.packed_q, batch.k_cache, batch.v_cache, metadata, again)
        assert torch.equal(again, first)
    tickets = [t for n, t in backend.captured_tensors().items() if "tickets" in n]
    assert tickets
    assert not any(t.any() for t in tickets)


def test_batches_of_few_and_of_many_rows_are_cut_alike_with_a_fixed_chunk(paged_batch):
    """Else a row's bits would change when the batch grows."""
    backend = paged_batch([300]).backend()
    config = replace(backend.config, max_num_seqs=200, dtype=torch.float16)
    free = TritonAttention(TritonOptions(), config).decode_tunings
    assert len(free) > 1
    assert free[-1][0] == 200
    fixed = TritonAttention(TritonOptions(chunk_size=128), config).decode_tunings
    assert [rows for rows, _ in fixed] == [200]


def test_programs_take_parts_of_large_groups_in_steps_of_few_rows():
    """And longer chunks, also where groups of three and four stay whole."""
    device = {"num_multiprocessors": 132, "shared_memory": 228 * 1024}

    def in_parts(num_heads, num_kv_heads, head_size=128):
        chosen = decode_tunings(
            2, head_size, num_heads, num_kv_heads, 200, TritonOptions(), **device
        )
        parts = DECODE_FOUR_HEADS, DECODE_EIGHT_HEADS
        return [(rows, tuning.most_heads) for rows, tuning in chosen if tuning in parts]

    assert DECODE_FOUR_HEADS.min_chunk == DECODE_EIGHT_HEADS.min_chunk == 64
    assert in_parts(32, 8) == in_parts(24, 8) == [(1, 4)]
    assert in_parts(32, 4) == in_parts(28, 4) == [(4, 4)]
    assert in_parts(64, 8) == [(2, 4)]
    assert in_parts(32, 2) == in_parts(18, 2) == [(4, 4), (16, 8)]
    assert in_parts(32, 4, head_size=64) == [(2, 4)]
    for num_heads, num_kv_heads in ((16, 8), (8, 8), (64, 16), (48, 1), (34, 2)):
        assert in_parts(num_heads, num_kv_heads) == []


def tunings(head_size=128, num_kv_heads=8, options=None, **device):
    """Those of 256 rows of groups of two heads in half precision, by default on an H200."""
    device = {"num_multiprocessors": 132, "shared_memory": 228 * 1024} | device
    options = options or TritonOptions()
    return decode_tunings(2, head_size, 2 * num_kv_heads, num_kv_heads, 256, options, **device)


def test_rows_that_have_a_multiprocessor_for_each_kv_head_stay_whole():
    """Where shared memory holds one such program, and no other; elsewhere smaller ones share it."""
    whole = DECODE_WHOLE
    assert dict(tunings())[16] == whole
    assert dict(tunings(num_kv_heads=4))[33] == whole
    assert dict(tunings(num_multiprocessors=114))[14] == whole
    for others in (
        tunings(num_multiprocessors=64),  # fewer than the rows of the table before
        tunings(head_size=64),
        tunings(shared_memory=100 * 1024),
        tunings(options=TritonOptions(decode_num_stages=5)),
        tunings(options=TritonOptions(decode_num_stages=2)),  # room for three
    ):
        assert others
        assert [rows for rows, _ in others] == sorted({rows for rows, _ in others})
        stages = whole.num_stages
        assert whole not in [replace(tuning, num_stages=stages) for _, tuning in others]


def test_each_number_of_rows_has_constants_that_are_resident_at_once():
    """By what a multiprocessor has room for: on one of 100 KiB there are no three or four."""
    assert [rows for rows, _ in tunings()] == [8, 16, 41, 49, 66, 256]
    assert [tuning for _, tuning in tunings()][2:5] == [DECODE_SIX, DECODE_THREE, DECODE_FOUR]
    assert [rows for rows, _ in tunings(num_kv_heads=4)] == [16, 33, 82, 99, 132, 256]
    assert [rows for rows, _ in tunings(num_multiprocessors=148)] == [8, 18, 46, 55, 74, 256]
    small = dict(tunings(num_multiprocessors=142, shared_memory=100 * 1024))
    assert DECODE_SIX in small.values()
    assert not {DECODE_WHOLE, DECODE_THREE, DECODE_FOUR} & {*small.values()}


def test_small_heads_have_tables_of_their_own():
    """Mostly tiles of twice the keys, in as much shared memory; on a GPU with less not the last."""
    small = tunings(head_size=64)
    six, many = (
        replace(one, tile=2 * one.tile, min_chunk=2 * one.tile) for one in (DECODE_SIX, DECODE_MANY)
    )
    assert small == tunings(head_size=32)
    assert small == [
        (8, DECODE_FEW[2]), (41, six), (49, DECODE_THREE), (66, DECODE_MANY), (256, many)
    ]  # fmt: skip
    assert program_memory(six, 64) == program_memory(DECODE_SIX, 128)
    assert dict(tunings(head_size=96))[41] == DECODE_SIX
    for shared_memory, last in ((100, DECODE_MANY), (164, DECODE_MANY), (228, many)):
        others = tunings(head_size=64, shared_memory=shared_memory * 1024)
        assert others[-1] == (256, last)
    for stages in (4, 6):
        options = TritonOptions(decode_num_stages=stages)
        others = tunings(head_size=64, options=options, shared_memory=100 * 1024)
        assert all(program_memory(tuning, 64) < 100 * 1024 for _, tuning in others)


def test_large_groups_of_small_heads_have_the_tiles_of_others():
    """Results of so many heads would spill the registers of programs with larger tiles."""
    device = {"num_multiprocessors": 132, "shared_memory": 228 * 1024}
    chosen = [
        dict(decode_tunings(2, 64, group, 1, 1024, TritonOptions(), **device)).values()
        for group in (16, 17, 71)
    ]
    assert [DECODE_SIX in one for one in chosen] == [False, True, True]
    assert [[*one][-1] == DECODE_MANY for one in chosen] == [False, True, True]
    assert not any(DECODE_WHOLE in one for one in chosen)


def test_wide_heads_have_the_same_tables_of_half_as_many_keys():
    """In as much shared memory; a row or two have their own; chunks of fixed length one for all."""
    wide, narrow = tunings(head_size=256), tunings()
    assert [rows for rows, _ in wide] == [2, *(rows for rows, _ in narrow)]
    assert [rows for rows, _ in tunings(head_size=192)] == [rows for rows, _ in wide]
    for (rows, halved), (_, whole) in zip(wide[1:], narrow, strict=True):
        if whole == DECODE_FOUR:
            assert halved == WIDE_DECODE[2], rows
        else:
            assert (halved.tile, halved.most_heads) == (whole.tile // 2, WIDE_HEADS)
            assert program_memory(halved, 256) - program_memory(whole, 128) == 2 * 1024
    small = tunings(head_size=256, num_multiprocessors=142, shared_memory=100 * 1024)
    assert all(program_memory(tuning, 256) < 100 * 1024 for _, tuning in small)
    [(rows, fixed)] = tunings(head_size=256, options=TritonOptions(chunk_size=128))
    assert (rows, fixed.fixed_chunk, fixed.tile) == (256, 128, 32)


@pytest.mark.parametrize("num_heads", [8, 16, 32, 64, 128])
def test_programs_of_wide_heads_and_large_groups_have_four_warps(num_heads):
    """Those of two would spill the results of more than four query heads."""
    device = {"num_multiprocessors": 132, "shared_memory": 228 * 1024}
    warps = {
        tuning.num_warps
        for _, tuning in decode_tunings(2, 256, num_heads, 4, 256, TritonOptions(), **device)
    }
    assert warps == ({2, 4} if num_heads <= 16 else {4})


@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [None, 512])
def test_rows_of_a_table_of_resident_programs_are_resident(head_size, num_kv_heads, window):
    """All programs of uncut rows have their place at once, by registers and by memory."""
    for num_heads in (num_kv_heads, 4 * num_kv_heads):
        chosen = decode_tunings(
            2, head_size, num_heads, num_kv_heads, 256, TritonOptions(),
            num_multiprocessors=132, shared_memory=228 * 1024,
        )  # fmt: skip
        for rows, tuning in chosen:
            shape = DecodeShape(
                num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
                max_num_seqs=256, max_seq_len=4096, num_multiprocessors=132, window=window,
                most_heads=tuning.most_heads,
            )  # fmt: skip
            masked = window and head_size in (64, 128)  # registers for masks leave room for three
            if tuning.registers and not (tuning == DECODE_FOUR and masked):
                assert rows <= shape.resident_items(rows, tuning), (rows, tuning)


def planned_items(tuning, lens):
    """The shape of 16 query and 8 KV heads on an H200; each item's row, first and end token."""
    shape = DecodeShape(
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        max_num_seqs=128,
        max_seq_len=16384,
        num_multiprocessors=132,
    )
    workspace = DecodeWorkspace(shape, tuning, torch.device("cpu"))
    table = torch.zeros(len(lens), 64, dtype=torch.int32)
    workspace.plan(torch.tensor(lens, dtype=torch.int32), table, 256)
    return shape, workspace.items[:3, : int(workspace.num_items)]


@pytest.mark.parametrize(
    ("tuning", "lens", "longest"),
    [
        (DECODE_WHOLE, [768] * 16, 768),
        (DECODE_WHOLE, [500, 800, 760, 640] * 4, 896),
        (DECODE_WHOLE, [1500, *[300] * 15], 384),
        (DECODE_WHOLE, [3500], 256),
        (DECODE_WHOLE, [3500, *[0] * 15], 256),
        (DECODE_THREE, [768] * 48, 768),
        (DECODE_THREE, [*[3500] * 3, *[350] * 45], 512),
        (DECODE_FOUR, [768] * 64, 768),
        (DECODE_FOUR, [700, 836] * 32, 896),
        (DECODE_FOUR, [3500, *[350] * 63], 512),
        (DECODE_FOUR, [*[350] * 60, *[3500] * 4], 512),
    ],
)
def test_rows_are_cut_into_two_waves_only_where_that_ends_sooner(tuning, lens, longest):
    """`longest`: tokens that no program exceeds. One wave of equal rows needs no merge at all.

    The programs of the longest rows begin first where not all of them begin at once.
    """
    shape, (rows, begins, ends) = planned_items(tuning, lens)
    count = len(rows)
    assert max(longest - 128, 1) <= (ends - begins).max() <= longest
    if len({*lens}) == 1 and len(lens) > 1:
        assert count == len(lens)
    if count > shape.resident_items(len(lens), tuning):
        in_order = [lens[row] for row in rows.tolist()]
        assert in_order == sorted(in_order, reverse=True)


@pytest.mark.parametrize(
    ("lens", "longest"),
    [
        ([1400] * 72, 1400),  # rows of equal length stay whole
        ([300, 1900] * 50, 1900),  # and unequal ones that are no longer than a program's share
        ([200] * 71 + [3900], 384),  # 18,100 tokens for 50 programs of each KV head
        ([6000] * 80, 3008),  # a share is 4,096 tokens at most
    ],
)
def test_of_many_rows_those_are_cut_that_are_longer_than_a_programs_share(lens, longest):
    """`longest`: tokens that no program exceeds, and that some program nearly has."""
    _, (rows, begins, ends) = planned_items(DECODE_MANY, lens)
    assert 3 * longest // 4 <= (ends - begins).max() <= longest
    assert len(rows) == sum(-(-length // longest) for length in lens)


@given(
    tuning=st.sampled_from([DECODE_FEW[2], DECODE_FOUR_HEADS, DECODE_MANY]),
    group=st.integers(1, 64),
    short_rows=st.integers(0, 39),
    length=st.integers(101, 60_000),
)  # fmt: skip
@example(tuning=DECODE_FEW[2], group=2, short_rows=7, length=800)
@example(tuning=DECODE_FEW[2], group=64, short_rows=0, length=900_000)
@example(tuning=DECODE_FOUR_HEADS, group=16, short_rows=7, length=12_000)
@example(tuning=DECODE_MANY, group=8, short_rows=5, length=800)
@settings(deadline=None, max_examples=60)
def test_no_other_cut_of_the_longest_row_is_attended_and_merged_sooner(
    tuning, group, short_rows, length
):
    """By the rounds in which its last program merges; twice as many parts in each where programs
    prepare q, k and v.
    """
    shape = DecodeShape(
        num_heads=2 * group,
        num_kv_heads=2,
        head_size=128,
        max_num_seqs=64,
        max_seq_len=2**20,
        num_multiprocessors=132,
        most_heads=tuning.most_heads,
    )
    rows = short_rows + 1
    workspace = DecodeWorkspace(shape, tuning, torch.device("cpu"))
    round_parts, round_tokens = workspace.merge_round(rows)
    elements = 8192 if shape.prepares(rows) else 4096
    assert round_parts == max(elements // 128 // shape.partial_heads, 1)
    lens = torch.tensor([100] * short_rows + [length], dtype=torch.int32)
    workspace.plan(lens, torch.zeros(rows, 2**12, dtype=torch.int32), 256)
    count = int(workspace.num_items)
    parts = int(workspace.items[4, count - 1])
    chunk = int((workspace.items[2, :count] - workspace.items[1, :count])[-parts:].max())

    def time(chunk):
        parts = -(-length // chunk)
        return chunk + (-(-parts // round_parts) * round_tokens if parts > 1 else 0)

    tile = tuning.tile
    least = -(-tuning.min_chunk // tile) * tile
    quickest = min(range(least, length + tile, tile), key=lambda chunk: (time(chunk), -chunk))
    cut = -(-length // quickest)
    items, most = (
        sum(-(-each // quickest) for each in lens.tolist()),
        shape.resident_items(rows, tuning),
    )
    if rows > most:  # longer where the batch alone makes programs enough
        assert parts <= cut
    elif items > most:
        assert quickest < chunk
        assert count <= most
    else:  # chunks are of equal length
        assert parts == cut
        assert -(-chunk // tile) * tile <= quickest


@pytest.mark.parametrize(("rows", "resident"), [(1, 4), (8, 4), (16, 5)])
def test_the_grid_of_few_rows_holds_no_program_that_is_not_resident_at_once(rows, resident):
    """However long rows may become: those beyond would end at once, or be a second wave.

    `resident` programs share a multiprocessor; one that prepares q, k and v has more registers.
    """
    shape = DecodeShape(
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        max_num_seqs=16,
        max_seq_len=40960,
        num_multiprocessors=132,
    )
    items = shape.max_items(rows, 40960, DECODE_FEW[2]) - (rows - 1)  # a row may have no tokens
    assert resident * 132 - 8 < items * shape.programs_per_item <= resident * 132


def test_with_a_fixed_chunk_a_row_is_bitwise_the_same_in_any_batch(paged_batch):
    """Neighbours and padding change nothing; without the option, nothing beyond rounding."""
    batch = paged_batch([300, 0, 129, 511])
    options = TritonOptions(chunk_size=128)
    together, free = batch.decode(batch.backend(options)), batch.decode()
    for row in range(4):
        alone = replace(
            batch,
            q=batch.q[row : row + 1],
            k=batch.k[row : row + 1],
            v=batch.v[row : row + 1],
            block_table=batch.block_table[row : row + 1],
        )
        assert torch.equal(alone.decode(alone.backend(options))[0], together[row])
        torch.testing.assert_close(alone.decode()[0], free[row], atol=1e-6, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@example([1] * 10, 8, 16, 1, 1, None, 168, 64, 16)  # fewer rows than are resident, of more at most
@given(
    lens=st.lists(st.integers(0, 2000), min_size=1, max_size=12),
    kv_heads=st.sampled_from([1, 2, 8]),
    multiprocessors=st.sampled_from([1, 16, 132]),
    wave=st.integers(1, 4),
    programs=st.integers(1, 16),
    fixed=st.sampled_from([None, 64, 512]),
    registers=st.sampled_from([None, 64, 168]),
    second_wave=st.sampled_from([None, 64, 512]),
    block_size=st.sampled_from([16, 64, 256]),
)
def test_the_plan_covers_every_token_once_within_its_grid(
    lens, kv_heads, multiprocessors, wave, programs, fixed, registers, second_wave, block_size
):
    """Items of a row are consecutive whole tiles, and no step makes more than the grid holds.

    Where a block holds whole tiles, an item also names the block in which it begins. Where the
    constants bound the registers, rows that can be resident at once are, or are cut into half as
    many items more. Items of more programs than begin at once are those of the longest rows first.
    """
    shape = DecodeShape(
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_size=64,
        max_num_seqs=16,
        max_seq_len=2048,
        num_multiprocessors=multiprocessors,
    )
    tuning = replace(
        DECODE_FEW[2],
        wave_programs=wave,
        max_programs=programs,
        fixed_chunk=fixed,
        registers=registers,
        second_wave=second_wave,
    )
    workspace = DecodeWorkspace(shape, tuning, torch.device("cpu"))
    table = torch.arange(len(lens) * 2048 // block_size, dtype=torch.int32).view(len(lens), -1)
    workspace.plan(torch.tensor(lens, dtype=torch.int32), table, block_size)
    count = int(workspace.num_items)
    assert count <= shape.max_items(len(lens), 2048, tuning) <= workspace.capacity
    items = [tuple(item) for item in workspace.items[:, :count].T.tolist()]
    resident, real = shape.resident_items(len(lens), tuning), [length for length in lens if length]
    num_real = count - (len(lens) - len(real))
    is_cut_for_waves = second_wave and fixed is None and len(real) <= resident < num_real
    longest_first = sorted(range(len(lens)), key=lambda row: -lens[row])
    order = list(dict.fromkeys(item[0] for item in items))
    if shape.starts_in_waves(len(lens), tuning) or is_cut_for_waves:
        assert order == longest_first
    assert order in (longest_first, list(range(len(lens))))
    expected_item = 0
    for row in order:
        length = lens[row]
        mine = [item for item in items if item[0] == row]
        assert [begin for _, begin, *_ in mine] == [0, *(end for _, _, end, *_ in mine[:-1])]
        if length and block_size % tuning.tile == 0:
            assert [item[5] for item in mine] == [
                table[row, item[1] // block_size] for item in mine
            ]
        assert mine[-1][2] == length
        assert all(begin % tuning.tile == 0 for _, begin, *_ in mine)
        assert {item[3:5] for item in mine} == {(expected_item, len(mine))}
        assert items[expected_item : expected_item + len(mine)] == mine
        expected_item += len(mine)
    assert expected_item == count
    if len(real) <= resident and fixed is None:
        more = resident // 2 if second_wave else 0
        assert len(real) <= num_real <= resident + more


def test_what_decode_cannot_do_is_refused_with_its_numbers(paged_batch):
    """Two queries per row, too many rows, blocks of other sizes or strides, no workspace."""
    batch = paged_batch([5, 9])
    backend, metadata = batch.backend(), batch.decode_metadata()
    with pytest.raises(UnsupportedError, match="query_len=2"):
        backend.plan_decode(replace(metadata, query_len=2))
    many = DecodeMetadata(batch.block_table.repeat(2, 1), metadata.seq_lens.repeat(2), 16)
    with pytest.raises(InconsistentStateError, match=r"4 rows.*max_num_seqs=2"):
        backend.plan_decode(many)
    q = batch.packed_q
    with pytest.raises(UnsupportedError, match="equal strides"):
        backend.run_decode(
            q, batch.k_cache, batch.v_cache.repeat(1, 1, 2, 1)[:, :, :2], metadata, q
        )
    with pytest.raises(InconsistentStateError, match=r"blocks of 8 tokens.*block_size=16"):
        backend.run_decode(q, batch.k_cache[:, :8], batch.v_cache[:, :8], metadata, q)
    with pytest.raises(UnsupportedError, match="contiguous head"):
        backend.run_decode(
            q.transpose(1, 2), batch.k_cache, batch.v_cache, metadata, q.transpose(1, 2)
        )
    bare = type(backend)(TritonOptions(), batch.config())
    assert bare.captured_tensors() == {}
    with pytest.raises(InconsistentStateError, match="allocate"):
        bare.plan_decode(metadata)


def test_few_rows_prepare_q_k_v_by_the_programs_that_they_make():
    """64 programs, and one for two multiprocessors, of one chunk of each row."""
    for multiprocessors, kv_heads, group, most in (
        (132, 8, 4, 8),
        (132, 4, 2, 16),
        (132, 16, 1, 4),
        (132, 2, 128, 16),  # two programs for a KV head
        (58, 4, 7, 7),  # also where programs take parts of a group
        (148, 1, 8, 64),
        (108, 1, 8, 54),
    ):
        shape = DecodeShape(
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_size=128,
            max_num_seqs=256,
            max_seq_len=4096,
            num_multiprocessors=multiprocessors,
        )
        shapes = [
            replace(shape, most_heads=heads) for heads in (shape.most_heads, 4) if group <= 64
        ] or [shape]
        for one in shapes:
            assert [rows for rows in range(1, 257) if one.prepares(rows)] == [*range(1, most + 1)]
