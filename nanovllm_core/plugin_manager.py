"""Discover plugins by metadata, load only what is chosen, check it, explain what is wrong.

    manager = get_plugin_manager(disable=config.plugins.disable)
    manager.installed()                                     # nothing is imported
    resolved = manager.resolve("scheduler", "sjf", {...})   # imports that plugin's light module
    policy = load_object(resolved)(manager.parse_options(resolved))   # imports its code

Each kind of plugin has an entry-point group; the entry point's name is the name in YAML, its target
a light module of hook implementations that return specs.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

import pluggy
from pydantic import BaseModel, ValidationError

from nanovllm_core import hookspecs
from nanovllm_core.config_errors import did_you_mean, explain_options, nearest
from nanovllm_core.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
)
from nanovllm_core.interfaces.specs import (
    CONTRACT_VERSION,
    AttentionSpec,
    CheckpointSpec,
    ExecutorSpec,
    ModelSpec,
    PluginSpec,
    ResolvedPlugin,
    SchedulerSpec,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin: its entry-point group, the hook that declares it, the spec it returns."""

    group: str
    hook: str
    spec: type[PluginSpec]


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "attention": Kind("nanovllm.attention", "nanovllm_attention", AttentionSpec),
        "scheduler": Kind("nanovllm.schedulers", "nanovllm_schedulers", SchedulerSpec),
        "model": Kind("nanovllm.models", "nanovllm_models", ModelSpec),
        "checkpoint": Kind("nanovllm.checkpoints", "nanovllm_checkpoints", CheckpointSpec),
        "executor": Kind("nanovllm.executors", "nanovllm_executors", ExecutorSpec),
    }
)

EXTENSION = "extension"
EXTENSION_GROUP = "nanovllm.extensions"
"""Plugins of lifecycle and command-line hooks; loaded only when `plugins.enable` names them."""

KNOWN_EXTRAS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("attention", "sdpa"): "sdpa",
        ("attention", "triton"): "triton",
        ("attention", "flash"): "flash",
        ("scheduler", "sjf"): "sjf",
        ("model", "Qwen3ForCausalLM"): "qwen3",
        ("checkpoint", "demo"): "demo",
    }
)
"""Which extra of nanovllm-core installs a plugin of this project."""


@dataclass(frozen=True, slots=True, order=True)
class InstalledPlugin:
    """What the metadata of an installed distribution says of one plugin."""

    kind: str
    name: str
    distribution: str
    version: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}, {self.distribution}"


def get_plugin_manager(
    disable: Iterable[str] = (), entry_points: Iterable[EntryPoint] | None = None
) -> PluginManager:
    """A manager of what is installed now, less what `disable` names.

    `disable` holds names (`flash`), kinds and names (`attention:flash`) or distributions; one that
    fits nothing raises PluginNotFoundError. `entry_points` stands in for the installed ones.
    """
    return PluginManager(_discover() if entry_points is None else entry_points, disable)


def load_object(target: str | ResolvedPlugin) -> Any:
    """Import `"package.module:Object"`, or a resolved plugin's; PluginLoadError if that fails."""
    impl = target if isinstance(target, str) else target.impl
    owner = "" if isinstance(target, str) else f" of {_describe(target)}"
    module, _, name = impl.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise PluginLoadError(
            f"cannot load {impl!r}{owner}: {type(error).__name__}: {error}"
        ) from error
    return found


def parse_options(resolved: ResolvedPlugin, manager: PluginManager | None = None) -> BaseModel:
    """The options of a resolved plugin as its own model, in a worker that has only the plan.

    Raises PluginLoadError where another version than the resolved one is installed.
    """
    return (manager or get_plugin_manager()).parse_options(resolved)


