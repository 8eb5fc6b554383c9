"""Checks of what an attention backend reads and writes: blocks, block tables, padding, outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm_core.errors import UnsupportedError
from nanovllm_kit.attention_backend import (
    AttentionSubject,
    BackendUnderTest,
    assert_near,
)
from nanovllm_kit.attention_draws import with_freed_blocks
from nanovllm_kit.paged_attention import PagedCase


class AttentionBlocks(AttentionSubject):
    """A row reads the blocks that its table names, up to its length, and writes its output."""

    def test_every_block_size_is_read(self, subject: BackendUnderTest) -> None:
        """Any multiple of a listed block multiple is a block size, powers of two or not."""
        sizes = {n * multiple for multiple in subject.block_multiples for n in (1, 2, 3)}
        sizes |= {256} if 256 % subject.block_size == 0 else set()
        for size, dtype in product(sorted(sizes), dict.fromkeys((subject.dtype, subject.half))):
            shape: dict[str, Any] = {"block_size": size, "dtype": dtype}
            lengths = [1, max(1, size - 1), size, size + 1, 2 * size + 3]
            subject.check(subject.case(lengths, **shape), "decode rows")
            subject.check(subject.case([subject.longest], **shape), "one long row")
            queries = [min(n, 20) for n in lengths]
            subject.check(subject.case(lengths, queries, **shape), "chunks")

    def test_blocks_may_lie_anywhere(self, subject: BackendUnderTest) -> None:
        """A block table's order is the order of the tokens: moving blocks changes no bit."""
        for query_lens in ([1, 1], [30, 70]):
            case = subject.case([130, 70], query_lens)
            moved = torch.randperm(case.k_cache.shape[0], device=case.k_cache.device)
            elsewhere = replace(
                case,
                k_cache=torch.empty_like(case.k_cache).index_copy_(0, moved, case.k_cache),
                v_cache=torch.empty_like(case.v_cache).index_copy_(0, moved, case.v_cache),
                block_table=moved[case.block_table.long()].int(),
            )
            for phase, run in subject.ways(case):
                out = run(case)
                assert_near(case, out, f"{phase}, blocks in any order")
                if not torch.equal(out, run(elsewhere)):
                    raise AssertionError(f"{phase}: moving the blocks changed the output")

    def test_sequences_may_share_blocks(self, subject: BackendUnderTest) -> None:
        """A prefix hit: several block tables begin with the same blocks."""
        shared = 3 * subject.block_size
        for query_lens in ([1, 1, 1], [20, 1, 33]):
            case = subject.case([shared + 52, shared + 33, shared + 49], query_lens)
            case.block_table[1:, :3] = case.block_table[0, :3]
            subject.check(case, "a shared prefix")

    def test_only_the_rows_own_blocks_are_read(self, subject: BackendUnderTest) -> None:
        """The table is as wide as the longest sequence could need, and its rest is stale."""
        for query_lens in ([1, 1], [20, 33]):
            case = subject.case([50, 33], query_lens)
            width = case.block_table.shape[1]
            stale = case.block_table.new_zeros(2, width + 9)
            stale[:, :width] = case.block_table
            subject.check(replace(case, block_table=stale), "stale entries name blocks of NaN")

    def test_nothing_is_read_behind_the_last_key(self, subject: BackendUnderTest) -> None:
        """The unused tail of a last block may hold NaN, unless the backend needs it finite."""
        if subject.capabilities.needs_finite_tail:
            pytest.skip("declares that it needs finite tails")
        lengths = [1, 17, 63, 65, 130]
        subject.check(subject.case(lengths, finite_tail=False), "NaN tails")
        chunks = subject.case(lengths, [1, 17, 20, 65, 3], finite_tail=False)
        subject.check(chunks, "NaN tails")

    def test_blocks_before_the_window_may_belong_to_others(
        self, subject: BackendUnderTest, draws: Random
    ) -> None:
        """They were freed, and what is in them never matters.

        NaN does not either, unless the backend declares that it needs finite numbers.
        """
        if not subject.capabilities.sliding_window:
            pytest.skip("declares no sliding window")
        subject.skip_unless_served(sliding_window=True)
        held = 300.0 if subject.capabilities.needs_finite_tail else math.nan
        sizes = [subject.block_size, 3 * subject.block_size]
        for size, window in product(sizes, (1, 16, 40, 129)):
            for query_lens in ([1] * 5, [1, 20, 70, 33, 7]):
                shape = {"block_size": size, "sliding_window": window}
                case = subject.case([250, 200, 130, 33, 286], query_lens, **shape)
                freed, expected = with_freed_blocks(case, held, draws), case.expected()
                for phase, run in subject.ways(case):
                    what = f"{phase}, {held} in blocks before the window"
                    assert_near(case, run(freed), what, expected)

    def test_a_sequence_may_fill_the_model_length(self, subject: BackendUnderTest) -> None:
        """Rows of exactly max_model_len tokens, which need not be whole blocks, in a full batch."""
        length = 5 * subject.block_size + 3
        for query_lens in ([1, 1, 1], [length, 1, 9]):
            case = subject.case([length] * 3, query_lens)
            config = replace(case.config(), max_model_len=length)
            for phase, run in subject.ways(case):
                assert_near(case, run(case, subject.backend(config)), f"{phase}, full rows")

    def test_block_tables_may_be_slices(self, subject: BackendUnderTest) -> None:
        """A table with a stride of its own, and rows out of the middle of a larger one."""
        for query_lens in ([1, 1], [20, 33]):
            case = subject.case([50, 33], query_lens)
            width = case.block_table.shape[1]
            slices = case.block_table.new_zeros(6, width + 20)[2:4, 8 : 8 + width]
            slices.copy_(case.block_table)
            subject.check(replace(case, block_table=slices), "a slice as block table")

    def test_caches_may_be_slices(self, subject: BackendUnderTest) -> None:
        """Keys beside values in one tensor: of a cache only the head dimension is contiguous."""
        for query_lens in ([1, 1], [20, 33]):
            case = subject.case([50, 33], query_lens)
            both = torch.stack((case.k_cache, case.v_cache), dim=1)
            sliced = replace(case, k_cache=both[:, 0], v_cache=both[:, 1])
            subject.check(sliced, "caches that are slices of one tensor")

    def test_blocks_beyond_2_to_the_31_elements_are_read(self, subject: BackendUnderTest) -> None:
        """Offsets into a large cache need 64 bits. On a CPU its untouched blocks cost no memory."""
        _check_far_blocks(subject, (31,))

    def test_blocks_beyond_2_to_the_32_elements_are_read(self, subject: BackendUnderTest) -> None:
        """The same where 32 bits without a sign end, with blocks on either side of it."""
        _check_far_blocks(subject, (31, 32))

    def test_padded_rows_disturb_no_other_row(self, decoder: BackendUnderTest) -> None:
        """Rows of length 0, wherever they are in the batch, and a batch of nothing else."""
        for lengths in ([0, 40, 0, 17, 0], [33, 0], [0, 0, 0]):
            decoder.check(decoder.case(lengths), "padded rows")

    def test_an_empty_batch_is_no_error(self, subject: BackendUnderTest) -> None:
        """No row at all: nothing is read, nothing written."""
        case = subject.case([16])
        empty = replace(
            case, q_THD=case.q_THD[:0], block_table=case.block_table[:0], query_lens=(), seq_lens=()
        )
        backend = subject.backend(case.config())
        if "decode" in subject.phases:
            subject.decode(empty, backend)
        if "prefill" in subject.phases:
            subject.prefill(empty, backend)

    def test_a_sequence_may_bring_no_query(self, prefiller: BackendUnderTest) -> None:
        """Between others in a prefill batch, it shifts none of them."""
        prefiller.check(prefiller.case([40, 50, 60], [40, 0, 5]), "a sequence without queries")

    def test_only_the_output_is_written(self, subject: BackendUnderTest) -> None:
        """Every live row of it; caches, block table, lengths and what lies beside stay as they are.

        So a padded row, whose table names block 0, stores nothing there.
        """
        for lengths, query_lens in (([33, 0, 70], [1, 1, 1]), ([33, 70], [20, 70])):
            case = subject.case(lengths, query_lens)
            for cache in (case.k_cache, case.v_cache):
                cache.nan_to_num_(nan=7.0)
            for phase, run in subject.ways(case):
                kept = {
                    "the queries": case.q_THD,
                    "k_cache": case.k_cache,
                    "v_cache": case.v_cache,
                    "the block table": case.block_table,
                }
                before = [tensor.clone() for tensor in kept.values()]
                assert_near(case, run(case), f"{phase}, an output that held NaN")
                for (name, tensor), old in zip(kept.items(), before, strict=True):
                    if not torch.equal(tensor, old):
                        raise AssertionError(
                            f"{phase} wrote to {name}, of shape {tuple(old.shape)}: it may write "
                            "to its output alone"
                        )

    def test_both_parts_of_a_step_and_all_its_layers(self, subject: BackendUnderTest) -> None:
        """Both phases are planned, then each layer runs both over its own cache, on one backend."""
        if len(subject.phases) < 2:
            pytest.skip(f"declares {subject.phases[0]} only")
        first = subject.case([40, 3, 65, 33], [1, 1, 20, 33])
        second = replace(first, k_cache=-first.k_cache, v_cache=2 * first.v_cache)
        backend = subject.backend(first.config())
        decode = _part(first, 0, 2).decode_metadata(first.config().max_model_len)
        prefill = _part(first, 2, 4).prefill_metadata()
        with torch.inference_mode():
            backend.plan_decode(decode)
            backend.plan_prefill(prefill)
            third = replace(first, q_THD=first.q_THD.flip(0))
            for number, layer in enumerate((first, second, third)):
                beside = torch.full_like(layer.q_THD[:1], 5.0).repeat(len(layer.q_THD) + 2, 1, 1)
                out, caches = beside[1:-1].fill_(float("nan")), (layer.k_cache, layer.v_cache)
                backend.run_decode(layer.q_THD[:2], *caches, decode, out[:2])
                backend.run_prefill(layer.q_THD[2:], *caches, prefill, out[2:])
                assert_near(layer, out, f"layer {number} of a mixed step")
                if not (beside[0] == 5).all() or not (beside[-1] == 5).all():
                    raise AssertionError("memory beside the output was written to")

    def test_more_queries_per_row_are_refused_or_right(self, decoder: BackendUnderTest) -> None:
        """`plan_decode` raises UnsupportedError, with a `query_len` that is not computed."""
        # A backend that takes each query for a row reads padding behind the two.
        padded = decoder.case([40, 17, 0, 0], [2, 2, 0, 0])
        case, four = _part(padded, 0, 2), padded.decode_metadata(padded.config().max_model_len)
        metadata = replace(
            four, block_table=case.block_table, seq_lens=four.seq_lens[:2], query_len=2
        )
        backend, out = decoder.backend(case.config()), torch.full_like(case.q_THD, float("nan"))
        try:
            backend.plan_decode(metadata)
        except UnsupportedError as error:
            if "2" not in str(error):
                raise AssertionError(f"the refusal does not name query_len 2: {error}") from error
            return
        try:
            backend.run_decode(case.q_THD, case.k_cache, case.v_cache, metadata, out)
            case.assert_close(out)
        except Exception as error:
            raise AssertionError(
                f"plan_decode took query_len 2, which run_decode does not compute ({error}); let "
                "plan_decode raise UnsupportedError where metadata.query_len is not 1"
            ) from error


