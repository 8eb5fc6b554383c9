"""The hook by which plugins of this kind are declared."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import hookspec

from nanovllm_kind_my_plugin.spec import StepSinkSpec


@hookspec
def nanovllm_my_plugins() -> Sequence[StepSinkSpec]:  # type: ignore[empty-body]
    """Places for the numbers of steps (entry-point group `nanovllm.my_plugins`)."""
