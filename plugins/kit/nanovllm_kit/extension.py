"""The conformance suite of extensions: light modules of lifecycle hooks, commands and checks.

An extension has no spec; it is its module:

    class TestMyExtension(ExtensionConformance):
        @pytest.fixture
        def plugin(self) -> PluginUnderTest:
            return extension_under_test("my_extension.plugin")
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

import pytest
import typer

from nanovllm_core.errors import PluginLoadError
from nanovllm_core.registry import EXTENSION_GROUP, KIND_GROUP, get_plugin_manager, hookspecs
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance, without_spec
from nanovllm_kit.kind import declared_kinds


def extension_under_test(module: str) -> PluginUnderTest:
    """The extension whose entry point names this module."""
    return without_spec(module, module)


class ExtensionConformance(SpecConformance):
    """Every hook is one that is called, with the arguments that it is given."""

    @pytest.fixture
    def module(self, plugin: PluginUnderTest) -> ModuleType:
        """The module that the entry point names."""
        return import_module(plugin.spec_module)

    def hooks_of(self, module: ModuleType) -> list[str]:
        """The names of the functions marked `@hookimpl`."""
        mark = f"{hookspecs.PROJECT}_impl"
        return [name for name, value in vars(module).items() if hasattr(value, mark)]

    def test_every_hook_is_one_that_is_called(self, module: ModuleType) -> None:
        """By the core, or by a declared kind, with every argument that it takes."""
        name = module.__name__
        kinds = {entry.name: entry for entry in entry_points(group=KIND_GROUP)}
        own = {kind.name: EntryPoint(kind.name, name, KIND_GROUP) for kind in declared_kinds(name)}
        extension = EntryPoint(name, name, EXTENSION_GROUP)
        try:
            manager = get_plugin_manager(entry_points=[extension, *(own | kinds).values()])
            manager.enable([name])
        except PluginLoadError as error:
            # Not to be taken for code that cannot be imported, which ends the whole suite.
            raise AssertionError(str(error)) from error

    def test_there_is_a_hook(self, module: ModuleType) -> None:
        """What implements none would be enabled and do nothing."""
        assert self.hooks_of(module), f"{module.__name__} has no function marked @hookimpl"

    def test_its_commands_have_a_help_text(self, module: ModuleType) -> None:
        """What `nanovllm_cli` adds is listed by `nanovllm --help`."""
        hook = getattr(module, "nanovllm_cli", None)
        if hook is None:
            pytest.skip("no nanovllm_cli")
        app = typer.Typer()
        hook(**({"app": app} if "app" in inspect.signature(hook).parameters else {}))
        assert app.registered_commands or app.registered_groups
        for command in app.registered_commands:
            assert command.callback is not None
            assert command.help or inspect.getdoc(command.callback), command.callback.__name__

    def test_it_may_be_closed_without_a_start(self, module: ModuleType) -> None:
        """An engine whose start failed is closed too."""
        closed = getattr(module, "nanovllm_engine_closed", None)
        if closed is None:
            pytest.skip("no nanovllm_engine_closed")
        closed()
