"""Batches of latent attention with a float64 reference: decode rows over paged rows, packed calls.

Shape suffixes as in `nanovllm_core.interfaces.attention`; Q queries of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionConfig,
    PackedMetadata,
)
from nanovllm_core.interfaces.model import LatentHeads
from nanovllm_kit.numerics import assert_close_report
from nanovllm_kit.paged_attention import REL_NORM, PagedCase, make_case

LSE_ERROR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-3}
"""How far a log-sum-exp may be off, by the dtype of the inputs: it is computed in float32."""

KEY_GAP = 16
"""Numbers between the keys of a packed call: a whole number of pieces that hardware copies."""


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of latent attention: `rotated` is a part of a row and of a head's key."""

    latent: int = 512
    rotated: int = 64
    nope: int = 128
    value: int = 128

    @property
    def row(self) -> int:
        """The numbers that are cached of a token."""
        return self.latent + self.rotated

    @property
    def heads(self) -> LatentHeads:
        """As a configuration says it."""
        return LatentHeads(
            latent_size=self.latent, key_size=self.nope + self.rotated, value_size=self.value
        )


def make_latent_case(
    seq_lens: Sequence[int],
    sizes: LatentSizes,
    query_lens: Sequence[int] | None = None,
    *,
    num_heads: int,
    **options: Any,
) -> PagedCase:
    """Sequences with absorbed queries, one of each unless `query_lens` says how many.

    `options` are `make_case`'s. The scale is that of a head's key, not of a row.
    """
    shape = {"num_heads": num_heads, "num_kv_heads": 1, "head_size": sizes.row}
    case = make_case(query_lens or [1] * len(seq_lens), seq_lens, **shape | options)
    heads = sizes.heads
    return replace(case, scale=heads.key_size**-0.5).with_rows(case.k_cache, heads)


