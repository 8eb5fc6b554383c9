"""Checks of an attention backend in shapes drawn at random, each dimension up to where it may go.

Nothing declares how many heads, rows, queries or keys there may be, so nothing limits them but what
the backend refuses: heads by its `check`, the others by UnsupportedError when it is made. One
dimension is driven far while the others stay small; then batches are drawn in which all vary.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import torch

from nanovllm_core.errors import UnsupportedError
from nanovllm_kit.attention_backend import AttentionSubject, BackendUnderTest, assert_near
from nanovllm_kit.attention_draws import (
    LARGEST,
    LIMITS,
    Limits,
    head_pairs,
    mixed_batch,
    near,
    pointed,
    size,
    with_stale_entries,
)
from nanovllm_kit.conformance import full_level
from nanovllm_kit.paged_attention import PagedCase

POINTED = 1e-4
"""Relative norm error in float32 where scores are large: their own roundings are too."""


class AttentionShapes(AttentionSubject):
    """Any number of heads, rows, keys and queries: the last of them counts as the first."""

    def test_query_heads_read_their_own_kv_head(
        self, subject: BackendUnderTest, draws: Random
    ) -> None:
        """Query head h reads KV head h // group, in every number of heads and every group size."""
        most = LIMITS[subject.device].heads
        for num_heads, num_kv_heads in head_pairs(draws, most, gqa=subject.capabilities.gqa):
            heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
            if subject.reasons(subject.requirements(**heads)):
                continue
            heads["seed"] = draws.randrange(2**31)
            lens = [size(draws, 2, 40), size(draws, 1, 20)]
            for phase in subject.phases:
                queries = None if phase == "decode" else [draws.randint(2, lens[0]), 1]
                case = subject.case(lens, queries, **heads)
                subject.check(case, f"{num_heads} on {num_kv_heads} heads", phases=(phase,))

    def test_a_batch_may_have_many_rows(self, subject: BackendUnderTest, draws: Random) -> None:
        """Each row as if it were alone, where all of max_num_seqs are there and where fewer are."""
        most = _accepted(subject, "max_num_seqs", LIMITS[subject.device].rows)
        counts = [
            near(draws, most),
            size(draws, min(65, most), min(256, most)),
            size(draws, 1, min(64, most)),
        ]
        for number, rows in enumerate(counts):
            _check_rows(subject, draws, rows, windowed=number == 1)

    def test_early_keys_of_a_long_context_count(
        self, subject: BackendUnderTest, draws: Random
    ) -> None:
        """Among thousands of keys each weighs as it should, and one outweighs all wherever it is.

        For rows, alone and beside others, and for chunks, with a window and without.
        """
        _check_contexts(subject, draws, LIMITS[subject.device].keys)

    def test_chunks_may_bring_many_queries(
        self, prefiller: BackendUnderTest, draws: Random
    ) -> None:
        """Each query of a chunk of thousands sees its own key, those before it, and no other."""
        _check_chunks(prefiller, draws, LIMITS[prefiller.device].queries)

    def test_batches_of_any_shape_equal_the_reference(
        self, subject: BackendUnderTest, draws: Random
    ) -> None:
        """Heads, sizes, blocks, lengths, windows, caps and dtypes in any company.

        Tables are stale behind a row's blocks, sequences share prefixes, rows of padding and chunks
        without queries lie between others, and the backend is made for more than comes.
        """
        _check_mixed(subject, draws, LIMITS[subject.device])

    @full_level("a few minutes, and on a CPU about 8 GiB of memory")
    def test_the_largest_shapes_equal_the_reference(
        self, subject: BackendUnderTest, draws: Random
    ) -> None:
        """Thousands of rows, contexts of more than 2**17 keys, chunks of thousands of queries."""
        _check_rows(subject, draws, near(draws, _accepted(subject, "max_num_seqs", LARGEST.rows)))
        _check_contexts(subject, draws, LARGEST.keys)
        if "prefill" in subject.phases:
            _check_chunks(subject, draws, LARGEST.queries)
        _check_mixed(subject, draws, replace(LIMITS[subject.device], mixed=LARGEST.mixed))


def _few_heads(subject: BackendUnderTest) -> dict[str, int]:
    """Two KV heads, in groups of two where the backend has groups.

    Heads that are mixed up show, and of each group one head is pointed at a key.
    """
    heads = {"num_heads": 4 if subject.capabilities.gqa else 2, "num_kv_heads": 2}
    return {} if subject.reasons(subject.requirements(**heads)) else heads


def _one_group(subject: BackendUnderTest) -> dict[str, int]:
    """Two query heads, one of them pointed at a key, for the longest contexts: they cost most."""
    heads = {"num_heads": 2, "num_kv_heads": 1 if subject.capabilities.gqa else 2}
    return {} if subject.reasons(subject.requirements(**heads)) else heads


