"""Checks of latent attention: packed calls of prompts, whose keys and values are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanovllm_kit.attention_backend import EDGES
from nanovllm_kit.attention_latent import ODD, SMALL, USUAL, LatentSubject, LatentUnderTest
from nanovllm_kit.latent_attention import LatentSizes

WIDE_VALUES = LatentSizes(latent=32, rotated=8, nope=8, value=24)
"""A head's value is longer than its key."""


class AttentionPacked(LatentSubject):
    """Of `plan_packed` and `run_packed`."""

    @pytest.fixture
    def latent_prefiller(self, latent: LatentUnderTest) -> LatentUnderTest:
        """The backend, if it prefills."""
        if "prefill" not in latent.phases:
            pytest.skip("declares no prefill")
        return latent

    def test_packed_prompts_are_causal(self, latent_prefiller: LatentUnderTest) -> None:
        """Each sequence sees its own keys up to its query's; lengths around every tile."""
        lens = [*(n for n in EDGES if n < 100), 1, 130]
        latent_prefiller.check_packed(latent_prefiller.packed(lens, lens, causal=True), "prompts")
        case = latent_prefiller.packed([5, 1, 17], [40, 64, 17], causal=True)
        latent_prefiller.check_packed(case, "fewer queries than keys")

    def test_packed_context_is_seen_whole(self, latent_prefiller: LatentUnderTest) -> None:
        """By every query of its sequence; one without keys gets zeros and -inf."""
        for queries, keys in (
            ([7, 1, 40], [64, 0, 33]),
            ([1], [200]),
            ([3, 5], [0, 0]),
            ([0, 6, 2], [5, 1, 0]),
        ):
            case = latent_prefiller.packed(queries, keys, causal=False)
            latent_prefiller.check_packed(case, "context")

    def test_a_broken_packed_sequence_harms_no_other(
        self, latent_prefiller: LatentUnderTest
    ) -> None:
        """NaN in its keys and values is not in the results of those before and behind it."""
        for causal in (True, False):
            case = latent_prefiller.packed([33, 40, 70, 5], [33, 40, 70, 20], causal=causal)
            backend = latent_prefiller.backend(case.config())
            for broken in (1, 2):
                case.check(backend, "beside NaN", broken=broken)

    def test_packed_sizes_and_heads_are_parameters(self, latent_prefiller: LatentUnderTest) -> None:
        """192 and 128, and others, in every dtype; values may be longer than keys."""
        for sizes in (USUAL, SMALL, ODD, WIDE_VALUES):
            if latent_prefiller.served(sizes):
                for dtype in latent_prefiller.dtypes:
                    for causal in (True, False):
                        case = latent_prefiller.packed(
                            [33, 4], [33, 20], causal=causal, sizes=sizes, dtype=dtype
                        )
                        latent_prefiller.check_packed(case, dtype)
        for num_heads in (1, 16, 17, 128):
            case = latent_prefiller.packed([9, 4], [9, 20], causal=True, num_heads=num_heads)
            latent_prefiller.check_packed(case, f"{num_heads} heads")

    def test_packed_calls_of_one_step_keep_their_plans(
        self, latent_prefiller: LatentUnderTest
    ) -> None:
        """All are planned before the first layer; every layer runs each, in any order."""
        own = latent_prefiller.packed([7, 20], [7, 20], causal=True)
        first = latent_prefiller.packed([7, 20], [33, 0], causal=False, seed=1)
        second = latent_prefiller.packed([7, 20], [2, 31], causal=False, seed=2)
        backend = latent_prefiller.backend(first.config())
        calls = [(case, case.metadata()) for case in (own, first, second)]
        for _, metadata in calls:
            backend.plan_packed(metadata)
        for _ in range(2):
            for case, metadata in calls:
                case.check(backend, "one of several calls", metadata)

    def test_packed_calls_may_be_long_or_many(self, latent_prefiller: LatentUnderTest) -> None:
        """A part of a context has thousands of keys, a step hundreds of queries and of prompts."""
        many = [n % 3 for n in range(160)]
        for queries, keys, causal in (
            ([3, 1], [5000, 40], False),
            ([540, 5], [540, 5], True),
            ([540, 5], [30, 5], False),
            (many, many, True),
            (many, [n * 7 % 5 for n in range(160)], False),
        ):
            case = latent_prefiller.packed(queries, keys, causal=causal, num_heads=1)
            latent_prefiller.check_packed(case, "long or many")

    def test_packed_plans_follow_changed_starts(self, latent_prefiller: LatentUnderTest) -> None:
        """Written in place, with the same bounds; of the same metadata object, and of others."""
        for causal in (True, False):
            first = latent_prefiller.packed([7, 20], [7, 20], causal=causal)
            second = latent_prefiller.packed([20, 7], [20, 7], causal=causal, seed=1)
            backend, metadata = latent_prefiller.backend(first.config()), first.metadata()
            first.check(backend, "the first step", metadata, plans=True)
            for step in (second, first):
                own = step.metadata()
                metadata.query_start_loc.copy_(own.query_start_loc)
                metadata.key_start_loc.copy_(own.key_start_loc)
                step.check(backend, "starts changed", metadata, plans=True)
                metadata = replace(metadata, plan=None)
            metadata.query_start_loc.copy_(second.metadata().query_start_loc)
            metadata.key_start_loc.copy_(second.metadata().key_start_loc)
            second.check(backend, "starts changed, new metadata", metadata, plans=True)

    def test_packed_queries_before_all_keys_see_none(
        self, latent_prefiller: LatentUnderTest
    ) -> None:
        """Causal, with fewer keys than queries: zeros and -inf for the first ones."""
        case = latent_prefiller.packed([20, 5, 9], [7, 5, 0], causal=True)
        latent_prefiller.check_packed(case, "fewer keys than queries")

    def test_packed_scores_may_be_large(self, latent_prefiller: LatentUnderTest) -> None:
        """All near 100, or all near -100: only their differences count in the output."""
        for sign in (1.0, -1.0):
            case = latent_prefiller.packed([7, 33], [40, 33], causal=False)
            case.k_LHD[..., -1] = 1.0
            case.q_THD[..., -1] = sign * 100 / case.scale
            rel_norm = 1e-4 if latent_prefiller.dtype == "float32" else 1e-2
            latent_prefiller.check_packed(case, "large scores", rel_norm=rel_norm)

    def test_packed_scores_have_the_configured_scale(
        self, latent_prefiller: LatentUnderTest
    ) -> None:
        """Which no size tells."""
        for scale in (0.05, 0.6):
            packed = latent_prefiller.packed([20, 5], [20, 5], causal=True)
            latent_prefiller.check_packed(replace(packed, scale=scale), f"scale {scale}")