class PluginManager:
    """The plugins of this environment. Make one with `get_plugin_manager`."""

    def __init__(self, found: Iterable[EntryPoint], disable: Iterable[str] = ()) -> None:
        kinds = {kind.group: name for name, kind in KINDS.items()} | {EXTENSION_GROUP: EXTENSION}
        installed = {
            _installed(kinds[entry.group], entry): entry for entry in found if entry.group in kinds
        }
        self._disabled = _select(installed, disable)
        self._entries = {
            plugin: entry for plugin, entry in installed.items() if plugin not in self._disabled
        }
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)

    @property
    def hook(self) -> pluggy.HookRelay:
        """The hooks of every plugin loaded so far: `manager.hook.nanovllm_engine_closed()`."""
        return self._pluggy.hook

    # -------------------------------------------------------------------- metadata, no imports

    def installed(self) -> list[InstalledPlugin]:
        """Every plugin that may be selected, by kind and name, from metadata alone."""
        return sorted(self._entries)

    def disabled(self) -> list[InstalledPlugin]:
        """The installed plugins that the configuration switched off."""
        return sorted(self._disabled)

    def names(self, kind: str) -> list[str]:
        """The names of one kind that may be selected."""
        return sorted({plugin.name for plugin in self._entries if plugin.kind == kind})

    def find(self, kind: str, name: str) -> InstalledPlugin:
        """The one plugin of that kind and name.

        Raises PluginNotFoundError or PluginConflictError, which say what to do.
        """
        found = [p for p in self.installed() if (p.kind, p.name) == (kind, name)]
        if not found:
            raise PluginNotFoundError(self._not_found(kind, name))
        if len(found) > 1:
            owners = " and ".join(f"{p.distribution} {p.version}" for p in found)
            raise PluginConflictError(
                f"{kind} {name!r} is registered by {owners}; uninstall one of them, or leave one "
                f"out with plugins: {{disable: [{found[-1].distribution}]}}"
            )
        return found[0]

    def _not_found(self, kind: str, name: str) -> str:
        for plugin in self.disabled():
            if (plugin.kind, plugin.name) == (kind, name):
                return (
                    f"{kind} {name!r} ({plugin.distribution} {plugin.version}) is disabled; take "
                    "it out of plugins.disable"
                )
        names = self.names(kind)
        known = [name_ for kind_, name_ in KNOWN_EXTRAS if kind_ == kind]
        # An architecture is read from a checkpoint, not typed: another one is no help.
        like = None if kind == "model" else nearest(name, [*names, *known])
        match = name if name in known else like
        hint = f"; did you mean {match}?" if match and match != name else ""
        if match and match not in names:
            hint += f'; pip install "nanovllm-core[{KNOWN_EXTRAS[kind, match]}]"'
        return f"no {kind} {name!r} is installed{hint}; installed: {', '.join(names) or 'none'}"

    # ------------------------------------------------------------------------------- loading

    def spec(self, kind: str, name: str) -> PluginSpec:
        """Import one plugin's light module and return its spec, of the kind's type.

        Raises PluginLoadError, with distribution, entry point and the original error, where the
        module does not import or does not keep the contract.
        """
        return self._spec(self.find(kind, name))

    def _spec(self, plugin: InstalledPlugin) -> PluginSpec:
        wanted = KINDS[plugin.kind]
        specs = self._declared(plugin, wanted.hook)
        for strange in (spec for spec in specs if not isinstance(spec, wanted.spec)):
            problem = f"{wanted.hook} returned {strange!r}, not {wanted.spec.__name__} objects"
            raise _load_error(plugin, problem)
        matching = [spec for spec in specs if spec.name == plugin.name]
        if len(matching) != 1:
            raise _load_error(
                plugin,
                f"{wanted.hook} must return one spec named {plugin.name!r}, as the entry point is; "
                f"it returned {[spec.name for spec in specs]} (is the function marked @hookimpl?)",
            )
        spec: PluginSpec = matching[0]
        _check_spec(plugin, spec)
        return spec

    def _declared(self, plugin: InstalledPlugin, hook: str) -> list[Any]:
        """What this plugin alone answers to the hook of its kind."""
        module = self._load(plugin)
        others = [other for other in self._pluggy.get_plugins() if other is not module]
        try:
            answers = self._pluggy.subset_hook_caller(hook, others)()
            return [spec for answer in answers for spec in answer]
        except Exception as error:
            raise _load_error(plugin, f"its hook {hook} failed", error) from error

    def enable(self, names: Iterable[str]) -> None:
        """Load extensions, so that their hooks are called from now on."""
        for name in names:
            self._load(self.find(EXTENSION, name))

    def _load(self, plugin: InstalledPlugin) -> Any:
        """Import an entry point's module and register it, once."""
        try:
            module = self._entries[plugin].load()
        except Exception as error:
            raise _load_error(plugin, "it cannot be imported", error) from error
        if self._pluggy.is_registered(module):
            return module
        try:
            self._pluggy.register(module)
            self._pluggy.check_pending()
        except pluggy.PluginValidationError as error:
            if self._pluggy.is_registered(module):
                self._pluggy.unregister(module)
            raise _load_error(plugin, "it does not fit the hooks", error) from error
        return module

    def resolve(
        self, kind: str, name: str, options: Mapping[str, Any] | None = None, path: str = ""
    ) -> ResolvedPlugin:
        """Load the spec and check the options.

        `path` is where the options stand in the configuration; ConfigError names it.
        """
        spec = self.spec(kind, name)
        plugin = self.find(kind, name)
        try:
            parsed = spec.options.model_validate(dict(options or {}))
        except ValidationError as error:
            where = path or f"{kind}.options"
            raise ConfigError(explain_options(error, spec.options, where, str(plugin))) from None
        return ResolvedPlugin(
            kind=kind,
            name=name,
            distribution=plugin.distribution,
            version=plugin.version,
            impl=spec.impl,
            options=parsed.model_dump(),
        )

    def parse_options(self, resolved: ResolvedPlugin) -> BaseModel:
        """The options of a resolved plugin as an instance of its options model."""
        here = [
            plugin
            for plugin in self._entries
            if (plugin.kind, plugin.name, plugin.distribution)
            == (resolved.kind, resolved.name, resolved.distribution)
        ]
        if [plugin.version for plugin in here] != [resolved.version]:
            raise PluginLoadError(
                f"the engine chose {_describe(resolved)}, but installed here: "
                f"{', '.join(plugin.version for plugin in here) or 'none'}; install the same "
                "version on every machine"
            )
        return self._spec(here[0]).options.model_validate(dict(resolved.options))


