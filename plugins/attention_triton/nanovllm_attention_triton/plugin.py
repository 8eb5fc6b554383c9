"""What this plugin offers, as data: importing it imports neither torch nor triton."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata

from pydantic import BaseModel

from nanovllm_attention_triton.options import TritonOptions
from nanovllm_core.api import (
    AttentionCapabilities,
    AttentionRequirements,
    AttentionSpec,
    KVLayout,
    hookimpl,
)

MAX_HEAD_SIZE = 256
"""Smaller sizes that are no power of two are padded inside the kernels; a larger one has no tiles
that fit."""


def _kv_layouts(requirements: AttentionRequirements, options: BaseModel) -> Sequence[KVLayout]:
    """Blocks of any multiple of 16 tokens: a tile may span blocks, a block may hold several tiles.

    256 is preferred on a GPU: the kernels are as fast, and the host's share of a step halves. In a
    pair FlashAttention-4 prefers 128.
    """
    multiples = (256, 128, 16) if requirements.device == "cuda" else (16,)
    return [KVLayout("NPKD", block_multiple=multiple) for multiple in multiples]


def _check(requirements: AttentionRequirements, options: BaseModel) -> list[str]:
    reasons = []
    if requirements.num_heads % requirements.num_kv_heads:
        reasons.append(
            f"num_heads ({requirements.num_heads}) must be a multiple of num_kv_heads "
            f"({requirements.num_kv_heads})"
        )
    if requirements.device == "cpu":
        # Triton's own switch, read by triton when it is imported: it decides how kernels run.
        if os.environ.get("TRITON_INTERPRET") != "1":
            reasons.append(
                "on cpu Triton kernels run only through its interpreter (slow, for tests): "
                "set TRITON_INTERPRET=1, or use attention: {backend: sdpa}"
            )
        if requirements.dtype == "bfloat16":
            reasons.append(
                "Triton's interpreter computes bfloat16 wrongly: use dtype float32 on cpu"
            )
    return reasons


def _provider(options: BaseModel) -> str:
    return f"triton {metadata.version('triton')}"


def _rank(requirements: AttentionRequirements) -> int:
    """The interpreter is for tests: on a CPU it serves where it is named, and never wins."""
    return 50 if requirements.device == "cuda" else 0


@hookimpl
def nanovllm_attention() -> Sequence[AttentionSpec]:
    return [
        AttentionSpec(
            name="triton",
            impl="nanovllm_attention_triton.backend:TritonAttention",
            contract=2,
            summary="own Triton kernels: split-context paged decode, FlashAttention-2 prefill",
            options=TritonOptions,
            capabilities=AttentionCapabilities(
                devices=frozenset({"cuda", "cpu"}),
                dtypes=frozenset({"float16", "bfloat16", "float32"}),
                head_sizes=frozenset(range(1, MAX_HEAD_SIZE + 1)),
                min_compute_capability=(8, 0),
                gqa=True,
                sliding_window=True,
                soft_cap=True,
                cuda_graphs="full",
            ),
            kv_layouts=_kv_layouts,
            check=_check,
            provider=_provider,
            rank=_rank,
            needs_warm_up=False,
        )
    ]
