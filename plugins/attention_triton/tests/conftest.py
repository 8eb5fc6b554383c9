"""Paged batches with a float64 reference, shared by the tests of this plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_core.api import AttentionConfig, DecodeMetadata, PrefillMetadata
from nanovllm_kit.numerics import assert_close_report

NORM_LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cap: float | None
) -> Tensor:
    """Causal attention of the last positions; [T, H, D], [L, K, D] -> [T, H, D], in q's dtype."""
    queries, keys = q.shape[0], k.shape[0]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if window is not None:
        mask = mask.triu(keys - queries - window + 1)
    dense = [x.transpose(0, 1)[None] for x in (q, k, v)]
    if cap is None:
        out = scaled_dot_product_attention(*dense, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    q, k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (q, k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = cap * (torch.einsum("qhd,khd->hqk", q.to(wide), k.to(wide)) * scale / cap).tanh()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)


@dataclass
class PagedBatch:
    """Sequences whose K and V lie in shuffled blocks; everything else in the cache is NaN.

    `k`, `v`: each sequence's keys and values [L, K, D]; `q`: its last queries [T, H, D]. Unused
    entries of the block table name a block that does not exist.
    """

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    scale: float
    window: int | None = None
    cap: float | None = None

    @property
    def seq_lens(self) -> list[int]:
        return [len(k) for k in self.k]

    @property
    def packed_q(self) -> Tensor:
        return torch.cat(self.q)

    def config(self, max_num_seqs: int | None = None) -> AttentionConfig:
        q, (_, block_size, kv_heads, head_size) = self.q[0], self.k_cache.shape
        return AttentionConfig(
            device=q.device,
            dtype=q.dtype,
            num_heads=q.shape[1],
            num_kv_heads=kv_heads,
            head_size=head_size,
            scale=self.scale,
            block_size=block_size,
            max_num_seqs=max_num_seqs or len(self.q),
            max_model_len=self.block_table.shape[1] * block_size,
            max_num_batched_tokens=4096,
            sliding_window=self.window,
            soft_cap=self.cap,
        )

    def backend(self, options: TritonOptions | None = None) -> TritonAttention:
        backend = TritonAttention(options or TritonOptions(), self.config())
        backend.allocate()
        return backend

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.k_cache.device)

    def decode_metadata(self) -> DecodeMetadata:
        bound = self.block_table.shape[1] * self.k_cache.shape[1]
        return DecodeMetadata(self.block_table, self._int32(self.seq_lens), max_seq_len=bound)

    def prefill_metadata(self) -> PrefillMetadata:
        query_lens = [len(q) for q in self.q]
        starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
        return PrefillMetadata(
            self.block_table,
            self._int32(self.seq_lens),
            self._int32(starts),
            max_query_len=max(query_lens),
            max_seq_len=max(self.seq_lens),
        )

    def decode(self, backend: TritonAttention | None = None) -> Tensor:
        """What the backend makes of one query per row, in a tensor that held NaN."""
        backend = backend or self.backend()
        q, metadata = self.packed_q, self.decode_metadata()
        out = torch.full_like(q, float("nan"))
        backend.plan_decode(metadata)
        backend.run_decode(q, self.k_cache, self.v_cache, metadata, out)
        return out

    def prefill(self, backend: TritonAttention | None = None) -> Tensor:
        """What the backend makes of the packed queries, in a tensor that held NaN."""
        backend = backend or self.backend()
        q, metadata = self.packed_q, self.prefill_metadata()
        out = torch.full_like(q, float("nan"))
        backend.plan_prefill(metadata)
        backend.run_prefill(q, self.k_cache, self.v_cache, metadata, out)
        return out

    def reference(self, dtype: torch.dtype) -> Tensor:
        """torch's attention computed in `dtype`, in float64; rows without keys are 0."""
        parts = []
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            empty = len(k) == 0 or len(q) == 0
            typed = (x.to(dtype) for x in (q, k, v))
            part = q * 0 if empty else _attend(*typed, self.scale, self.window, self.cap)
            parts.append(part.double())
        return torch.cat(parts)

    def assert_right(self, out: Tensor) -> None:
        """Near the float64 result, and at no element worse than twice torch's own error."""
        exact = self.reference(torch.float64)
        torch_error = (self.reference(out.dtype) - exact).abs().max().item()
        # One rounding of the largest output is granted where torch happens to be exact.
        rounding = torch.finfo(out.dtype).eps * exact.abs().max().item()
        if out.dtype is torch.float32:  # both are a few roundings off; which more is chance
            rounding = 1e-6 * exact.abs().max().item()
        limit = max(2 * torch_error, rounding)
        assert_close_report(out, exact, rel_norm=NORM_LIMIT[out.dtype], max_abs=limit)


@pytest.fixture(scope="session")
def paged_batch() -> Callable[..., PagedBatch]:
    """A function that makes a PagedBatch of the given lengths."""

    def make(
        seq_lens: Sequence[int],
        query_lens: Sequence[int] | None = None,
        *,
        heads: tuple[int, int] = (4, 2),
        head_size: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        needles: Sequence[int] | None = None,
        scale: float | None = None,
        seed: int = 0,
        window: int | None = None,
        cap: float | None = None,
    ) -> PagedBatch:
        generator = torch.Generator(device).manual_seed(seed)
        num_heads, kv_heads = heads
        query_lens = [1] * len(seq_lens) if query_lens is None else query_lens

        def random(count: int, width: int) -> Tensor:
            shape = (count, width, head_size)
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        q = [random(length, num_heads) for length in query_lens]
        k = [random(length, kv_heads) for length in seq_lens]
        v = [random(length, kv_heads) for length in seq_lens]
        if needles is not None:
            direction = random(1, 1)
            for row, position in enumerate(needles):
                # All queries look one way, and one key answers: the output is that key's value.
                q[row][:] = direction
                k[row][position] = 3 * direction[0]
        blocks_per_row = [-(-length // block_size) for length in seq_lens]
        width, used = max(*blocks_per_row, 1), sum(blocks_per_row)
        num_blocks = used + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        table = torch.full((len(seq_lens), width), 2**30, dtype=torch.int32)
        cache_shape = (num_blocks, block_size, kv_heads, head_size)
        k_cache, v_cache = (
            torch.full(cache_shape, float("nan"), dtype=dtype, device=device) for _ in range(2)
        )
        taken = 0
        for row, count in enumerate(blocks_per_row):
            blocks = order[taken : taken + count]
            taken += count
            table[row, :count] = blocks
            tokens = torch.arange(seq_lens[row])
            slots = (
                (blocks[tokens // block_size], tokens % block_size) if count else (tokens, tokens)
            )
            k_cache[slots], v_cache[slots] = k[row], v[row]
        scale = head_size**-0.5 if scale is None else scale
        return PagedBatch(q, k, v, k_cache, v_cache, table.to(device), scale, window, cap)

    return make
