"""Checks of a plugin's declarations, and their error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from types import ModuleType
from typing import Any, get_args, get_type_hints

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from nanovllm_core.errors import PluginLoadError
from nanovllm_core.interfaces.attention import AttentionCapabilities
from nanovllm_core.interfaces.specs import (
    AttentionSpec,
    DeviceSpec,
    KernelSetSpec,
    KindSpec,
    LogitsProcessorSpec,
    PluginSpec,
    ResolvedPlugin,
    SchedulerSpec,
)
from nanovllm_core.registry.discovery import (
    COMMAND_GROUP,
    GROUP_PREFIX,
    SUITE_GROUP,
    UNKNOWN,
    InstalledPlugin,
)
from nanovllm_core.registry.hookspecs import PROJECT
from nanovllm_core.registry.kinds import (
    KIND,
    KIND_CHANGED,
    KIND_CONTRACT,
    KINDS,
    NO_SPEC,
    Kind,
    contract_problem,
)

CORE = "nanovllm-core"
_OBJECT = re.compile(r"[\w.]+:[\w.]+")


def load_error(
    plugin: InstalledPlugin, problem: str, error: BaseException | None = None
) -> PluginLoadError:
    """Name the distribution, the entry point and the original error."""
    original = f": {type(error).__name__}: {error}" if error else ""
    owner = "" if plugin.distribution == UNKNOWN else f" of {plugin.distribution} {plugin.version}"
    return PluginLoadError(
        f"{plugin.kind} {plugin.name!r}{owner} (entry point {plugin.entry_point}): "
        f"{problem}{original}"
    )


def core_requirement(lines: Iterable[str]) -> Requirement | None:
    """The requirement of a distribution on the core, if it has one outside its extras."""
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        if canonicalize_name(requirement.name) == CORE and (
            marker is None or marker.evaluate({"extra": ""})
        ):
            return requirement
    return None


def describe(plugin: ResolvedPlugin) -> str:
    """Kind, name, distribution and version, for messages."""
    return f"{plugin.kind} {plugin.name!r} ({plugin.distribution} {plugin.version})"


def only_spec(plugin: InstalledPlugin, hook: str, wanted: type, specs: Sequence[Any]) -> Any:
    """The spec of this plugin's name among what its hook returned."""
    for strange in (spec for spec in specs if not isinstance(spec, wanted)):
        raise load_error(plugin, f"{hook} returned {strange!r}, not {wanted.__name__} objects")
    matching = [spec for spec in specs if spec.name == plugin.name]
    if len(matching) != 1:
        raise load_error(
            plugin,
            f"{hook} must return one spec named {plugin.name!r}, as the entry point is; "
            f"it returned {[spec.name for spec in specs]} (is the function marked @hookimpl?)",
        )
    return matching[0]


def check_spec(plugin: InstalledPlugin, spec: PluginSpec, kind: Kind, owner: str) -> None:
    """Refuse a spec of another contract, or one that cannot be acted upon."""
    problem = contract_problem(
        kind.name, kind.oldest_contract, kind.contract, kind.changed, spec.contract, owner
    )
    if problem:
        raise load_error(plugin, problem)
    if not _names_object(spec.impl):
        raise load_error(plugin, f"impl {spec.impl!r} is not of the form 'package.module:Object'")
    _check_model(plugin, "options", spec.options)
    if isinstance(spec, LogitsProcessorSpec):
        _check_model(plugin, "arguments", spec.arguments)
    problem = _unusable_field(spec, kind)
    if problem:
        raise load_error(plugin, problem)


