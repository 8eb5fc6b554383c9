"""The checkpoint source `demo`: `model: demo` finds the folder inside this package."""

from __future__ import annotations

from pathlib import Path

from nanovllm_core.api import CheckpointNotFoundError, CheckpointSpec, NoOptions, hookimpl

FOLDER = Path(__file__).parent / "checkpoint"


def locate(options: NoOptions, reference: str) -> Path:
    """Return the embedded checkpoint's folder; there is one only, so `reference` stays empty."""
    if reference:
        raise CheckpointNotFoundError(
            f"model 'demo:{reference:.80}': the demo plugin holds one checkpoint; write 'demo'"
        )
    return FOLDER


@hookimpl
def nanovllm_checkpoints() -> list[CheckpointSpec]:
    """Offer the embedded checkpoint."""
    return [
        CheckpointSpec(
            name="demo",
            impl="nanovllm_checkpoint_demo.plugin:locate",
            contract=2,
            summary="a Qwen3 of 3.7 million parameters: sums, lists, simple questions, stories",
        )
    ]
