"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import SamplerSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field


class MyPluginOptions(BaseModel):
    """Options of `sampler: {name: my_plugin}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    salt: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Mixed into every seed: two engines with different salts draw different "
        "tokens for equal requests.",
    )


SPEC = SamplerSpec(
    name="my_plugin",
    impl="nanovllm_sampler_my_plugin.sampler:MyPluginSampler",
    summary="Greedy, or Gumbel noise from splitmix64.",
    contract=1,
    options=MyPluginOptions,
    devices=frozenset({"cpu", "cuda"}),
    # `sample` launches the same operations every time, and reads nothing on the host.
    cuda_graphs=True,
)


@hookimpl
def nanovllm_samplers() -> Sequence[SamplerSpec]:
    """The sampler of this package."""
    return [SPEC]