def _part(case: PagedCase, first: int, stop: int) -> PagedCase:
    """Some sequences of a batch: the tensors are slices of the batch's."""
    tokens = slice(sum(case.query_lens[:first]), sum(case.query_lens[:stop]))
    return replace(
        case,
        q_THD=case.q_THD[tokens],
        block_table=case.block_table[first:stop],
        query_lens=case.query_lens[first:stop],
        seq_lens=case.seq_lens[first:stop],
    )


def _check_far_blocks(subject: BackendUnderTest, bits: tuple[int, ...]) -> None:
    """Sequences whose blocks begin behind 2**bits elements, each behind one of these in turn."""
    for query_lens in ([1, 1, 1, 1], [40, 1, 20, 33]):
        block_size = max(subject.block_multiples)
        lengths = [70, 1, 65, 33]
        case = subject.case(lengths, query_lens, dtype=subject.half, block_size=block_size)
        used, elements = case.k_cache.shape[0], case.k_cache[0].numel()
        firsts = [2**bit // elements + 1 for bit in bits]
        try:
            caches = [
                _put_far(cache, firsts, firsts[-1] + used) for cache in (case.k_cache, case.v_cache)
            ]
        except (MemoryError, RuntimeError) as error:
            pytest.skip(f"too little memory for two caches of 2**{bits[-1]} elements: {error}")
        table = case.block_table.clone()
        for row in range(len(lengths)):
            table[row] += firsts[row % len(firsts)]
        high = replace(case, k_cache=caches[0], v_cache=caches[1], block_table=table)
        for phase, run in subject.ways(case):
            assert_near(high, run(high), f"{phase}, blocks far into a cache of 2**{bits[-1]}")


def _put_far(blocks: Tensor, firsts: Sequence[int], total: int) -> Tensor:
    """A cache of `total` blocks with these behind each of `firsts`; the rest is zeros."""
    shape = (total, *blocks.shape[1:])
    if blocks.is_cuda:
        cache = torch.zeros(shape, dtype=blocks.dtype, device=blocks.device)
    else:
        # The system's zero pages: memory is taken only where something is written.
        bytes_ = np.zeros(total * blocks[0].nbytes, dtype=np.uint8)
        cache = torch.from_numpy(bytes_).view(blocks.dtype).view(shape)
    for first in firsts:
        cache[first : first + len(blocks)] = blocks
    return cache