def _unusable_field(spec: PluginSpec, kind: Kind) -> str | None:
    """A problem that would stop a listing or a selection; None if there is none."""
    if isinstance(spec, AttentionSpec) and not isinstance(spec.capabilities, AttentionCapabilities):
        return f"capabilities {spec.capabilities!r:.80} are not AttentionCapabilities"
    if isinstance(spec, DeviceSpec) and not isinstance(spec.devices, Set):
        return f"devices {spec.devices!r} is not a set of torch's device types, such as {{'cuda'}}"
    if isinstance(spec, KernelSetSpec):
        return _unusable_kernels(spec)
    if isinstance(spec, SchedulerSpec):
        levels = get_args(get_type_hints(SchedulerSpec)["level"])
        if spec.level not in levels:
            return f"level {spec.level!r} is none of {', '.join(levels)}"
    if kind.name in KINDS and not kind.choice and spec.options.model_fields:
        return f"options {spec.options.__name__} are given by no configuration to a {kind.name}"
    return None


def _unusable_kernels(spec: KernelSetSpec) -> str | None:
    """A field by which `kernels: auto` could not compare this set with others."""
    low = spec.min_compute_capability
    if not isinstance(spec.dtypes, Set):
        return f"dtypes {spec.dtypes!r} is not a set of names, such as {{'bfloat16'}}"
    if low is not None and not (isinstance(low, tuple) and [*map(type, low)] == [int, int]):
        return f"min_compute_capability {low!r} is neither None nor a pair such as (9, 0)"
    if type(spec.rank) is not int:
        return f"rank {spec.rank!r} is not an integer"
    return None


def missing_hook(module: ModuleType, hook: str) -> str | None:
    """Why a kind's module of hook specifications lacks its hook; None where it does not."""
    # pluggy marks what @hookspec decorates with an attribute named after the project.
    if hasattr(getattr(module, hook, None), f"{PROJECT}_spec"):
        return None
    return f"{module.__name__} must declare the hook {hook}, marked @hookspec"


def _names_object(text: object) -> bool:
    return isinstance(text, str) and _OBJECT.fullmatch(text) is not None


def _check_model(plugin: InstalledPlugin, field: str, model: object) -> None:
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise load_error(plugin, f"{field} {model!r} is not a pydantic model class")
    if model.model_config.get("extra") != "forbid":
        raise load_error(
            plugin, f'{model.__name__} must set extra="forbid", or typos would go unnoticed'
        )
    if "<locals>" in model.__qualname__:
        raise load_error(
            plugin,
            f"{model.__qualname__} must be a class of a module, or no other process could read it",
        )


def check_kind_spec(plugin: InstalledPlugin, spec: KindSpec) -> None:
    """Refuse a declaration that no plugin could be found or checked by."""
    problem = contract_problem(
        KIND, KIND_CONTRACT, KIND_CONTRACT, KIND_CHANGED, spec.contract, CORE
    )
    if problem is None and (spec.name in KINDS or spec.name in NO_SPEC):
        problem = f"{spec.name!r} is a kind of {CORE}; declare another name"
    if problem is None and f"{GROUP_PREFIX}{spec.name}s" in (COMMAND_GROUP, SUITE_GROUP):
        problem = f"{spec.name!r} would take over {GROUP_PREFIX}{spec.name}s; declare another name"
    if problem is None and not re.fullmatch(r"[a-z][a-z0-9_]*", spec.name):
        problem = f"{spec.name!r} must be of lower-case letters, digits and underscores"
    if problem is None and not (isinstance(spec.spec, type) and issubclass(spec.spec, PluginSpec)):
        problem = f"spec {spec.spec!r} must be a class derived from PluginSpec"
    current = spec.current_contract
    if problem is None and (type(current) is not int or current < 1):
        problem = f"current_contract {current!r} must be an integer of at least 1"
    oldest = spec.oldest_contract
    if problem is None and (type(oldest) is not int or not 1 <= oldest <= current):
        problem = f"oldest_contract {oldest!r} must be an integer of 1 to current_contract"
    if problem is None and spec.interface and not _names_object(spec.interface):
        problem = f"interface {spec.interface!r} is not of the form 'package.module:Type'"
    if problem is None and not _names_object(spec.conformance):
        problem = f"conformance {spec.conformance!r} is not of the form 'package.module:Class'"
    if problem:
        raise load_error(plugin, problem)
