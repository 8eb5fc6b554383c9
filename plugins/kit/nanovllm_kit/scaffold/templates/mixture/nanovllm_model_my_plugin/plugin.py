"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ModelSpec, hookimpl

SPEC = ModelSpec(
    # As `architectures` in a checkpoint's config.json has it; the entry point has the same name.
    name="MyPluginForCausalLM",
    impl="nanovllm_model_my_plugin.model:MyPluginForCausalLM",
    summary="A small decoder with a mixture of experts: a few of them for each token.",
    contract=2,
    # What the suite adds to its small configuration.
    test_config={"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
)


@hookimpl
def nanovllm_models() -> Sequence[ModelSpec]:
    """The architecture of this package."""
    return [SPEC]