def _discover() -> list[EntryPoint]:
    groups = [*(kind.group for kind in KINDS.values()), EXTENSION_GROUP]
    return [entry for group in groups for entry in entry_points(group=group)]


def _installed(kind: str, entry: EntryPoint) -> InstalledPlugin:
    distribution, version = (entry.dist.name, entry.dist.version) if entry.dist else ("?", "?")
    return InstalledPlugin(kind, entry.name, distribution, version, entry.value)


def _select(plugins: Iterable[InstalledPlugin], wanted: Iterable[str]) -> set[InstalledPlugin]:
    """The plugins that `plugins.disable` names."""
    labels = [(p, (p.name, f"{p.kind}:{p.name}", p.distribution)) for p in plugins]
    selected: set[InstalledPlugin] = set()
    for name in wanted:
        matching = {plugin for plugin, known in labels if name in known}
        if not matching:
            hint = did_you_mean(name, {label for _, known in labels for label in known})
            raise PluginNotFoundError(f"plugins.disable: no installed plugin is {name!r}{hint}")
        selected |= matching
    return selected


def _check_spec(plugin: InstalledPlugin, spec: PluginSpec) -> None:
    """Refuse a spec of another contract, or one that cannot be acted upon."""
    if spec.contract != CONTRACT_VERSION:
        raise _load_error(
            plugin,
            f"it was written for contract {spec.contract}, and this nanovllm-core has contract "
            f"{CONTRACT_VERSION}; install versions that fit",
        )
    if not re.fullmatch(r"[\w.]+:[\w.]+", spec.impl):
        raise _load_error(plugin, f"impl {spec.impl!r} is not of the form 'package.module:Object'")
    if not (isinstance(spec.options, type) and issubclass(spec.options, BaseModel)):
        raise _load_error(plugin, f"options {spec.options!r} is not a pydantic model class")
    if spec.options.model_config.get("extra") != "forbid":
        raise _load_error(
            plugin, f'{spec.options.__name__} must set extra="forbid", or typos would go unnoticed'
        )


def _describe(plugin: ResolvedPlugin) -> str:
    return f"{plugin.kind} {plugin.name!r} ({plugin.distribution} {plugin.version})"


def _load_error(
    plugin: InstalledPlugin, problem: str, error: Exception | None = None
) -> PluginLoadError:
    """Name the distribution, the entry point and the original error."""
    original = f": {type(error).__name__}: {error}" if error else ""
    return PluginLoadError(
        f"{plugin.kind} {plugin.name!r} of {plugin.distribution} {plugin.version} (entry point "
        f"{plugin.entry_point}): {problem}{original}"
    )
