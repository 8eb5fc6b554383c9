"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nanovllm_core.api import (
    AttentionCapabilities,
    AttentionRequirements,
    AttentionSpec,
    KVLayout,
    hookimpl,
)
from pydantic import BaseModel, ConfigDict, Field


class MyPluginOptions(BaseModel):
    """Options of `attention: {backend: my_plugin}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute: Literal["float32", "float64"] = Field(
        default="float32",
        description="The number format of scores and sums, whatever the model's is; float64 is "
        "slow and good for finding out where a difference comes from.",
    )


def kv_layouts(_requirements: AttentionRequirements, _options: BaseModel) -> Sequence[KVLayout]:
    """Blocks of 16 tokens and multiples, the preferred first: here all are alike."""
    return (KVLayout("NPKD", 16),)


SPEC = AttentionSpec(
    name="my_plugin",
    impl="nanovllm_attention_my_plugin.backend:MyPluginBackend",
    summary="Paged attention in plain torch.",
    contract=2,
    options=MyPluginOptions,
    # What is not stated here is never asked of the backend.
    capabilities=AttentionCapabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        gqa=True,
        sliding_window=True,
        soft_cap=True,
        # It reads lengths on the host, which a captured graph cannot.
        cuda_graphs="none",
    ),
    kv_layouts=kv_layouts,
)


@hookimpl
def nanovllm_attention() -> Sequence[AttentionSpec]:
    """The backend of this package."""
    return [SPEC]