def _window(subject: BackendUnderTest, draws: Random, longest: int) -> dict[str, int]:
    """A window of any size, where the backend serves windows."""
    if not subject.capabilities.sliding_window:
        return {}
    refused = subject.reasons(subject.requirements(sliding_window=True))
    return {} if refused else {"sliding_window": size(draws, 1, longest)}


def _accepted(subject: BackendUnderTest, field: str, most: int) -> int:
    """`most`, halved while the backend refuses by UnsupportedError to be made for it."""
    config = subject.case([subject.block_size]).config()
    while most > subject.block_size:
        try:
            larger: dict[str, Any] = {field: most}
            subject.backend(replace(config, **larger))
        except UnsupportedError:
            most //= 2
        else:
            break
    return most


def _check(subject: BackendUnderTest, draws: Random, case: PagedCase, what: str) -> None:
    """With half of the heads pointed at one key each; on a backend made for just this batch."""
    subject.check(pointed(case, draws), what, rel_norm=_rel_norm(case))


def _rel_norm(case: PagedCase) -> float | None:
    """The limit for queries that are pointed at keys; None: that of the dtype."""
    return POINTED if case.q_THD.dtype is torch.float32 else None


def _check_rows(
    subject: BackendUnderTest, draws: Random, rows: int, *, windowed: bool = False
) -> None:
    lens = [size(draws, 1, 2 * subject.block_size + 3) for _ in range(rows)]
    lens[draws.randrange(rows)] = size(draws, 100, 400)  # one long row among them
    shape: dict[str, Any] = {"seed": draws.randrange(2**31), **_few_heads(subject)}
    shape |= _window(subject, draws, 2 * subject.block_size) if windowed else {}
    padded = [0 if row and draws.random() < 0.1 else n for row, n in enumerate(lens)]
    if "decode" in subject.phases:
        _check(subject, draws, subject.case(padded, **shape), f"{rows} rows")
    if "prefill" in subject.phases:
        queries = [min(n, draws.choice((0, 1, 1, 2))) for n in lens]
        queries[-1] = 1
        _check(subject, draws, subject.case(lens, queries, **shape), f"{rows} chunks")


def _check_contexts(subject: BackendUnderTest, draws: Random, most: int) -> None:
    most = _accepted(subject, "max_model_len", most)
    longest = near(draws, most)
    lens = [
        size(draws, min(1_000, most // 2), most // 2),
        size(draws, 1, 300),
        size(draws, min(300, most // 4), most // 4),
    ]
    for decode_lens, chunk_lens in (([longest], [longest]), (lens, lens)):
        queries = [min(n, size(draws, 2, 40)) for n in chunk_lens]
        heads = _few_heads(subject) if len(chunk_lens) > 1 else _one_group(subject)
        for lengths, query_lens in ((decode_lens, None), (chunk_lens, queries)):
            shape: dict[str, Any] = {"seed": draws.randrange(2**31), **heads}
            case = subject.case(lengths, query_lens, **shape)
            _check(subject, draws, with_stale_entries(case, draws), "long contexts")
    if subject.capabilities.sliding_window and not subject.reasons(
        subject.requirements(sliding_window=True)
    ):
        window = size(draws, min(200, most // 2), most // 2)
        for queries_or_none in (None, [9]):
            case = subject.case([longest], queries_or_none, sliding_window=window)
            _check(subject, draws, case, "a window into a long context")


def _check_chunks(subject: BackendUnderTest, draws: Random, most: int) -> None:
    most = _accepted(subject, "max_num_batched_tokens", most)
    shapes = [
        ([near(draws, most)], draws.randrange(100), subject.half),
        ([size(draws, min(200, most // 4), most // 4)], size(draws, 1, 500), subject.dtype),
        ([size(draws, 1, 300), size(draws, 17, 300)], size(draws, 1, 500), subject.dtype),
    ]
    windowed = draws.randrange(len(shapes))
    for number, (queries, context, dtype) in enumerate(shapes):
        lens = [n + context for n in queries]
        shape: dict[str, Any] = {"dtype": dtype, "seed": draws.randrange(2**31)}
        shape |= _few_heads(subject)
        shape |= _window(subject, draws, max(lens)) if number == windowed else {}
        case = subject.case(lens, queries, **shape)
        _check(subject, draws, case, f"chunks behind {context} keys")


def _check_mixed(subject: BackendUnderTest, draws: Random, limits: Limits) -> None:
    for number in range(limits.mixed):
        case = mixed_batch(subject, draws, limits, number)
        config = replace(
            case.config(max_num_seqs=len(case.seq_lens) + draws.choice((0, 0, 1, 7))),
            max_num_batched_tokens=len(case.q_THD) + draws.choice((1, 100)),
        )
        expected = case.expected()
        for phase, run in subject.ways(case):
            out = run(case, subject.backend(config))
            what = f"{phase}, drawn batch {number + 1} of {limits.mixed}"
            assert_near(case, out, what, expected, _rel_norm(case))
