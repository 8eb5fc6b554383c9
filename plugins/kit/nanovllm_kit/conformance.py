"""The base of the conformance suites: what an author supplies, and what every plugin must hold.

An author's test file, whole:

    import pytest
    from nanovllm_kit import AttentionConformance, PluginUnderTest, plugin_under_test
    from my_plugin.plugin import SPEC

    class TestMyAttention(AttentionConformance):
        @pytest.fixture
        def plugin(self) -> PluginUnderTest:
            return plugin_under_test(SPEC)

A suite is a class whose checks are methods `test_*`; the docstring of each is the sentence that it
holds. A check that asks for what the plugin does not declare is skipped, with the reason.
(The fixture is a plain one: pytest no longer wants those of a wider scope to be methods.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import FunctionType
from typing import Any, ClassVar, Literal, TypeVar

import pytest
from pydantic import BaseModel, ValidationError

from nanovllm_core.config import explain_options
from nanovllm_core.errors import ConfigError, PluginLoadError, did_you_mean
from nanovllm_core.interfaces.specs import NoOptions, PluginSpec
from nanovllm_core.registry import NO_SPEC, PROJECT, load_object, read_options
from nanovllm_kit.enabled import enabled_plugins

Level = Literal["default", "full"]
"""How much of a suite runs. `full` adds the checks that take minutes or many gigabytes."""
LEFT_TO_FULL = "left to the level `full`"
"""How the reason begins for which the default level skips a check."""
Check = TypeVar("Check", bound=Callable[..., None])

HEAVY = ("torch", "triton", "transformers")
"""What a spec's module must not import: it is read to list and to choose, by plugins unused too."""


@dataclass(frozen=True, slots=True)
class PluginUnderTest:
    """One plugin with validated options; `spec_module` is the light module that returns its spec.

    Make it with `plugin_under_test` or `installed_plugin`.
    """

    spec: PluginSpec
    options: BaseModel
    spec_module: str

    def load(self) -> Any:
        """Import what the spec's `impl` names; PluginLoadError if that fails."""
        return load_object(self.spec.impl)


def plugin_under_test(spec: PluginSpec, **options: object) -> PluginUnderTest:
    """The plugin of `spec`, installed or not, with these options; ConfigError for a wrong one.

    The module that returns the spec must have been imported, as `from my_plugin.plugin import SPEC`
    does; PluginLoadError if no hook of any module returns it.
    """
    return PluginUnderTest(spec, _options(spec, options), _module_of(spec))


def installed_plugin(kind: str, name: str, **options: object) -> PluginUnderTest:
    """The installed plugin that a configuration would name so, with these options.

    Plugins that the environment's `plugins.disable` names are left out. Raises what the plugin
    manager raises: PluginNotFoundError, PluginLoadError, ConfigError.
    """
    manager = enabled_plugins()
    module = manager.find(kind, name).entry_point.partition(":")[0]
    if kind in NO_SPEC:
        return without_spec(name, module)
    spec = manager.spec(kind, name)
    return PluginUnderTest(spec, _options(spec, options), module)


def without_spec(name: str, module: str) -> PluginUnderTest:
    """An extension or a declaration of a kind: it is the module that its entry point names."""
    spec = PluginSpec(name=name, impl=f"{module}:__name__", contract=1)
    return PluginUnderTest(spec, NoOptions(), module)


def _options(spec: PluginSpec, options: Mapping[str, object]) -> BaseModel:
    try:
        return read_options(spec.options, options)
    except ValidationError as error:
        raise ConfigError(explain_options(error, spec.options, "options", spec.name)) from None


def _module_of(spec: PluginSpec) -> str:
    """The imported module with a hook implementation that returns `spec`.

    Those of the implementation's package first: all others have ten thousand functions, and every
    check of a suite asks anew.
    """
    package = spec.impl.partition(":")[0].partition(".")[0]
    elsewhere = {name: name.partition(".")[0] != package for name in sys.modules}
    # pluggy marks what @hookimpl decorates with an attribute named after the project.
    mark = f"{PROJECT}_impl"
    for module in [sys.modules[name] for name in sorted(elsewhere, key=elsewhere.__getitem__)]:
        for value in [*getattr(module, "__dict__", {}).values()]:
            if type(value) is not FunctionType or mark not in value.__dict__:
                continue
            if value.__module__ == module.__name__ and spec.name in _names(value, type(spec)):
                return module.__name__
    raise PluginLoadError(
        f"no imported module has a function marked @hookimpl that returns the spec of "
        f"{spec.name!r}; import the module that the plugin's entry point names"
    )