@dataclass(frozen=True, slots=True)
class PackedCase:
    """One packed call: queries [T, H, D], keys [L, H, D] and values [L, H, V] of its sequences."""

    q_THD: Tensor  # noqa: N815 - shape suffix
    k_LHD: Tensor  # noqa: N815 - shape suffix
    v_LHV: Tensor  # noqa: N815 - shape suffix
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool
    sizes: LatentSizes
    scale: float

    def config(self) -> AttentionConfig:
        """A backend configuration just large enough for the case."""
        total = max(1, len(self.q_THD), len(self.k_LHD))
        return AttentionConfig(
            device=self.q_THD.device,
            dtype=self.q_THD.dtype,
            num_heads=self.q_THD.shape[1],
            num_kv_heads=1,
            head_size=self.sizes.row,
            scale=self.scale,
            block_size=16,
            max_num_seqs=max(1, len(self.query_lens)),
            max_model_len=-(-total // 16) * 16,
            max_num_batched_tokens=total,
            latent=self.sizes.heads,
        )

    def metadata(self) -> PackedMetadata:
        """What the core says of the call; bounds of lengths need not be exact."""
        return PackedMetadata(
            query_start_loc=self._starts(self.query_lens),
            key_start_loc=self._starts(self.key_lens),
            max_query_len=max(self.query_lens, default=0) + 3,
            max_key_len=max(self.key_lens, default=0) + 5,
            causal=self.causal,
        )

    def run(
        self, backend: AttentionBackend, metadata: PackedMetadata, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the planned call for one layer."""
        out_THV = self.q_THD.new_full((*self.q_THD.shape[:2], self.sizes.value), float("nan"))
        lse_HT = None
        if with_lse:
            shape = self.q_THD.shape[1::-1]
            lse_HT = torch.full(shape, float("nan"), device=self.q_THD.device)
        backend.run_packed(self.q_THD, self.k_LHD, self.v_LHV, metadata, out_THV, lse_HT)
        return out_THV, lse_HT

    def expected(self) -> tuple[Tensor, Tensor]:
        """Output [T, H, V] and log-sum-exp [H, T] in float64."""
        outputs, sums, first_query, first_key = [], [], 0, 0
        for queries, keys in zip(self.query_lens, self.key_lens, strict=True):
            own = slice(first_key, first_key + keys)
            q, k, v = (
                self.q_THD[first_query : first_query + queries],
                self.k_LHD[own],
                self.v_LHV[own],
            )
            scores_HQL = torch.einsum("qhd,lhd->hql", q.double(), k.double()) * self.scale
            if self.causal:
                ahead_QL = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
                scores_HQL.masked_fill_((ahead_QL > 0).to(q.device), float("-inf"))
            lse_HQ = scores_HQL.logsumexp(-1)
            weights_HQL = torch.exp(scores_HQL - lse_HQ.clamp(min=-1e300)[..., None])
            outputs.append(torch.einsum("hql,lhv->qhv", weights_HQL, v.double()))
            sums.append(lse_HQ)
            first_query, first_key = first_query + queries, first_key + keys
        return torch.cat(outputs), torch.cat(sums, dim=-1)

    def check(
        self,
        backend: AttentionBackend,
        what: str,
        metadata: PackedMetadata | None = None,
        *,
        plans: bool = False,
        broken: int | None = None,
        rel_norm: float | None = None,
    ) -> None:
        """Fail, naming the call, where the output or the log-sum-exp is off the reference.

        `metadata` has its plan, unless `plans`. `broken` is a sequence whose keys and values become
        NaN; its own results are not compared. `rel_norm`: another bound of the output's error.
        """
        __tracebackhide__ = True
        if metadata is None:
            metadata, plans = self.metadata(), True
        if plans:
            backend.plan_packed(metadata)
        expected_THV, expected_HT = self.expected()
        case, compared_T = self, torch.ones(len(self.q_THD), dtype=torch.bool)
        if broken is not None:
            case = self._with_nan(broken)
            compared_T.split(self.query_lens)[broken].zero_()
        compared_T = compared_T.to(self.q_THD.device)
        dtype = self.q_THD.dtype
        for with_lse in (False, True):
            out_THV, lse_HT = case.run(backend, metadata, with_lse=with_lse)
            try:
                out, expected = out_THV[compared_T].double(), expected_THV[compared_T]
                assert_close_report(out, expected, rel_norm=rel_norm or REL_NORM[dtype])
                if lse_HT is not None:
                    _assert_lse(lse_HT[:, compared_T], expected_HT[:, compared_T], LSE_ERROR[dtype])
            except AssertionError as error:
                raise AssertionError(
                    f"{what}{', with log-sum-exp' * with_lse}: query_lens {self.query_lens}, "
                    f"key_lens {self.key_lens}, causal {self.causal}, {self.sizes}, "
                    f"{self.q_THD.shape[1]} heads: {error}"
                ) from None

    def _with_nan(self, sequence: int) -> PackedCase:
        k_LHD, v_LHV = self.k_LHD.clone(), self.v_LHV.clone()
        for x in (k_LHD, v_LHV):
            x.split(self.key_lens)[sequence].fill_(float("nan"))
        return replace(self, k_LHD=k_LHD, v_LHV=v_LHV)

    def _starts(self, lens: Sequence[int]) -> Tensor:
        starts = [0, *accumulate(lens)]
        return torch.tensor(starts, dtype=torch.int32, device=self.q_THD.device)


def _assert_lse(actual_HT: Tensor, expected_HT: Tensor, most: float) -> None:
    """Equal where a query sees keys; minus infinity exactly where it sees none."""
    blind_HT = expected_HT.isneginf()
    if not torch.equal(actual_HT.isneginf(), blind_HT):
        raise AssertionError("the log-sum-exp is -inf elsewhere than where no key is seen")
    error = (actual_HT.double() - expected_HT)[~blind_HT].abs()
    if not (error <= most).all():
        raise AssertionError(f"the log-sum-exp is off by {error.max():.3e}, at most {most:.0e}")


def make_packed_case(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    sizes: LatentSizes,
    *,
    num_heads: int,
    causal: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PackedCase:
    """Random sequences. Keys and values are parts of wider rows, with NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    key_size = sizes.heads.key_size

    def randn(*shape: int, gap: int = 0) -> Tensor:
        wide = torch.full((*shape[:-1], shape[-1] + gap), float("nan"))
        wide[..., gap:] = torch.randn(shape, generator=generator)
        return wide.to(device, dtype)[..., gap:]

    total = sum(key_lens)
    return PackedCase(
        q_THD=randn(sum(query_lens), num_heads, key_size),
        k_LHD=randn(total, num_heads, key_size, gap=KEY_GAP),
        v_LHV=randn(total, num_heads, sizes.value, gap=sizes.nope),
        query_lens=tuple(query_lens),
        key_lens=tuple(key_lens),
        causal=causal,
        sizes=sizes,
        scale=key_size**-0.5,
    )
