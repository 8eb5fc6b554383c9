"""A batch of equal sequences in scattered blocks, several layers of it, and what attention gives.

Shape suffixes as in `nanovllm_core.interfaces.attention`; L keys, Q queries of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import (
    AttentionConfig,
    AttentionRequirements,
    DecodeMetadata,
    Phase,
    PrefillMetadata,
)

CHECKED_QUERIES = 64
"""The last queries of the first sequence are compared with float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetup:
    """The shapes of a measurement; the defaults of the command are Qwen3-0.6B's."""

    phase: Phase
    device: torch.device
    dtype: torch.dtype
    batch: int
    num_heads: int
    num_kv_heads: int
    head_size: int

    def requirements(self) -> AttentionRequirements:
        on_gpu = self.device.type == "cuda"
        return AttentionRequirements(
            phase=self.phase,
            device=self.device.type,
            dtype=str(self.dtype).removeprefix("torch."),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            compute_capability=torch.cuda.get_device_capability(self.device) if on_gpu else None,
        )

    def kv_bytes(self, length: int) -> int:
        """Bytes of keys and values that one layer reads."""
        row = 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize
        return self.batch * length * row

    def query_bytes(self, length: int) -> int:
        """Bytes of the queries; what attention gives for them takes as many."""
        rows = self.batch * (length if self.phase == "prefill" else 1)
        return rows * self.num_heads * self.head_size * self.dtype.itemsize

    def flops(self, length: int) -> int:
        """Two products, of half the square in causal prefill, of one row in decode."""
        pairs = length**2 // 2 if self.phase == "prefill" else length
        return 4 * self.batch * pairs * self.num_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """`batch` sequences of `length` keys, whose last `queries_per_row` positions are queries."""

    batch: int
    length: int
    queries_per_row: int
    num_heads: int
    num_kv_heads: int
    q_THD: Tensor  # noqa: N815 - shape suffix
    out_THD: Tensor  # noqa: N815 - shape suffix
    caches: list[tuple[Tensor, Tensor]]
    block_table: Tensor

    @property
    def scale(self) -> float:
        return float(self.q_THD.shape[-1] ** -0.5)

    def config(self) -> AttentionConfig:
        """A backend configuration just large enough."""
        block_size = self.caches[0][0].shape[1]
        return AttentionConfig(
            device=self.q_THD.device,
            dtype=self.q_THD.dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.q_THD.shape[-1],
            scale=self.scale,
            block_size=block_size,
            max_num_seqs=self.batch,
            max_model_len=self.block_table.shape[1] * block_size,
            max_num_batched_tokens=self.q_THD.shape[0],
        )

    def decode_metadata(self) -> DecodeMetadata:
        return DecodeMetadata(self.block_table, self._lens(), max_seq_len=self.length)

    def prefill_metadata(self) -> PrefillMetadata:
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=self.q_THD.device)
        return PrefillMetadata(
            block_table=self.block_table,
            seq_lens=self._lens(),
            query_start_loc=starts * self.queries_per_row,
            max_query_len=self.queries_per_row,
            max_seq_len=self.length,
        )

    def dense_keys_and_values(self, layer: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `rows` sequences (all unless given), [rows, K, L, D]."""
        table = self.block_table[:rows].long()
        k, v = (
            cache[table].flatten(1, 2)[:, : self.length].transpose(1, 2)
            for cache in self.caches[layer]
        )
        return k, v

    def relative_error(self) -> float:
        """||out - float64|| / ||float64|| of the last queries of the first sequence, last layer."""
        count = min(self.queries_per_row, CHECKED_QUERIES)
        last = slice(self.queries_per_row - count, self.queries_per_row)
        group = self.num_heads // self.num_kv_heads
        k_HLD, v_HLD = (
            x[0].double().repeat_interleave(group, dim=0)
            for x in self.dense_keys_and_values(len(self.caches) - 1, rows=1)
        )
        q_HQD = self.q_THD[last].double().transpose(0, 1)
        scores_HQL = q_HQD @ k_HLD.transpose(-1, -2) * self.scale
        future_QL = torch.ones(scores_HQL.shape[1:], dtype=torch.bool, device=q_HQD.device)
        scores_HQL.masked_fill_(future_QL.triu(1 + self.length - count), -torch.inf)
        expected_HQD = scores_HQL.softmax(-1) @ v_HLD
        difference = self.out_THD[last].double().transpose(0, 1) - expected_HQD
        return float(difference.norm() / expected_HQD.norm())

    def _lens(self) -> Tensor:
        return torch.full((self.batch,), self.length, dtype=torch.int32, device=self.q_THD.device)


def make_case(setup: AttentionSetup, block_size: int, length: int, layers: int) -> AttentionCase:
    """Random queries, and blocks in random order; every block is finite to its end."""
    generator = torch.Generator(setup.device).manual_seed(length)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=setup.dtype, device=setup.device, generator=generator)

    width = -(-length // block_size)
    num_blocks = setup.batch * width
    queries = length if setup.phase == "prefill" else 1
    cache = (num_blocks, block_size, setup.num_kv_heads, setup.head_size)
    q_THD = randn(setup.batch * queries, setup.num_heads, setup.head_size)
    order = torch.randperm(num_blocks, device=setup.device, generator=generator)
    return AttentionCase(
        batch=setup.batch,
        length=length,
        queries_per_row=queries,
        num_heads=setup.num_heads,
        num_kv_heads=setup.num_kv_heads,
        q_THD=q_THD,
        out_THD=torch.empty_like(q_THD),
        caches=[(randn(*cache), randn(*cache)) for _ in range(layers)],
        block_table=order.int().view(setup.batch, width),
    )
