"""Tests for plugin authors: conformance suites, and what they are made of; in the wheel.

    from nanovllm_kit import AttentionConformance, PluginUnderTest, plugin_under_test

Other names are imported from their modules (`nanovllm_kit.numerics`, `.aot`, …), so that a test
pays only for what it uses.
"""

import sys
from pkgutil import iter_modules

import lazy_loader


def rewrite_asserts() -> None:
    """Inside a run of pytest: a failing check shows the values that it compared."""
    names = (f"{__name__}.{module.name}" for module in iter_modules(__path__))
    new = [name for name in names if name not in sys.modules]
    sys.modules["pytest"].register_assert_rewrite(*new)


if "pytest" in sys.modules:
    rewrite_asserts()

# The public names are in __init__.pyi. Each is imported on first use: some suites need torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
