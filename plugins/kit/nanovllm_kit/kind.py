"""The conformance suite of declarations of new kinds.

class TestMyKind(KindConformance):
    @pytest.fixture
    def kind(self) -> KindUnderTest:
        return kind_under_test(KIND)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import get_args

import pytest

from nanovllm_core.errors import PluginLoadError
from nanovllm_core.interfaces.specs import KindSpec, PluginSpec
from nanovllm_core.registry import (
    KIND_GROUP,
    KINDS,
    declared_hook,
    get_plugin_manager,
    load_object,
    missing_hook,
)
from nanovllm_kit.conformance import Conformance, PluginUnderTest, heavy_imports


@dataclass(frozen=True, slots=True)
class KindUnderTest:
    """A declaration, and the light module whose hook returns it."""

    spec: KindSpec
    module: str


def kind_under_test(spec: KindSpec, module: str | None = None) -> KindUnderTest:
    """The declaration `spec`; `module` is what its entry point names.

    Without it, the module is taken that defines the spec's class or one beside it named `plugin`.
    """
    if module is None:
        package = spec.spec.__module__.rpartition(".")[0]
        module = f"{package}.plugin" if package else spec.spec.__module__
    if spec not in declared_kinds(module):
        raise PluginLoadError(
            f"{module}.nanovllm_kinds() does not return the kind {spec.name!r}; say which module "
            "does: kind_under_test(KIND, 'package.module')"
        )
    return KindUnderTest(spec, module)


def declared_kinds(module: str) -> list[KindSpec]:
    """The kinds that the hook of a light module declares; none where it has no such hook."""
    hook = getattr(import_module(module), "nanovllm_kinds", list)
    return list(hook())


class KindConformance(Conformance):
    """What the core, the listing and `nanovllm plugins test` need of a declaration."""

    @pytest.fixture
    def kind(self, plugin: PluginUnderTest) -> KindUnderTest:
        """The declaration to test; an author overrides this."""
        declared = declared_kinds(plugin.spec_module)
        [spec] = [kind for kind in declared if kind.name == plugin.spec.name]
        return KindUnderTest(spec, plugin.spec_module)

    def test_the_core_takes_the_declaration(self, kind: KindUnderTest) -> None:
        """Under the entry point's name; the new kind is then one like any other."""
        entry = EntryPoint(kind.spec.name, kind.module, KIND_GROUP)
        manager = get_plugin_manager(entry_points=[entry])
        assert kind.spec.name in manager.kinds()
        assert manager.kind(kind.spec.name).spec is kind.spec.spec

    def test_the_name_is_its_own(self, kind: KindUnderTest) -> None:
        """An identifier, and none of the core's kinds."""
        assert kind.spec.name.isidentifier()
        assert kind.spec.name not in KINDS

    def test_plugins_state_frozen_specs(self, kind: KindUnderTest) -> None:
        """`spec` is a frozen dataclass that extends `PluginSpec`."""
        assert issubclass(kind.spec.spec, PluginSpec)
        assert kind.spec.spec is not PluginSpec
        assert dataclasses.is_dataclass(kind.spec.spec)
        with pytest.raises(dataclasses.FrozenInstanceError):
            object.__new__(kind.spec.spec).name = "another"  # type: ignore[misc]

    def test_the_hook_is_specified(self, kind: KindUnderTest) -> None:
        """The module of hook specifications has the one that plugins of the kind implement."""
        problem = missing_hook(import_module(kind.spec.hookspecs), declared_hook(kind.spec.name))
        assert problem is None, problem

    def test_the_declaration_imports_nothing_heavy(self, kind: KindUnderTest) -> None:
        """It is read whenever a plugin of the kind is listed."""
        for module in (kind.module, kind.spec.hookspecs):
            assert heavy_imports(module) == [], module

    def test_its_plugins_have_a_suite(self, kind: KindUnderTest) -> None:
        """`conformance` names a class with checks of its own."""
        suite = load_object(kind.spec.conformance)
        assert issubclass(suite, Conformance)
        assert [name for name in vars(suite) if name.startswith("test_")]

    def test_the_interface_is_a_type(self, kind: KindUnderTest) -> None:
        """`interface`, if it is stated, names the type, or the union, of the kind's objects."""
        if kind.spec.interface:
            found = load_object(kind.spec.interface)
            types = get_args(found) or (found,)
            assert all(isinstance(one, type) for one in types), f"{kind.spec.interface}: {found!r}"

    def test_the_contract_is_a_version(self, kind: KindUnderTest) -> None:
        """A whole number from 1, which grows when the contract's meaning changes."""
        assert isinstance(kind.spec.current_contract, int)
        assert kind.spec.current_contract >= 1
