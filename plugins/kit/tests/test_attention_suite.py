"""The attention suite on a backend in plain torch, which declares everything and keeps it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionConfig,
    AttentionRequirements,
    DecodeMetadata,
    PrefillMetadata,
)
from nanovllm_kit import (
    AttentionConformance,
    PluginUnderTest,
    attention_draws,
    plugin_under_test,
)
from nanovllm_kit.attention_backend import BackendUnderTest, UnavailableError

from .plain_attention import SPEC, Plain, plain_with, run_check


class TestPlain(AttentionConformance):
    """Every check that a backend without graphs can be asked passes."""

    expected_failures = {  # noqa: RUF012 - as an author would write it
        "test_reading_the_spec_imports_nothing_heavy": "this file is the spec's module"
    }

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)


class FirstRows(Plain):
    """A launch of sixteen rows at most."""

    def run_decode(self, q_BHD: Tensor, *args: Any) -> None:
        super().run_decode(q_BHD, *args)
        args[-1][16:] = 0


class FirstSequences(Plain):
    """Chunks of the first sixteen sequences."""

    def run_prefill(self, q_THD: Tensor, *args: Any) -> None:
        super().run_prefill(q_THD, *args)
        *_, metadata, out_THD = args
        out_THD[int(metadata.query_start_loc[:17][-1]) :] = 0


class WrongAt128(Plain):
    """A wrong number for the head size that most models have."""

    def run_prefill(self, q_THD: Tensor, *args: Any) -> None:
        super().run_prefill(q_THD, *args)
        if q_THD.shape[-1] == 128:
            args[-1].mul_(2)


class WrongBlocksOfOne(Plain):
    """Prompts over blocks of one token, which block multiple 1 allows."""

    def run_prefill(self, q_THD: Tensor, *args: Any) -> None:
        super().run_prefill(q_THD, *args)
        if self.config.block_size == 1 and args[2].max_query_len > 1:
            args[-1].mul_(2)


class TakesCachesForContiguous(Plain):
    """Blocks by their number times their size, whatever the tensor says."""

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any) -> None:
        _, block_size, heads, size = k_cache.shape
        strides = (block_size * heads * size, heads * size, size, 1)
        caches = [cache.as_strided(cache.shape, strides) for cache in (k_cache, v_cache)]
        super()._attend(q, caches[0], caches[1], *args)


class OnePlanForAll(Plain):
    """A plan that all backends of the process share."""

    lens: Tensor

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        super().plan_decode(metadata)
        OnePlanForAll.lens = metadata.seq_lens

    def run_decode(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        super().run_decode(q, k, v, replace(metadata, seq_lens=OnePlanForAll.lens), out)


class FirstLayersQueries(Plain):
    """The queries of a prefill step are taken once, at its first layer."""

    queries: Tensor | None = None

    def plan_prefill(self, metadata: PrefillMetadata) -> None:
        self.queries = None

    def run_prefill(self, q_THD: Tensor, *args: Any) -> None:
        self.queries = q_THD if self.queries is None else self.queries
        super().run_prefill(self.queries, *args)


class Recent(Plain):
    """Keys older than the last 516 are dropped, as if there were a window."""

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        super().__init__(options, replace(config, sliding_window=516))


class RecentInPrefill(Plain):
    """The same, of prompts alone."""

    def run_prefill(self, *args: Any) -> None:
        self.config = replace(self.config, sliding_window=516)
        super().run_prefill(*args)


class Heedless(Plain):
    """Every query is a row, whatever `query_len` says; the tables end before."""

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        pass


class Several(Heedless):
    """Several queries per row, as the contract lays them out."""

    def run_decode(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        lens = metadata.seq_lens.tolist()
        starts = [row * metadata.query_len for row in range(len(lens) + 1)]
        self._attend(q, k, v, metadata.block_table, lens, starts, out)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (Recent, "test_early_keys_of_a_long_context_count"),
        (RecentInPrefill, "test_early_keys_of_a_long_context_count"),
        (Heedless, "test_more_queries_per_row_are_refused_or_right"),
        (FirstRows, "test_a_batch_may_have_many_rows"),
        (FirstSequences, "test_a_batch_may_have_many_rows"),
        (WrongAt128, "test_every_declared_head_size_computes"),
        (WrongBlocksOfOne, "test_every_block_size_is_read"),
        (TakesCachesForContiguous, "test_caches_may_be_slices"),
        (OnePlanForAll, "test_backends_share_nothing"),
        (FirstLayersQueries, "test_both_parts_of_a_step_and_all_its_layers"),
    ],
)
def test_a_wrong_backend_fails_the_check_that_is_about_it(
    wrong: type[AttentionBackend], check: str
) -> None:
    """Bugs that other checks let through."""
    with pytest.raises(AssertionError):
        run_check(check, plain_with(wrong))


def test_a_backend_that_computes_several_queries_per_row_need_not_refuse_them() -> None:
    it = plain_with(Several)
    AttentionConformance().test_more_queries_per_row_are_refused_or_right(it)


def test_what_several_queries_per_row_ask_for_is_said_to_whoever_takes_them() -> None:
    it = plain_with(Heedless)
    with pytest.raises(AssertionError, match=r"let plan_decode raise UnsupportedError where"):
        AttentionConformance().test_more_queries_per_row_are_refused_or_right(it)


def test_heads_are_what_the_backend_accepts() -> None:
    """A backend that refuses groups of two is not skipped as one that cannot run at all."""

    def check(requirements: AttentionRequirements, options: BaseModel) -> list[str]:
        group = requirements.num_heads // requirements.num_kv_heads
        return [] if group in (1, 8) else [f"groups of {group}: only 1 and 8"]

    choosy = replace(SPEC, check=check)
    it = BackendUnderTest(replace(plugin_under_test(SPEC), spec=choosy))
    assert it.heads == (8, 1)
    assert it.dtypes == ["float32", "float16", "bfloat16"]


def subject(**capabilities: object) -> BackendUnderTest:
    stated = replace(SPEC.capabilities, **capabilities)  # type: ignore[arg-type]
    plugin = plugin_under_test(SPEC)
    return BackendUnderTest(replace(plugin, spec=replace(SPEC, capabilities=stated)))


def test_sizes_follow_what_is_declared() -> None:
    assert subject().heads == (4, 2)
    assert subject(gqa=False).heads == (2, 2)
    assert subject(head_sizes=frozenset({80, 128})).head_size == 80
    assert subject(head_sizes=frozenset(range(1, 200))).head_sizes == [64, 80, 128, 199]
    assert subject(dtypes=frozenset({"bfloat16"})).dtype == "bfloat16"
    assert subject().half == "float16"
    assert subject(phases=frozenset({"prefill"})).phases == ["prefill"]


def test_a_backend_that_cannot_run_here_says_why() -> None:
    """So that checks are skipped with the reason, never passed."""
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="runs on cuda, which is not here"):
            subject(devices=frozenset({"cuda"}))
    refusing = replace(SPEC, check=lambda requirements, options: ["no such luck"])
    with pytest.raises(UnavailableError, match="no such luck"):
        BackendUnderTest(replace(plugin_under_test(SPEC), spec=refusing))


def test_rows_of_one_query_are_served_by_both_phases() -> None:
    it = subject()
    ways = {
        "rows": it.ways(it.case([3, 4])),
        "chunks": it.ways(it.case([3, 4], [2, 4])),
        "padded": it.ways(it.case([3, 0])),
    }
    assert {name: [phase for phase, _ in runs] for name, runs in ways.items()} == {
        "rows": ["decode", "prefill"],
        "chunks": ["prefill"],
        "padded": ["decode"],
    }


def test_a_failure_names_phase_batch_and_error() -> None:
    it = subject()
    case = it.case([5, 17])
    it.check(case, "rows")
    with pytest.raises(AssertionError) as caught:
        it.check(case, "rows", phases=("decode",), rel_norm=1e-30)
    assert str(caught.value).startswith(
        "decode, rows: query_lens [1, 1], seq_lens [5, 17], 4/2 heads of 64, blocks of 16, "
        "float32: relative norm error"
    )


def test_drawn_chunks_bring_none_one_or_many_queries() -> None:
    """A bug in later queries of a chunk shows only where there are some, in any company."""
    draws = Random(0)
    drawn = {min(2, attention_draws._queries(draws, 100, 50)) for _ in range(100)}
    assert drawn == {0, 1, 2}
