"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nanovllm_core.api import KernelSetSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field


class MyPluginOptions(BaseModel):
    """Options of `kernels: {name: my_plugin}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute: Literal["float32", "float64"] = Field(
        default="float32",
        description="The number format between an operation's input and its result; float64 is "
        "slow and good for finding out where a difference comes from.",
    )


SPEC = KernelSetSpec(
    name="my_plugin",
    impl="nanovllm_kernels_my_plugin.kernels:MyPluginKernels",
    summary="The fused operations, in plain torch.",
    contract=4,
    options=MyPluginOptions,
    devices=frozenset({"cpu"}),
)


@hookimpl
def nanovllm_kernels() -> Sequence[KernelSetSpec]:
    """The kernel set of this package."""
    return [SPEC]
