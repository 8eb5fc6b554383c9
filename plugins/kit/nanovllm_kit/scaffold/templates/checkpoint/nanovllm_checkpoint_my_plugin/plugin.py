"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import CheckpointSpec, hookimpl

SPEC = CheckpointSpec(
    name="my_plugin",
    impl="nanovllm_checkpoint_my_plugin.source:find",
    summary="A checkpoint in a zip archive, unpacked once.",
    contract=2,
)


@hookimpl
def nanovllm_checkpoints() -> Sequence[CheckpointSpec]:
    """The source of this package."""
    return [SPEC]