def _names(hook: FunctionType, kind: type[PluginSpec]) -> list[str]:
    """The plugins of a kind that a hook declares; none for a hook with arguments."""
    if hook.__code__.co_argcount:
        return []
    return [spec.name for spec in hook() or () if isinstance(spec, kind)]


def full_level(why: str) -> Callable[[Check], Check]:
    """Leave a check to the level `full`; `why` says what it takes ("9 GiB of memory")."""

    def mark(check: Check) -> Check:
        # An attribute and no mark: an author's pytest may refuse marks that it does not know.
        check.left_to_full = why  # type: ignore[attr-defined]
        return check

    return mark


class Conformance:
    """What every suite has: the fixture `plugin`, a seed, a level, and strict expected failures."""

    seed: ClassVar[int] = 0
    """Decides every random draw of the suite; the same seed draws the same cases."""
    level: ClassVar[Level] = "default"
    """An author's class that states `level = "full"` runs the checks of `full_level` too."""
    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Check -> why it fails for now. One that passes after all fails, and so does a wrong name.

    `test_name` for all its parameters, `test_name[id]`, as pytest prints it, for one set of them.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        checks = [name for name in dir(cls) if name.startswith("test_")]
        for name, reason in cls.expected_failures.items():
            check = name.partition("[")[0]
            if check not in checks:
                raise TypeError(
                    f"{cls.__name__}.expected_failures: the suite has no check {check!r}"
                    f"{did_you_mean(check, checks)}"
                )
            if not reason.strip():
                raise TypeError(f"{cls.__name__}.expected_failures: {name} needs a reason")

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        """The plugin to test; every suite's user overrides this."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture: @pytest.fixture def "
            "plugin(self): return plugin_under_test(SPEC)"
        )

    @pytest.fixture
    def draws(self, request: pytest.FixtureRequest) -> Random:
        """Random numbers for one check, whichever others run; its failure reports the seed."""
        request.node.add_report_section("setup", "draws", f"seed {self.seed}")
        return Random(f"{self.seed} {request.node.name}")

    @pytest.fixture(autouse=True)
    def _leave_to_full_level(self, request: pytest.FixtureRequest) -> None:
        why = getattr(request.function, "left_to_full", None)
        if why is not None and self.level != "full":
            pytest.skip(f"{LEFT_TO_FULL}: {why}")

    @pytest.fixture(autouse=True)
    def _expect_failure(self, request: pytest.FixtureRequest) -> None:
        """Mark a check that is expected to fail; strict, so that a mended one is noticed."""
        node = request.node
        for name in {node.name, getattr(node, "originalname", node.name)}:
            if name in self.expected_failures:
                reason = self.expected_failures[name]
                node.add_marker(pytest.mark.xfail(reason=reason, strict=True))


class SpecConformance(Conformance):
    """What holds for every plugin that is declared by a spec; the suites of those kinds inherit."""

    def test_the_options_model_forbids_unknown_keys(self, plugin: PluginUnderTest) -> None:
        """A misspelt option is an error, never ignored."""
        if plugin.spec.options.model_config.get("extra") != "forbid":
            raise AssertionError(f'{plugin.spec.options.__name__} must set extra="forbid"')

    def test_the_implementation_can_be_imported(self, plugin: PluginUnderTest) -> None:
        """`impl` names an object that exists, importable once the plugin is chosen."""
        plugin.load()

    def test_reading_the_spec_imports_nothing_heavy(self, plugin: PluginUnderTest) -> None:
        """A fresh interpreter that imports the spec's module has no torch, triton, transformers."""
        if heavy := heavy_imports(plugin.spec_module):
            raise AssertionError(
                f"importing {plugin.spec_module} imports {', '.join(heavy)}; name the code in "
                "impl='package.module:Object' and import it there"
            )


def heavy_imports(module: str) -> list[str]:
    """The heavy packages that a fresh interpreter has once it has imported a module."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    path = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise AssertionError(f"importing {module} failed:\n{result.stderr}")
    return result.stdout.split()
