"""The options a user may set under `attention.options`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_Warps = Literal[1, 2, 4, 8]


class TritonOptions(BaseModel):
    """Overrides of the defaults in `decode_tuning` and `prefill_tuning`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chunk_size: int | None = Field(
        default=None,
        ge=64,
        multiple_of=64,
        description="Decode: tokens of context per work item. Unset, each step chooses it on the "
        "device so that the GPU is filled; set, a row's result is bitwise the same in any batch, "
        "and contexts of short prompts are not split, which takes longer where they are long.",
    )
    decode_num_warps: _Warps | None = Field(default=None, description="Warps per decode program.")
    decode_num_stages: int | None = Field(
        default=None, ge=1, le=6, description="Depth of the decode loop's load pipeline."
    )
    prefill_num_warps: _Warps | None = Field(
        default=None, description="Warps per prefill program; of heads above 128, also small tiles."
    )
    prefill_num_stages: int | None = Field(
        default=None,
        ge=1,
        le=6,
        description="Depth of the prefill loop's load pipeline; of heads above 128, also small "
        "tiles.",
    )
    latent_kernel: Literal["auto", "portable", "hopper"] = Field(
        default="auto",
        description="Decode over latent rows. `portable` runs on every GPU. `hopper` needs compute "
        "capability 9.0; on an H200, over 64 sequences of 2,048 tokens, it was 1.1 times as fast "
        "with 16 heads and twice with 128. `auto` is `hopper` where it can serve; `hopper` is "
        "refused where it cannot. Other layers ignore the option.",
    )


def given(**overrides: int | None) -> dict[str, Any]:
    """The overrides that the user has set."""
    return {name: value for name, value in overrides.items() if value is not None}
