"""Tests for plugin authors: conformance suites, and what they are made of; in the wheel.

    from nanovllm_kit import AttentionConformance, PluginUnderTest, plugin_under_test

Other names are imported from their modules (`nanovllm_kit.numerics`, `.aot`, …), so that a test
pays only for what it uses.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm_kit.attention import AttentionConformance
    from nanovllm_kit.checkpoint import CheckpointConformance
    from nanovllm_kit.conformance import (
        Conformance,
        PluginUnderTest,
        SpecConformance,
        installed_plugin,
        plugin_under_test,
    )
    from nanovllm_kit.executor import ExecutorConformance
    from nanovllm_kit.extension import ExtensionConformance, extension_under_test
    from nanovllm_kit.kernels import KernelSetConformance
    from nanovllm_kit.kind import KindConformance, KindUnderTest, kind_under_test
    from nanovllm_kit.logits_processor import LogitsProcessorConformance
    from nanovllm_kit.model import ModelConformance
    from nanovllm_kit.observer import ObserverConformance
    from nanovllm_kit.sampler import SamplerConformance
    from nanovllm_kit.scheduler import SchedulerConformance, SchedulingPolicyConformance

_HOMES = {
    "AttentionConformance": "attention",
    "CheckpointConformance": "checkpoint",
    "Conformance": "conformance",
    "ExecutorConformance": "executor",
    "ExtensionConformance": "extension",
    "KernelSetConformance": "kernels",
    "KindConformance": "kind",
    "KindUnderTest": "kind",
    "LogitsProcessorConformance": "logits_processor",
    "ModelConformance": "model",
    "ObserverConformance": "observer",
    "PluginUnderTest": "conformance",
    "SamplerConformance": "sampler",
    "SchedulerConformance": "scheduler",
    "SchedulingPolicyConformance": "scheduler",
    "SpecConformance": "conformance",
    "extension_under_test": "extension",
    "installed_plugin": "conformance",
    "kind_under_test": "kind",
    "plugin_under_test": "conformance",
}

__all__ = [
    "AttentionConformance",
    "CheckpointConformance",
    "Conformance",
    "ExecutorConformance",
    "ExtensionConformance",
    "KernelSetConformance",
    "KindConformance",
    "KindUnderTest",
    "LogitsProcessorConformance",
    "ModelConformance",
    "ObserverConformance",
    "PluginUnderTest",
    "SamplerConformance",
    "SchedulerConformance",
    "SchedulingPolicyConformance",
    "SpecConformance",
    "extension_under_test",
    "installed_plugin",
    "kind_under_test",
    "plugin_under_test",
]


if not TYPE_CHECKING:  # A type checker would take any name to be there.

    def __getattr__(name: str) -> Any:
        """Import a public name on first use: a suite needs pytest, and some need torch."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__} has no attribute {name!r}")
        module = f"{__name__}.{_HOMES[name]}"
        if module not in sys.modules:
            import pytest

            # A failing check shows the values that it compared, whichever module they are in.
            beside = (f"{__name__}.{found.name}" for found in iter_modules(__path__))
            pytest.register_assert_rewrite(*(one for one in beside if one not in sys.modules))
        return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
