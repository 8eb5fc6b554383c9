"""What the sdpa backend says about itself; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import (
    AttentionCapabilities,
    AttentionRequirements,
    AttentionSpec,
    KVLayout,
    hookimpl,
)

Kernel = Literal["auto", "math", "efficient", "flash", "cudnn"]


class SdpaOptions(BaseModel):
    """Options of `attention: {backend: sdpa}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kernel: Kernel = Field(
        default="auto",
        description="Which of torch's attention kernels runs. `auto` lets torch choose among "
        "flash, efficient and math; any other name runs that kernel or fails.",
    )


def check(requirements: AttentionRequirements, options: BaseModel) -> list[str]:
    """Why the chosen kernel cannot serve; the cases that torch decides by shape fail when run."""
    kernel = cast(SdpaOptions, options).kernel
    reasons = []
    if requirements.device == "cpu" and kernel in ("efficient", "cudnn"):
        reasons.append(
            f"kernel {kernel!r} exists only on cuda, device is cpu; use kernel: auto, math or flash"
        )
    if requirements.soft_cap and kernel not in ("auto", "math"):
        reasons.append(
            f"kernel {kernel!r} has no soft cap, and the model needs one; use kernel: auto or math"
        )
    if requirements.latent and kernel not in ("auto", "math"):
        reasons.append(
            f"kernel {kernel!r} gives no log-sum-exp, by which the parts of "
            "a prompt that latent attention computes are merged; use kernel: auto or math"
        )
    if requirements.sliding_window and kernel == "flash" and requirements.device == "cuda":
        reasons.append(
            "kernel 'flash' takes no mask on cuda, so it has no sliding window, and the model "
            "needs one; use kernel: auto, efficient, cudnn or math"
        )
    if requirements.device == "cuda" and kernel in ("flash", "cudnn"):
        if requirements.dtype == "float32":
            reasons.append(
                f"kernel {kernel!r} takes float16 and bfloat16 on cuda, dtype is float32; "
                "use kernel: auto, efficient or math"
            )
        if kernel == "flash" and requirements.phase == "decode":
            reasons.append(
                "kernel 'flash' takes no mask on cuda, so it cannot decode rows of different "
                "lengths; use kernel: auto, efficient, cudnn or math, or another decode backend"
            )
    return reasons


def kv_layouts(_requirements: AttentionRequirements, _options: BaseModel) -> Sequence[KVLayout]:
    """Blocks of any multiple of 16 tokens: efficient attention reads masks 16 columns at a time."""
    return (KVLayout("NPKD", 16),)


@hookimpl
def nanovllm_attention() -> Sequence[AttentionSpec]:
    """The sdpa backend."""
    capabilities = AttentionCapabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        gqa=True,
        sliding_window=True,
        soft_cap=True,
        latent=True,
        # A last block is gathered whole: a masked weight of 0 times a NaN in V would be NaN.
        needs_finite_tail=True,
        cuda_graphs="decode",
    )
    return (
        AttentionSpec(
            name="sdpa",
            impl="nanovllm_attention_sdpa.backend:SdpaAttention",
            contract=2,
            summary="torch scaled_dot_product_attention over gathered blocks; runs anywhere",
            options=SdpaOptions,
            capabilities=capabilities,
            kv_layouts=kv_layouts,
            check=check,
            provider=lambda options: f"torch sdpa, kernel {cast(SdpaOptions, options).kernel}",
            rank=lambda requirements: 10,
        ),
    )
