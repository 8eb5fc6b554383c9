"""An extension and a declared kind, each of a few lines, pass their suites; wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest

from nanovllm_core.errors import NanoVLLMError, PluginLoadError
from nanovllm_kit import (
    ExtensionConformance,
    KindConformance,
    KindUnderTest,
    PluginUnderTest,
    extension_under_test,
    kind_under_test,
)

Install = Callable[..., None]

EXTENSION = '''
from nanovllm_core.api import hookimpl

@hookimpl
def nanovllm_engine_closed():
    pass

@hookimpl
def nanovllm_cli(app):
    @app.command()
    def hello():
        """Say hello."""
'''

KIND = {
    "bell_spec": """
from dataclasses import dataclass
from nanovllm_core.api import PluginSpec

@dataclass(frozen=True, slots=True, kw_only=True)
class BellSpec(PluginSpec):
    loudness: int = 1
""",
    "bell_hookspecs": """
from nanovllm_core.api import hookspec

@hookspec
def nanovllm_bells():
    "Bells."
""",
    "bell_suite": """
from nanovllm_kit import SpecConformance

class BellConformance(SpecConformance):
    def test_it_is_heard(self, plugin):
        assert plugin.spec.loudness > 0
""",
    "bell_plugin": """
from nanovllm_core.api import KindSpec, hookimpl
from bell_spec import BellSpec

KIND = KindSpec(name="bell", contract=2, spec=BellSpec, hookspecs="bell_hookspecs",
                conformance="bell_suite:BellConformance")

@hookimpl
def nanovllm_kinds():
    return [KIND]
""",
}


class TestExtension(ExtensionConformance):
    """A command and a hook of the engine's life."""

    @pytest.fixture
    def plugin(self, install: Install) -> PluginUnderTest:
        install("hello", {"nanovllm.extensions": {"hello": "hello_ext"}}, {"hello_ext": EXTENSION})
        return extension_under_test("hello_ext")


class TestKind(KindConformance):
    """A kind of one number."""

    @pytest.fixture
    def kind(self, install: Install) -> KindUnderTest:
        install("bells", {"nanovllm.kinds": {"bell": "bell_plugin"}}, KIND)
        return kind_under_test(import_module("bell_plugin").KIND, "bell_plugin")


def test_a_misspelt_hook_of_an_extension_is_caught(install: Install) -> None:
    source = EXTENSION.replace("nanovllm_engine_closed", "nanovllm_engine_close")
    install("hello", {}, {"hello_typo": source})
    with pytest.raises(AssertionError, match="did you mean nanovllm_engine_closed"):
        TestExtension().test_every_hook_is_one_that_is_called(import_module("hello_typo"))


@pytest.mark.parametrize("installed", [True, False])
def test_an_extension_may_answer_the_hooks_of_a_declared_kind(
    install: Install, installed: bool
) -> None:
    """Of an installed one, and of its own module's, which may not be installed yet."""
    answers = """
@hookimpl
def nanovllm_bells():
    return []
"""
    install("bells", {"nanovllm.kinds": {"bell": "bell_plugin"}} if installed else {}, KIND)
    source = answers if installed else KIND["bell_plugin"] + answers
    install("ringing", {}, {"ringing_ext": EXTENSION + source})
    TestExtension().test_every_hook_is_one_that_is_called(import_module("ringing_ext"))


def test_a_kind_whose_hook_is_not_specified_is_caught(install: Install) -> None:
    broken = KIND | {"bell_hookspecs": KIND["bell_hookspecs"].replace("_bells", "_chimes")}
    install("bells", {"nanovllm.kinds": {"bell": "bell_plugin"}}, broken)
    kind = kind_under_test(import_module("bell_plugin").KIND, "bell_plugin")
    expected = "must declare the hook nanovllm_bells, marked @hookspec"
    with pytest.raises(AssertionError, match=f"bell_hookspecs {expected}"):
        TestKind().test_the_hook_is_specified(kind)


def test_a_hook_that_is_not_marked_is_named(install: Install) -> None:
    """pluggy's own error names the module alone."""
    broken = KIND | {"bell_hookspecs": KIND["bell_hookspecs"].replace("@hookspec", "")}
    install("bells", {"nanovllm.kinds": {"bell": "bell_plugin"}}, broken)
    kind = kind_under_test(import_module("bell_plugin").KIND, "bell_plugin")
    expected = "bell_hookspecs must declare the hook nanovllm_bells, marked @hookspec"
    with pytest.raises(AssertionError, match=expected):
        TestKind().test_the_hook_is_specified(kind)
    with pytest.raises(PluginLoadError, match=expected):
        TestKind().test_the_core_takes_the_declaration(kind)


def test_a_kind_that_no_hook_declares_is_refused(install: Install) -> None:
    """With the module that was asked."""
    install("bells", {}, KIND)
    with pytest.raises(NanoVLLMError, match=r"bell_spec\.nanovllm_kinds"):
        kind_under_test(import_module("bell_plugin").KIND, "bell_spec")
