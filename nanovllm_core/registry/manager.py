"""Load what is chosen among the installed plugins, check it, explain what is wrong.

    manager = get_plugin_manager(disable=config.plugins.disable)
    manager.installed()                                     # nothing is imported
    resolved = manager.resolve("scheduler", "sjf", {...})   # imports that plugin's light module
    policy = manager.make(resolved)                         # imports its code, and calls it

Each kind of plugin (`kinds`) has an entry-point group; the entry point's name is the name in YAML,
its target a light module of hook implementations that return specs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, cast

import pluggy
from pydantic import ValidationError

from nanovllm_core.config.choices import NamedPlugin
from nanovllm_core.config.errors import explain_options
from nanovllm_core.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
    did_you_mean,
    nearest,
    shown,
)
from nanovllm_core.interfaces.specs import KindSpec, PluginSpec, ResolvedPlugin
from nanovllm_core.registry import hookspecs
from nanovllm_core.registry.checks import (
    CORE,
    check_spec,
    code_error,
    import_error,
    load_error,
    missing_hook,
    only_spec,
    separate,
)
from nanovllm_core.registry.discovery import (
    InstalledPlugin,
    find_plugins,
    install_command,
    misplaced,
    select_disabled,
)
from nanovllm_core.registry.kinds import (
    DECLARATION,
    EXTENSION,
    KIND,
    KINDS,
    NO_SPEC,
    Kind,
    declared_hook,
)
from nanovllm_core.registry.objects import load_object, make_plugin
from nanovllm_core.registry.options import read_options

HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("nanovllm_"))
"""The hooks of the core."""


class PluginManager:
    """The plugins of this environment that are installed now, less those that `disable` names.

    `disable` holds names (`flash`), kinds and names (`attention:flash`) or distributions; one that
    fits nothing raises PluginNotFoundError. `entry_points` stands in for the installed ones.
    """

    def __init__(
        self, disable: Iterable[str] = (), entry_points: Iterable[EntryPoint] | None = None
    ) -> None:
        # Asked once: every time reads the metadata of all that is installed. Python 3.11 answers
        # with a dict, which has `select` too.
        given = metadata.entry_points() if entry_points is None else EntryPoints(entry_points)
        self._found = cast(EntryPoints, given)
        installed = find_plugins(self._found)
        self._disabled = select_disabled(installed, disable)
        self._entries = {
            plugin: entry for plugin, entry in installed.items() if plugin not in self._disabled
        }
        self._declared_kinds: dict[str, Kind] = {}
        """The kinds that plugins declare, as far as they were needed so far."""
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
                f"{kind} {shown(name)} is registered by {owners}; "
                f"{separate([p.distribution for p in found])}"
            )
        return found[0]

    def _not_found(self, kind: str, name: str) -> str:
        for plugin in self.disabled():
            if (plugin.kind, plugin.name) == (kind, name):
                return (
                    f"{kind} {name!r} ({plugin.distribution} {plugin.version}) is disabled; take "
                    "it out of plugins.disable"
                )
        if elsewhere := self.misplaced(name):
            return f"no {kind} {shown(name)} is installed{elsewhere}"
        names = self.names(kind)
        known = KINDS[kind].extras if kind in KINDS else {}
        # An architecture is read from a checkpoint, not typed: another one is no help.
        like = None if kind == "model" else nearest(name, [*names, *known])
        match = name if name in known else like
        hint = f"; did you mean {match}?" if match and match != name else ""
        if match and match not in names:
            hint += f"; {install_command(kind, match)}"
        return (
            f"no {kind} {shown(name)} is installed{hint}; installed: {', '.join(names) or 'none'}"
        )

    def misplaced(self, name: str) -> str:
        """The group of no kind that holds an entry point of that name; empty if none does."""
        return misplaced(name, self._found)

    # ---------------------------------------------------------------------------------- kinds

    def kinds(self) -> list[str]:
        """The names of all kinds, declared ones too, from metadata alone."""
        return sorted({*KINDS, *NO_SPEC, *self.names(KIND)})

    def kind(self, name: str) -> Kind:
        """The kind of that name, of the core or declared by a plugin, whose module is imported.

        Raises PluginNotFoundError where nothing declares it, and for `extension` and `kind`, whose
        plugins have no spec; PluginLoadError where the declaration cannot be used.
        """
        if name in KINDS:
            return KINDS[name]
        if name in NO_SPEC:
            raise PluginNotFoundError(f"plugins of the kind {shown(name)} have no spec to load")
        if name not in self._declared_kinds:
            spec = self.declaration(name)
            # Its own plugins may stand in the same module, so that loading it came by here.
            if name not in self._declared_kinds:
                self._add_hookspecs(self.find(KIND, name), spec)
                self._declared_kinds[name] = Kind(
                    spec.name,
                    spec.spec,
                    spec.interface,
                    contract=spec.current_contract,
                    oldest_contract=spec.oldest_contract,
                    changed=spec.changed,
                    conformance=spec.conformance,
                )
        return self._declared_kinds[name]

    def declaration(self, name: str) -> KindSpec:
        """The declaration of a kind by its plugin. Raises PluginLoadError if it is not valid."""
        plugin = self.find(KIND, name)
        spec: KindSpec = self._only_spec(plugin, DECLARATION)
        check_spec(plugin, spec, DECLARATION, CORE)
        return spec

    def _add_hookspecs(self, plugin: InstalledPlugin, spec: KindSpec) -> None:
        try:
            module = importlib.import_module(spec.hookspecs)
            problem = missing_hook(module, declared_hook(spec.name))
            for ours in (name for name in HOOKS if hasattr(module, name)):
                problem = f"{spec.hookspecs} declares {ours}, a hook of {CORE}"
            if not problem:
                self._pluggy.add_hookspecs(module)
        except Exception as error:
            raise load_error(plugin, f"hookspecs {spec.hookspecs!r} fail", error) from error
        if problem:
            raise load_error(plugin, problem)

    # -------------------------------------------------------------------------------- loading

    def spec(self, kind: str, name: str) -> PluginSpec:
        """Import one plugin's light module and return its spec, of the kind's type.

        Raises PluginLoadError, with distribution, entry point and the original error, where the
        module does not import or does not keep the contract.
        """
        its_kind, plugin = self.kind(kind), self.find(kind, name)
        spec: PluginSpec = self._only_spec(plugin, its_kind)
        owner = CORE if kind in KINDS else self.find(KIND, kind).distribution
        check_spec(plugin, spec, its_kind, owner)
        return spec

    def _only_spec(self, plugin: InstalledPlugin, kind: Kind) -> Any:
        """The spec of this plugin's name, among those that its module alone returns."""
        module = self._load(plugin)
        others = [other for other in self._pluggy.get_plugins() if other is not module]
        try:
            answers = self._pluggy.subset_hook_caller(kind.hook, others)()
            specs = [spec for answer in answers for spec in answer]
        except Exception as error:
            raise code_error(plugin, f"its hook {kind.hook} gave no list", error) from error
        return only_spec(plugin, kind, specs)

    def enable(self, names: Iterable[str]) -> None:
        """Load extensions, so that their hooks are called from now on."""
        for name in names:
            self._load(self.find(EXTENSION, name))

    def _load(self, plugin: InstalledPlugin) -> Any:
        """Import an entry point's module and register it, once."""
        try:
            module = self._entries[plugin].load()
        except (Exception, SystemExit) as error:
            raise import_error(plugin, self._entries[plugin], error) from error
        if self._pluggy.is_registered(module):
            return module
        try:
            self._pluggy.register(module)
            self._load_kinds_of(module)
            self._check_hooks(module)
        except (PluginLoadError, pluggy.PluginValidationError) as error:
            if self._pluggy.is_registered(module):
                self._pluggy.unregister(module)
            if isinstance(error, PluginLoadError):
                raise
            raise load_error(plugin, "it does not fit the hooks", error) from error
        return module

    def _load_kinds_of(self, module: Any) -> None:
        """A module may answer the hooks of declared kinds too, among them those it declares."""
        implemented = {caller.name for caller in self._pluggy.get_hookcallers(module) or ()}
        for name in self.names(KIND):
            if declared_hook(name) in implemented.difference(HOOKS):
                self.kind(name)

    def _check_hooks(self, module: Any) -> None:
        """PluginValidationError for a hook that nothing calls; pluggy's own check is of all."""
        for caller in self._pluggy.get_hookcallers(module) or ():
            mine = [one for one in caller.get_hookimpls() if one.plugin is module]
            if not caller.has_spec() and not all(one.optionalhook for one in mine):
                # Those of the core, of the kinds loaded so far, and of each other kind.
                known = {name for name, one in vars(self.hook).items() if one.has_spec()}
                known |= {declared_hook(name) for name in self.names(KIND)}
                hint = did_you_mean(caller.name, known, "nanovllm_")
                raise pluggy.PluginValidationError(module, f"unknown hook {caller.name!r}{hint}")

    load = staticmethod(load_object)
    make = staticmethod(make_plugin)

    def resolve(
        self, kind: str, name: str, options: Mapping[str, Any] | None = None, path: str = ""
    ) -> ResolvedPlugin:
        """Load the spec and check the options, and those of the plugins that options name.

        `path` is where the options stand in the configuration; ConfigError names it. A field of
        options that holds a `NamedPlugin` and is called like a declared kind names such a plugin.
        """
        spec = self.spec(kind, name)
        plugin = self.find(kind, name)
        where = path or f"{kind}.options"
        try:
            parsed = read_options(spec.options, options or {})
        except ValidationError as error:
            raise ConfigError(explain_options(error, spec.options, where, str(plugin))) from None
        for other in self.names(KIND):
            if isinstance(named := getattr(parsed, other, None), NamedPlugin):
                self.resolve(other, named.name, named.options, f"{where}.{other}.options")
        return ResolvedPlugin(
            kind=kind,
            name=name,
            distribution=plugin.distribution,
            version=plugin.version,
            impl=spec.impl,
            interface=self.kind(kind).interface,
            options=parsed,
        )


get_plugin_manager = PluginManager
"""The manager of what is installed now."""
