"""Paged attention cases with a float64 reference, for tests of attention backends.

A case is a batch of sequences whose blocks are scattered over a cache. Every block that no sequence
owns is NaN, so that a kernel which reads beyond a sequence shows it; the unused tail of a last
block is NaN too unless the backend declares `needs_finite_tail`.

Shape suffixes as in `nanovllm_core.interfaces.attention`; G query heads per KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_core.interfaces.attention import AttentionConfig, DecodeMetadata, PrefillMetadata
from nanovllm_core.interfaces.model import LatentHeads
from nanovllm_kit.numerics import assert_close_report, relative_norm_error

REL_NORM = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
"""The relative norm error that an attention output may have against float64, by dtype."""

SDPA_ERROR_FACTOR = 2.0
"""The worst element may be this many times as far off as torch's own SDPA in the same dtype."""

VECTOR_FACTOR = 8.0
"""One head's output of one query may have this many times the error of the whole batch's."""


@dataclass(frozen=True, slots=True)
class PagedCase:
    """One batch: packed queries, caches [N, P, K, D], and where everything lies.

    With `latent`, v_cache is a part of k_cache.
    """

    q_THD: Tensor  # noqa: N815 - shape suffix
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    latent: LatentHeads | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.k_cache.shape[1]

    def new_out(self) -> Tensor:
        """Where a backend writes the output [T, H, V]; all NaN."""
        shape = (*self.q_THD.shape[:2], self.v_cache.shape[-1])
        return self.q_THD.new_full(shape, float("nan"))

    def with_rows(self, rows_NPKR: Tensor, latent: LatentHeads) -> PagedCase:
        """The same over rows of latent attention, of which the values are a part."""
        v_cache = rows_NPKR[..., : latent.latent_size]
        return replace(self, k_cache=rows_NPKR, v_cache=v_cache, latent=latent)

    def decode_metadata(self, max_seq_len: int | None = None) -> DecodeMetadata:
        """The batch as decode rows; the host bound is the longest row unless given."""
        return DecodeMetadata(
            block_table=self.block_table,
            seq_lens=self._ints(self.seq_lens),
            max_seq_len=max_seq_len or max(self.seq_lens),
        )

    def prefill_metadata(self) -> PrefillMetadata:
        """The batch as prefill chunks, each the last `query_lens` positions of its sequence."""
        starts = [sum(self.query_lens[:i]) for i in range(len(self.query_lens) + 1)]
        return PrefillMetadata(
            block_table=self.block_table,
            seq_lens=self._ints(self.seq_lens),
            query_start_loc=self._ints(starts),
            max_query_len=max(self.query_lens, default=0),
            max_seq_len=max(self.seq_lens, default=0),
        )

    def config(self, *, max_num_seqs: int | None = None) -> AttentionConfig:
        """A backend configuration just large enough for the case."""
        _, _, num_kv_heads, head_size = self.k_cache.shape
        return AttentionConfig(
            device=self.q_THD.device,
            dtype=self.q_THD.dtype,
            num_heads=self.q_THD.shape[1],
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=self.scale,
            block_size=self.block_size,
            max_num_seqs=max_num_seqs or len(self.seq_lens),
            max_model_len=self.block_table.shape[1] * self.block_size,
            max_num_batched_tokens=max(1, self.q_THD.shape[0]),
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            latent=self.latent,
        )

    def expected(self) -> Tensor:
        """The output in float64; zeros for a sequence without keys."""
        return self._attend(torch.float64)

    def astype(self, dtype: torch.dtype) -> PagedCase:
        """The same numbers in another dtype; exact from bfloat16 to a wider one."""
        if self.latent is not None:
            return replace(self, q_THD=self.q_THD.to(dtype)).with_rows(
                self.k_cache.to(dtype), self.latent
            )
        return replace(
            self,
            q_THD=self.q_THD.to(dtype),
            k_cache=self.k_cache.to(dtype),
            v_cache=self.v_cache.to(dtype),
        )

    def assert_close(
        self, actual: Tensor, expected: Tensor | None = None, rel_norm: float | None = None
    ) -> None:
        """Fail unless `actual` [T, H, D] keeps the tolerances of its dtype.

        `expected` saves computing the reference again; `rel_norm` replaces the limit of the dtype,
        for inputs that are harder than most. The output of a sequence without keys is
        ignored, as the contract says.
        """
        __tracebackhide__ = True
        expected = self.expected() if expected is None else expected
        if expected.numel() == 0:
            return
        keys = torch.tensor(self.seq_lens).repeat_interleave(torch.tensor(self.query_lens))
        live = (keys > 0).to(actual.device)
        # SDPA has no soft cap: with one it is plain softmax with SDPA's roundings.
        sdpa = (self._attend(self.q_THD.dtype).double() - expected)[live]
        actual, expected = actual[live], expected[live]
        if expected.numel() == 0:
            return
        usual = REL_NORM[self.q_THD.dtype]
        rel_norm = rel_norm or usual
        # In float32 both errors are a few roundings, and which is larger is chance.
        rounding = 4e-6 * rel_norm / usual * expected.abs().max().item()
        worst = SDPA_ERROR_FACTOR * sdpa.abs().max().item() + rounding
        error = actual.double() - expected
        # Compared where they lie: the report copies to the host, which large cases are too big for.
        if error.abs().max() > worst or not relative_norm_error(actual, expected) <= rel_norm:
            assert_close_report(actual, expected, rel_norm=rel_norm, max_abs=worst)
        # A head of one query may be small beside the others, and hide behind them.
        limit_TH = VECTOR_FACTOR * rel_norm * expected.norm(dim=-1)
        limit_TH += SDPA_ERROR_FACTOR * sdpa.norm(dim=-1) + rounding
        over_TH = error.norm(dim=-1) / limit_TH
        if not over_TH.max() <= 1:
            token, head = divmod(int(over_TH.argmax()), over_TH.shape[1])
            raise AssertionError(
                f"head {head} of query {self._place(live, token)} is {over_TH.max():.3g} times as "
                f"far off as it may be: by {error[token, head].norm():.3e}, where its own norm is "
                f"{expected[token, head].norm():.3e}"
            )

    def _place(self, live: Tensor, token: int) -> str:
        """Where one of the live tokens is: "5 of sequence 2"."""
        packed = int(live.nonzero()[token])
        for row, queries in enumerate(self.query_lens):
            if packed < queries:
                return f"{packed} of sequence {row}"
            packed -= queries
        raise IndexError(f"the batch has no token {token}")

    def _attend(self, dtype: torch.dtype) -> Tensor:
        out = self.new_out().to(dtype).zero_()
        start = 0
        for row, (queries, keys) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            if queries and keys:
                where = slice(start, start + queries)
                out[where] = self._attend_one(row, self.q_THD[where], keys, dtype)
            start += queries
        return out

    def _attend_one(self, row: int, q_THD: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
        group = q_THD.shape[1] // self.k_cache.shape[2]
        # Behind a sequence's own blocks its table is stale.
        blocks = self.block_table[row, : -(-keys // self.block_size)].long()
        k_KLD, v_KLD = (
            cache[blocks].flatten(0, 1)[:keys].transpose(0, 1).to(dtype)
            for cache in (self.k_cache, self.v_cache)
        )
        q_HTD = q_THD.transpose(0, 1).to(dtype)
        k_HLD, v_HLD = (x.repeat_interleave(group, dim=0) for x in (k_KLD, v_KLD))
        seen_TL = _seen(q_THD.shape[0], keys, self.sliding_window, q_THD.device)
        if self.soft_cap is None:
            out_HTD = scaled_dot_product_attention(
                q_HTD[None], k_HLD[None], v_HLD[None], attn_mask=seen_TL, scale=self.scale
            )[0]
        else:
            out_HTD = _capped_attention(q_HTD, k_HLD, v_HLD, seen_TL, self.scale, self.soft_cap)
        return out_HTD.transpose(0, 1)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.q_THD.device)


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query sees, bool [T, L]: up to its position, and `window` of them at most."""
    positions_T1 = torch.arange(keys - queries, keys, device=device)[:, None]
    distance_TL = positions_T1 - torch.arange(keys, device=device)
    seen_TL = distance_TL >= 0
    return seen_TL if window is None else seen_TL & (distance_TL < window)


def _capped_attention(
    q_HTD: Tensor, k_HLD: Tensor, v_HLD: Tensor, seen_TL: Tensor, scale: float, cap: float
) -> Tensor:
    """Scores and softmax in float32 at least, weights in the inputs' dtype, as in kernels."""
    wide = torch.promote_types(q_HTD.dtype, torch.float32)
    scores_HTL = q_HTD.to(wide) @ k_HLD.to(wide).transpose(1, 2) * scale
    scores_HTL = cap * torch.tanh(scores_HTL / cap)
    weights_HTL = scores_HTL.masked_fill(~seen_TL, float("-inf")).softmax(-1)
    return weights_HTL.to(v_HLD.dtype) @ v_HLD


def make_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    finite_tail: bool = True,
    needle: bool | Sequence[int] = False,
    seed: int = 0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> PagedCase:
    """A batch of random sequences.

    `query_lens[i]` are the last positions of `seq_lens[i]` keys; a decode batch has one query each,
    and a length of 0 is a padded row, whose block table names block 0. `needle`: in each sequence
    one key that every query sees, somewhere by `seed`, outweighs all others, so that a lost key
    cannot hide in an average. With a `sliding_window` shorter than the queries the last of them see
    it, and the key right before the last query's window outweighs even the needle, so that a window
    one too long shows. A `needle` of positions puts each row's one needle where it says.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    blocks = [-(-keys // block_size) for keys in seq_lens]
    num_blocks = sum(blocks) + 2
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    k_cache, v_cache = randn(*shape), randn(*shape)
    q_THD = randn(sum(query_lens), num_heads, head_size)
    ids = 1 + torch.randperm(num_blocks - 1, generator=generator, device=device)
    width = max([1, *blocks])
    block_table = torch.zeros(len(blocks), width, dtype=torch.int32, device=device)
    unused = torch.ones(num_blocks, dtype=torch.bool, device=device)
    taken = 0
    for row, (count, keys) in enumerate(zip(blocks, seq_lens, strict=True)):
        if count == 0:
            continue
        own = ids[taken : taken + count]
        taken += count
        block_table[row, :count] = own.int()
        unused[own] = False
        if not finite_tail and keys % block_size:
            k_cache[own[-1], keys % block_size :] = float("nan")
            v_cache[own[-1], keys % block_size :] = float("nan")
        if needle is not False:
            places = (
                _needles(keys, query_lens[row], sliding_window, 7919 * (seed + 1) + 104729 * row)
                if needle is True
                else ((needle[row], 20.0),)
            )
            # Queries and the needle share one direction; its score is 20, the others' about 1.
            start = sum(query_lens[:row])
            queries = q_THD[start : start + query_lens[row]]
            queries.mul_(0.1).add_(1.0)
            for place, score in places:
                if place >= 0:
                    block, offset = own[place // block_size], place % block_size
                    k_cache[block, offset] = score / head_size**0.5
                    v_cache[block, offset] *= 3.0
    k_cache[unused] = float("nan")
    v_cache[unused] = float("nan")
    return PagedCase(
        q_THD=q_THD.to(dtype),
        k_cache=k_cache.to(dtype),
        v_cache=v_cache.to(dtype),
        block_table=block_table,
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        scale=head_size**-0.5,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def _needles(
    keys: int, queries: int, window: int | None, choice: int
) -> tuple[tuple[int, float], tuple[int, float]]:
    """(position, score) of a needle in sight, and of one before the last query's window, or -1."""
    first = 0 if window is None else max(0, keys - window)
    last = max(0, keys - queries)
    return (first + choice % (max(last - first, 0) + 1), 20.0), (first - 1, 30.0)
