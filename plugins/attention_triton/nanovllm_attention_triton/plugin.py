"""What this plugin offers, as data: importing it imports neither torch nor triton."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from typing import cast

from pydantic import BaseModel

from nanovllm_attention_triton.decode_tuning import HOPPER_LATENT
from nanovllm_attention_triton.hopper_limits import hopper_latent_limits
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
MAX_LATENT_SIZES = (512, 128)
"""The most columns of a latent row that are its value, and the most behind these."""


def _kv_layouts(requirements: AttentionRequirements, options: BaseModel) -> Sequence[KVLayout]:
    """Blocks of any multiple of 16 tokens: a tile may span blocks, a block may hold several tiles.

    256 is preferred on a GPU: the kernels are as fast, and the host's share of a step halves. In a
    pair FlashAttention-4 prefers 128.
    """
    multiples = (256, 128, 16) if requirements.device == "cuda" else (16,)
    if _by_hopper_kernel(requirements, options):
        multiples = (256, 128, HOPPER_LATENT.tile)
    return [KVLayout("NPKD", block_multiple=multiple) for multiple in multiples]


def _check(requirements: AttentionRequirements, options: BaseModel) -> list[str]:
    reasons = []
    if requirements.num_heads % requirements.num_kv_heads:
        reasons.append(
            f"num_heads ({requirements.num_heads}) must be a multiple of num_kv_heads "
            f"({requirements.num_kv_heads})"
        )
    if requirements.latent:
        reasons += _latent_limits(requirements)
    if _by_hopper_kernel(requirements, options):
        reasons += _hopper_limits(requirements, cast(TritonOptions, options))
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


def _latent_limits(requirements: AttentionRequirements) -> list[str]:
    """What of a latent group's sizes has no tiles that fit."""
    size, value_size = requirements.head_size, requirements.value_size or requirements.head_size
    if requirements.phase == "prefill" and not requirements.cuda_graphs:
        largest = max(size, value_size)
        fits = largest <= MAX_HEAD_SIZE
        return [] if fits else [f"keys and values have {largest} numbers, at most {MAX_HEAD_SIZE}"]
    rest, (most_value, most_rest) = size - value_size, MAX_LATENT_SIZES
    reasons = []
    if value_size > most_value:
        reasons.append(f"the latent part has {value_size} numbers, at most {most_value}")
    if rest > most_rest:
        reasons.append(f"rows have {rest} numbers behind the latent part, at most {most_rest}")
    return reasons


def _by_hopper_kernel(requirements: AttentionRequirements, options: BaseModel) -> bool:
    """Whether the user chose the kernel for Hopper for decode over latent rows."""
    chosen = cast(TritonOptions, options).latent_kernel == "hopper"
    return chosen and requirements.latent and requirements.phase == "decode"


def _hopper_limits(requirements: AttentionRequirements, options: TritonOptions) -> list[str]:
    """Why that kernel cannot serve."""
    value_size = requirements.value_size or requirements.head_size
    return hopper_latent_limits(
        options,
        device=requirements.device.split(":")[0],
        capability=requirements.compute_capability,
        triton_version=metadata.version("triton"),
        dtype=requirements.dtype,
        value_size=value_size,
        rest_size=requirements.head_size - value_size,
        block_size=requirements.block_size,
    )


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
                latent=True,
                latent_prefill=True,
                cuda_graphs="full",
            ),
            kv_layouts=_kv_layouts,
            check=_check,
            provider=_provider,
            rank=_rank,
            needs_warm_up=False,
        )
    ]
