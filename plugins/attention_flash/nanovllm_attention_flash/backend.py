"""The backend: buffers that graphs may read, and one call into the chosen provider per layer."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_attention_flash.adapters.base import (
    Adapter,
    AttentionRules,
    DecodeBatch,
    PrefillBatch,
)
from nanovllm_attention_flash.plugin import provider_of
from nanovllm_attention_flash.providers import Provider, other_installs
from nanovllm_core.api import (
    AttentionBackend,
    AttentionConfig,
    DecodeMetadata,
    InconsistentStateError,
    PrefillMetadata,
    UnsupportedError,
)


class FlashAttention(AttentionBackend):
    """Paged attention by FlashAttention-4, or by another provider that the options name."""

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        super().__init__(options, config)
        self.provider = provider_of(options)
        if config.block_size % self.provider.block_multiple:
            raise UnsupportedError(
                f"attention provider {self.provider.name} reads blocks of a multiple of "
                f"{self.provider.block_multiple} tokens, not {config.block_size}; "
                f"set cache.block_size: {self.provider.block_multiple}"
            )
        rules = AttentionRules(config.scale, config.sliding_window, config.soft_cap)
        reasons = self.provider.unsupported(
            sliding_window=rules.sliding_window is not None, soft_cap=rules.soft_cap is not None
        )
        if reasons:
            raise UnsupportedError(f"attention flash: {'; '.join(reasons)}", reasons)
        self._label = self.provider.label()
        self._adapter = _load(self.provider, rules)
        self._decode: DecodeBatch | None = None
        self._prefill: PrefillBatch | None = None

    def allocate(self) -> None:
        """Make the two small tensors that captured kernels read."""
        rows, device = self.config.max_num_seqs, self.config.device
        self._key_lens_from_1 = torch.ones(rows, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def captured_tensors(self) -> dict[str, Tensor]:
        """The lengths and starts of decode rows."""
        return {"key_lens_from_1": self._key_lens_from_1, "query_starts": self._query_starts}

    def describe(self) -> str:
        """The provider, its package and version."""
        return self._label

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        """Write the lengths of padded rows; everything else is read in place."""
        rows = metadata.num_rows
        if metadata.query_len != 1:
            raise UnsupportedError(
                f"flash decodes one query per row, query_len is {metadata.query_len}; "
                "send longer queries as prefill chunks"
            )
        if rows > self.config.max_num_seqs:
            raise InconsistentStateError(
                f"{rows} decode rows, the backend was made for {self.config.max_num_seqs}"
            )
        key_lens_from_1 = self._key_lens_from_1[:rows]
        torch.clamp(metadata.seq_lens, min=1, out=key_lens_from_1)
        self._decode = DecodeBatch(
            block_table=metadata.block_table,
            key_lens=metadata.seq_lens,
            key_lens_from_1=key_lens_from_1,
            query_starts=self._query_starts[: rows + 1],
            max_key_len=metadata.max_seq_len,
        )

    def plan_prefill(self, metadata: PrefillMetadata) -> None:
        """Sum up the key lengths, on the device."""
        key_starts = torch.zeros_like(metadata.query_start_loc)
        torch.cumsum(metadata.seq_lens, 0, dtype=torch.int32, out=key_starts[1:])
        self._prefill = PrefillBatch(
            block_table=metadata.block_table,
            key_lens=metadata.seq_lens,
            query_starts=metadata.query_start_loc,
            key_starts=key_starts,
            max_query_len=metadata.max_query_len,
            max_key_len=metadata.max_seq_len,
            most_queries=self.config.max_num_batched_tokens,
        )

    def run_decode(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DecodeMetadata,
        out_BHD: Tensor,
    ) -> None:
        """Attend each row's query to its blocks; a padded row's output means nothing."""
        if self._decode is None or self._decode.key_lens is not metadata.seq_lens:
            raise InconsistentStateError("run_decode got a batch that plan_decode did not see")
        out_BHD.copy_(self._adapter.decode(q_BHD, k_cache, v_cache, self._decode))

    def run_prefill(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: PrefillMetadata,
        out_THD: Tensor,
    ) -> None:
        """Attend each chunk's queries to its sequence, the last query to every key."""
        if self._prefill is None or self._prefill.key_lens is not metadata.seq_lens:
            raise InconsistentStateError("run_prefill got a batch that plan_prefill did not see")
        out_THD.copy_(self._adapter.prefill(q_THD, k_cache, v_cache, self._prefill))


def _load(provider: Provider, rules: AttentionRules) -> Adapter:
    """Import the provider's adapter, and with it the provider."""
    missing = provider.missing()
    if missing is not None:
        raise UnsupportedError(
            f"attention provider {provider.name}: {missing}, {other_installs(provider)}"
        )
    module, _, name = provider.adapter.partition(":")
    try:
        adapter = getattr(import_module(module), name)
    except ImportError as error:
        raise UnsupportedError(
            f"attention provider {provider.label()} cannot be imported: {error}; "
            f"{provider.install}, {other_installs(provider)}",
            [str(error)],
        ) from error
    return cast(Adapter, adapter(rules))
