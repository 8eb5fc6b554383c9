"""What the flash backend says about itself; importing this module imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_attention_flash.providers import PROVIDERS, Provider, other_installs, provider_for
from nanovllm_core.api import (
    AttentionCapabilities,
    AttentionRequirements,
    AttentionSpec,
    DoctorCheck,
    KVLayout,
    hookimpl,
)


class FlashOptions(BaseModel):
    """Options of `attention: {backend: flash}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    provider: Literal["auto", "fa4", "fa3", "fa2", "torch"] = Field(
        default="auto",
        description="Which package runs. `auto` is fa4, the one verified on a GPU; the others are "
        "used only when named.",
    )


def provider_of(options: BaseModel) -> Provider:
    """The provider that validated options choose."""
    return provider_for(cast(FlashOptions, options).provider)


def check(requirements: AttentionRequirements, options: BaseModel) -> list[str]:
    """Why the chosen provider cannot serve: not installed, the wrong GPU, no window."""
    provider = provider_of(options)
    reasons = []
    missing = provider.missing()
    if missing is not None:
        reasons.append(f"provider {provider.name}: {missing}, {other_installs(provider)}")
    reasons += provider.unsupported(
        sliding_window=requirements.sliding_window, soft_cap=requirements.soft_cap
    )
    if requirements.phase == "prefill" and requirements.cuda_graphs and not provider.verified:
        reasons.append(f"provider {provider.name} was not captured with prompts on a GPU, fa4 was")
    first, last = provider.capabilities
    here = requirements.compute_capability
    if here is not None and not first <= here[0] <= last:
        reasons.append(
            f"provider {provider.name} reads blocks on compute capability {first}.x to {last}.x, "
            f"this GPU has {here[0]}.{here[1]}; choose another provider or backend"
        )
    return reasons


def kv_layouts(_requirements: AttentionRequirements, options: BaseModel) -> Sequence[KVLayout]:
    """Blocks of 128 tokens, one key tile of FlashAttention-4, where the provider takes them."""
    multiple = provider_of(options).block_multiple
    preferred = math.lcm(128, multiple)
    return tuple(KVLayout("NPKD", size) for size in dict.fromkeys((preferred, multiple)))


def _rank(requirements: AttentionRequirements) -> int:
    """Above all others for prompts; without split-KV on sm_90 it is second best at decoding."""
    return 60 if requirements.phase == "prefill" else 40


@hookimpl
def nanovllm_attention() -> Sequence[AttentionSpec]:
    """The flash backend."""
    capabilities = AttentionCapabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        head_sizes=frozenset({64, 128}),
        min_compute_capability=(8, 0),
        gqa=True,
        # Some providers only: see `check`.
        sliding_window=True,
        soft_cap=True,
        # A tile loads every row of its block; a weight of 0 times a NaN in V would be NaN.
        needs_finite_tail=True,
        # Prompts with some providers only: see `check`.
        cuda_graphs="full",
    )
    return (
        AttentionSpec(
            name="flash",
            impl="nanovllm_attention_flash.backend:FlashAttention",
            contract=2,
            summary="FlashAttention-4 without compiling; flash-attn 3, 2 and torch's when named",
            options=FlashOptions,
            capabilities=capabilities,
            kv_layouts=kv_layouts,
            check=check,
            provider=lambda options: provider_of(options).label(),
            rank=_rank,
        ),
    )


@hookimpl
def nanovllm_doctor() -> Sequence[DoctorCheck]:
    """Which providers are installed; one that is missing is no fault, for one is enough."""
    return [
        DoctorCheck(
            name=f"flash provider {provider.name}",
            ok=provider.missing() is None,
            detail=provider.missing() or provider.label(),
        )
        for provider in PROVIDERS.values()
    ]
