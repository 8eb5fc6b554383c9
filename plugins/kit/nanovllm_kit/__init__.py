"""Tests for plugin authors: conformance suites, and what they are made of; in the wheel.

    from nanovllm_kit import AttentionConformance, PluginUnderTest, plugin_under_test

Other names are imported from their modules (`nanovllm_kit.numerics`, `.aot`, …), so that a test
pays only for what it uses.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm_kit.attention import AttentionConformance as AttentionConformance
    from nanovllm_kit.checkpoint import CheckpointConformance as CheckpointConformance
    from nanovllm_kit.conformance import (
        Conformance as Conformance,
        PluginUnderTest as PluginUnderTest,
        SpecConformance as SpecConformance,
        installed_plugin as installed_plugin,
        plugin_under_test as plugin_under_test,
    )
    from nanovllm_kit.executor import ExecutorConformance as ExecutorConformance
    from nanovllm_kit.extension import (
        ExtensionConformance as ExtensionConformance,
        extension_under_test as extension_under_test,
    )
    from nanovllm_kit.kernels import KernelSetConformance as KernelSetConformance
    from nanovllm_kit.kind import (
        KindConformance as KindConformance,
        KindUnderTest as KindUnderTest,
        kind_under_test as kind_under_test,
    )
    from nanovllm_kit.logits_processor import (
        LogitsProcessorConformance as LogitsProcessorConformance,
    )
    from nanovllm_kit.model import ModelConformance as ModelConformance
    from nanovllm_kit.observer import ObserverConformance as ObserverConformance
    from nanovllm_kit.sampler import SamplerConformance as SamplerConformance
    from nanovllm_kit.scheduler import (
        SchedulerConformance as SchedulerConformance,
        SchedulingPolicyConformance as SchedulingPolicyConformance,
    )

if not TYPE_CHECKING:  # A type checker would take any name to be there.
    # The public names and their modules, as the imports above state them.
    _HOMES = {
        name.name: statement.module
        for statement in ast.walk(ast.parse(__loader__.get_data(__file__)))
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
        if name.name == name.asname
    }
    __all__ = [*_HOMES]

    def __getattr__(name: str) -> Any:
        """Import a public name on first use: a suite needs pytest, and some need torch."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__} has no attribute {name!r}")
        if _HOMES[name] not in sys.modules:
            import pytest

            # A failing check shows the values that it compared, whichever module they are in.
            beside = (f"{__name__}.{found.name}" for found in iter_modules(__path__))
            pytest.register_assert_rewrite(*(one for one in beside if one not in sys.modules))
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
