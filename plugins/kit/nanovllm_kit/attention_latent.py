"""Checks of latent attention: absorbed queries over cached rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm_core.interfaces.attention import Phase
from nanovllm_kit.attention_backend import (
    EDGES,
    AttentionSubject,
    BackendUnderTest,
    Run,
    assert_near,
)
from nanovllm_kit.attention_replay import captured, check_replays, recorded
from nanovllm_kit.attention_replay_prefill import check_prefill_replays
from nanovllm_kit.conformance import PluginUnderTest
from nanovllm_kit.latent_attention import (
    LatentSizes,
    PackedCase,
    make_latent_case,
    make_packed_case,
)
from nanovllm_kit.paged_attention import PagedCase
from nanovllm_kit.recording import HostReadError

USUAL = LatentSizes()
SMALL = LatentSizes(latent=32, rotated=16, nope=16, value=16)
ODD = LatentSizes(latent=40, rotated=8, nope=24, value=20)
"""No power of two but the rotated part, and four sizes that differ."""


class LatentUnderTest(BackendUnderTest):
    """The same backend, whose decode rows are those of latent attention."""

    sizes = SMALL

    def served(self, sizes: LatentSizes) -> bool:
        """Whether the backend accepts both phases of these sizes."""
        asked: dict[Phase, dict[str, Any]] = {
            "decode": {"num_kv_heads": 1, "head_size": sizes.row, "value_size": sizes.latent},
            "prefill": {
                "num_kv_heads": 4,
                "head_size": sizes.heads.key_size,
                "value_size": sizes.value,
            },
        }
        return not any(self._refusals(phase, **asked[phase]) for phase in self.phases)

    def captures(self, sizes: LatentSizes) -> bool:
        """Whether it accepts prompts of captured steps, which attend to rows."""
        row = {"num_kv_heads": 1, "head_size": sizes.row, "value_size": sizes.latent}
        return not self._refusals("prefill", cuda_graphs=True, **row)

    def _refusals(self, phase: Phase, **asked: Any) -> list[str]:
        return self.reasons(self._asked(phase=phase, num_heads=4, latent=True, **asked))

    def case(
        self, seq_lens: Sequence[int], query_lens: Sequence[int] | None = None, **changes: Any
    ) -> PagedCase:
        """A batch of decode rows, or of prompts."""
        dtype = changes.pop("dtype", self.dtype)
        sizes = changes.pop("sizes", self.sizes)
        values: dict[str, Any] = {
            "num_heads": 4,
            "block_size": self.block_size,
            "dtype": getattr(torch, dtype),
            "device": self.device,
            "finite_tail": self.capabilities.needs_finite_tail,
        }
        changes.pop("num_kv_heads", None)
        return make_latent_case(seq_lens, sizes, query_lens, **values | changes)

    def packed(
        self,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        *,
        causal: bool,
        num_heads: int = 3,
        **changes: Any,
    ) -> PackedCase:
        """A packed call."""
        dtype = getattr(torch, changes.pop("dtype", self.dtype))
        sizes = changes.pop("sizes", self.sizes)
        return make_packed_case(
            query_lens, key_lens, sizes, num_heads=num_heads, causal=causal,
            dtype=dtype, device=self.device, **changes,
        )  # fmt: skip

    @property
    def over_rows(self) -> list[tuple[Phase, Run]]:
        """The phases that attend to rows, and how to run them."""
        runs: list[tuple[Phase, Run]] = []
        if "decode" in self.phases:
            runs.append(("decode", self.decode))
        if "prefill" in self.phases and self.captures(self.sizes):
            runs.append(("prefill", self.prefill))
        return runs

    def check_prompts(self, case: PagedCase, what: str) -> None:
        """Fail where prompts that attend to rows are off the reference."""
        __tracebackhide__ = True
        assert_near(case, self.prefill(case), what)

    def check_packed(self, case: PackedCase, what: str, **options: Any) -> None:
        """Fail where a backend of its own is off the reference; see `PackedCase.check`."""
        __tracebackhide__ = True
        case.check(self.backend(case.config()), what, **options)


class LatentSubject(AttentionSubject):
    """The fixtures of backends that declare `latent`."""

    @pytest.fixture
    def latent(self, subject: BackendUnderTest, plugin: PluginUnderTest) -> LatentUnderTest:
        """The backend with latent batches; skips where it serves none."""
        if not subject.capabilities.latent:
            pytest.skip("declares no latent attention")
        made = LatentUnderTest(plugin)
        for sizes in (SMALL, ODD, USUAL):
            if made.served(sizes):
                made.sizes = sizes
                return made
        pytest.skip("these options refuse latent attention")

    @pytest.fixture
    def latent_decoder(self, latent: LatentUnderTest) -> LatentUnderTest:
        """The same, of a backend that decodes."""
        if "decode" not in latent.phases:
            pytest.skip("declares no decode")
        return latent

    @pytest.fixture
    def row_prefiller(self, latent: LatentUnderTest) -> LatentUnderTest:
        """The same, of a backend whose prompts attend to rows where a step is captured."""
        if not latent.capabilities.latent_prefill:
            pytest.skip("declares no prefill over latent rows")
        if latent.capabilities.cuda_graphs != "full" or "prefill" not in latent.phases:
            raise AssertionError(
                "latent_prefill is for steps with prompts that are captured: it needs "
                'cuda_graphs="full" and the phase prefill'
            )
        if not latent.captures(latent.sizes):
            pytest.skip("these options refuse prompts over latent rows")
        return latent


class AttentionLatent(LatentSubject):
    """Of decode, and of prompts of captured steps."""

    def test_latent_rows_are_keys_and_values(self, latent_decoder: LatentUnderTest) -> None:
        """Rows of all lengths beside one another, and a padded one; blocks of others hold NaN."""
        for needle in (False, True):
            case = latent_decoder.case([*EDGES, 0, latent_decoder.longest], needle=needle)
            latent_decoder.check(case, "ragged rows", phases=("decode",))
        case = latent_decoder.case([latent_decoder.longest])
        latent_decoder.check(case, "one long row", phases=("decode",))

    def test_latent_sizes_and_heads_are_parameters(self, latent_decoder: LatentUnderTest) -> None:
        """The usual sizes, and sizes and heads that are no powers of two, in every dtype."""
        for sizes in (USUAL, SMALL, ODD):
            if latent_decoder.served(sizes):
                for dtype in latent_decoder.dtypes:
                    case = latent_decoder.case([33, 0, 70], sizes=sizes, dtype=dtype, num_heads=16)
                    latent_decoder.check(case, f"{sizes}", phases=("decode",))
        for num_heads in (1, 2, 5, 17, 128):
            case = latent_decoder.case([33, 2], num_heads=num_heads)
            latent_decoder.check(case, f"{num_heads} heads", phases=("decode",))

    def test_latent_rows_may_lie_apart(self, latent: LatentUnderTest) -> None:
        """In slots that are wider than a row, with NaN behind it; only the output is written."""
        for phase, run in latent.over_rows:
            case = latent.case([40, 3, 65], [1, 1, 1] if phase == "decode" else [9, 3, 1])
            shape = (*case.k_cache.shape[:-1], case.k_cache.shape[-1] + 16)
            wide = case.k_cache.new_full(shape, float("nan"))
            wide[..., : case.k_cache.shape[-1]] = case.k_cache
            before = wide.clone()
            apart = case.with_rows(wide[..., : case.k_cache.shape[-1]], latent.sizes.heads)
            assert_near(case, run(apart), f"{phase}, rows in wider slots")
            torch.testing.assert_close(wide, before, rtol=0, atol=0, equal_nan=True)

    def test_latent_batches_may_be_long_or_many(self, latent: LatentUnderTest) -> None:
        """Long contexts, many rows or chunks, a chunk of many queries; every block size."""
        for phase, run in latent.over_rows:
            decodes = phase == "decode"
            for keys, queries in (
                ([700, 5], [1, 1] if decodes else [290, 5]),
                ([*range(1, 41)], [1] * 40 if decodes else [1 + n % 3 for n in range(40)]),
            ):
                keys = [max(key, own) for key, own in zip(keys, queries, strict=True)]
                case = latent.case(keys, queries, num_heads=1)
                assert_near(case, run(case), f"{phase}, long or many")
            for multiple in (2, 4):
                size = latent.block_size * multiple
                case = latent.case([70, 33], [1, 1] if decodes else [20, 33], block_size=size)
                assert_near(case, run(case), f"{phase}, blocks of {size}")

    def test_latent_scores_may_be_large(self, latent: LatentUnderTest) -> None:
        """All near 100, or all near -100: only their differences count."""
        for phase, run in latent.over_rows:
            case = latent.case([40, 33], [1, 1] if phase == "decode" else [7, 33])
            case.k_cache[..., -1] = 1.0
            for sign in (1.0, -1.0):
                q = case.q_THD.clone()
                q[..., -1] = sign * 100 / case.scale
                large = replace(case, q_THD=q)
                rel_norm = 1e-4 if latent.dtype == "float32" else 1e-2
                assert_near(large, run(large), f"{phase}, large scores", rel_norm=rel_norm)

    def test_a_latent_plan_serves_every_layer(self, latent: LatentUnderTest) -> None:
        """One plan, then a run per layer, each over its own rows."""
        for phase, _ in latent.over_rows:
            case = latent.case([40, 5, 70], [1, 1, 1] if phase == "decode" else [12, 5, 1])
            backend = latent.backend(case.config())
            call: Callable[..., None] = backend.run_prefill
            metadata: Any = case.prefill_metadata()
            if phase == "decode":
                call = backend.run_decode
                metadata = case.decode_metadata(case.config().max_model_len)
                backend.plan_decode(metadata)
            else:
                backend.plan_prefill(metadata)
            for number in range(3):
                layer = case.with_rows(case.k_cache / 2**number, latent.sizes.heads)
                out = layer.new_out()
                call(layer.q_THD, layer.k_cache, layer.v_cache, metadata, out)
                assert_near(layer, out, f"{phase}, layer {number} of one plan")

    def test_latent_steps_follow_changed_inputs(self, latent_decoder: LatentUnderTest) -> None:
        """Captured once, as `test_recorded_steps_follow_changed_inputs` says."""
        if latent_decoder.capabilities.cuda_graphs == "none":
            pytest.skip("declares that it cannot be captured")
        on_cpu = latent_decoder.device == "cpu"
        try:
            check_replays(latent_decoder, recorded if on_cpu else captured, plan_is_captured=True)
        except HostReadError as error:
            pytest.skip(f"on a CPU, where it may, {error}")

    def test_latent_prompts_attend_to_rows(self, row_prefiller: LatentUnderTest) -> None:
        """Causally, behind contexts of all lengths; blocks of others hold NaN."""
        queries = [*(n for n in EDGES if n < 70), 1, 3, 0, 40]
        contexts = [*reversed(queries[:-4]), row_prefiller.longest, 0, 7, 1]
        keys = [context + own for context, own in zip(contexts, queries, strict=True)]
        for needle in (False, True):
            case = row_prefiller.case(keys, queries, needle=needle)
            row_prefiller.check_prompts(case, "chunks over rows")
        case = row_prefiller.case([20, 33], [5, 33])
        row_prefiller.check_prompts(replace(case, scale=0.6), "scale 0.6")

    def test_latent_prompts_may_have_any_sizes_and_heads(
        self, row_prefiller: LatentUnderTest
    ) -> None:
        """The usual sizes and others, in every dtype; heads that do not fill a tile."""
        for sizes in (USUAL, SMALL, ODD):
            if row_prefiller.captures(sizes):
                for dtype in row_prefiller.dtypes:
                    case = row_prefiller.case(
                        [33, 9, 70], [20, 9, 1], sizes=sizes, dtype=dtype, num_heads=16
                    )
                    row_prefiller.check_prompts(case, f"{sizes}")
        for num_heads in (1, 5, 17, 128):
            case = row_prefiller.case([33, 2], [3, 2], num_heads=num_heads)
            row_prefiller.check_prompts(case, f"{num_heads} heads")

    def test_latent_prompts_follow_changed_chunks(self, row_prefiller: LatentUnderTest) -> None:
        """Captured once, as `test_recorded_prefill_follows_changed_chunks` says."""
        on_cpu = row_prefiller.device == "cpu"
        try:
            check_prefill_replays(row_prefiller, recorded if on_cpu else captured)
        except HostReadError as error:
            pytest.skip(f"on a CPU, where it may, {error}")

    def test_latent_scores_have_the_configured_scale(self, latent_decoder: LatentUnderTest) -> None:
        """That of a head's key before absorption, which the row's size does not tell."""
        for scale in (0.05, 0.6):
            case = replace(latent_decoder.case([40, 17]), scale=scale)
            latent_decoder.check(case, f"scale {scale}", phases=("decode",))
