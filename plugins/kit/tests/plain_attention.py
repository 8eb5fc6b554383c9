"""A backend in plain torch that declares everything but graphs, and keeps it: to plant bugs in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from random import Random

import torch
from torch import Tensor

from nanovllm_core.errors import UnsupportedError
from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionCapabilities,
    DecodeMetadata,
    KVLayout,
    PrefillMetadata,
)
from nanovllm_core.interfaces.specs import AttentionSpec
from nanovllm_core.registry.hookspecs import hookimpl
from nanovllm_kit import AttentionConformance, plugin_under_test
from nanovllm_kit.attention_backend import BackendUnderTest


class Plain(AttentionBackend):
    """Row by row, in float64, from the scores to the output; shares no code with the reference."""

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        if metadata.query_len != 1:
            raise UnsupportedError(f"query_len is {metadata.query_len}, plain decodes 1")

    def run_decode(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DecodeMetadata,
        out_BHD: Tensor,
    ) -> None:
        lens = metadata.seq_lens.tolist()
        starts = [*range(len(lens) + 1)]
        self._attend(q_BHD, k_cache, v_cache, metadata.block_table, lens, starts, out_BHD)

    def run_prefill(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: PrefillMetadata,
        out_THD: Tensor,
    ) -> None:
        lens, starts = metadata.seq_lens.tolist(), metadata.query_start_loc.tolist()
        self._attend(q_THD, k_cache, v_cache, metadata.block_table, lens, starts, out_THD)

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        lens: list[int],
        starts: list[int],
        out: Tensor,
    ) -> None:
        config = self.config
        for row, keys in enumerate(lens):
            start, stop = starts[row], starts[row + 1]
            skipped = self._freed_blocks(keys, stop - start)
            blocks = table[row, skipped : -(-keys // config.block_size)].long()
            keys -= skipped * config.block_size
            queries = slice(start, stop if keys else start)
            k_KLD, v_KLD = (
                cache[blocks].flatten(0, 1)[:keys].double().transpose(0, 1)
                for cache in (k_cache, v_cache)
            )
            q_KGQD = q[queries].double().unflatten(1, (config.num_kv_heads, -1)).permute(1, 2, 0, 3)
            scores = q_KGQD @ k_KLD[:, None].transpose(2, 3) * config.scale
            if config.soft_cap is not None:
                scores = torch.tanh(scores / config.soft_cap) * config.soft_cap
            first = keys - (stop - start) + 1
            hidden = scores.new_ones(scores.shape[2:]).triu(first)
            if config.sliding_window is not None:
                hidden += scores.new_ones(scores.shape[2:]).tril(first - 1 - config.sliding_window)
            weights = scores.masked_fill(hidden > 0, -torch.inf).softmax(-1)
            out[queries] = (
                (weights @ v_KLD[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            )

    def _freed_blocks(self, keys: int, queries: int) -> int:
        """Blocks before the window of the first query, which may belong to another sequence."""
        if self.config.sliding_window is None:
            return 0
        return max(0, keys - queries - self.config.sliding_window + 1) // self.config.block_size


@hookimpl
def nanovllm_attention() -> Iterator[AttentionSpec]:
    yield SPEC


SPEC = AttentionSpec(
    name="plain",
    impl=f"{__name__}:Plain",
    contract=2,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        gqa=True,
        sliding_window=True,
        soft_cap=True,
    ),
    kv_layouts=lambda requirements, options: [KVLayout("NPKD", 1)],
)


def plain_with(backend: type[AttentionBackend]) -> BackendUnderTest:
    """Another class behind the same spec, as the suite drives it."""
    spec = replace(SPEC, impl=f"{backend.__module__}:{backend.__name__}")
    return BackendUnderTest(replace(plugin_under_test(SPEC), spec=spec))


def run_check(name: str, it: BackendUnderTest, seed: int = 0) -> None:
    """One check of the suite, with the draws that the suite of this seed would give it."""
    check = getattr(AttentionConformance(), name)
    drawn = {"draws": Random(f"{seed} {name}")} if "draws" in signature(check).parameters else {}
    check(it, **drawn)
