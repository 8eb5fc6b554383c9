"""Checks of a plugin's declarations, and their error messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from importlib.metadata import EntryPoint, PackageNotFoundError, requires
from types import ModuleType
from typing import Any, get_args, get_type_hints

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from nanovllm_core.errors import PluginLoadError, describe_error, place_of
from nanovllm_core.interfaces.attention import AttentionCapabilities, GraphSupport
from nanovllm_core.interfaces.constraint import ConstraintSpec
from nanovllm_core.interfaces.specs import (
    AttentionSpec,
    DeviceSpec,
    KernelSetSpec,
    KindSpec,
    LogitsProcessorSpec,
    PluginSpec,
    SchedulerSpec,
)
from nanovllm_core.registry.discovery import (
    COMMAND_GROUP,
    SUITE_GROUP,
    UNKNOWN,
    InstalledPlugin,
    known_groups,
)
from nanovllm_core.registry.hookspecs import PROJECT
from nanovllm_core.registry.kinds import KINDS, Kind, contract_problem, declared_group

CORE = "nanovllm-core"
_LACKING = re.compile(r"(\w+)\.__init__\(\) missing \d+ required [\w-]+ arguments?: (.+)")
"""Python's words where a class is made without an argument that it needs."""


def load_error(
    plugin: InstalledPlugin, problem: str, error: BaseException | None = None
) -> PluginLoadError:
    """Name the distribution, the entry point and the original error."""
    original = f": {describe_error(error)}" if error else ""
    owner = "" if plugin.distribution == UNKNOWN else f" of {plugin.distribution} {plugin.version}"
    return PluginLoadError(
        f"{plugin.kind} {plugin.name!r}{owner} (entry point {plugin.entry_point}): "
        f"{problem}{original}"
    )


def import_error(
    plugin: InstalledPlugin, entry: EntryPoint, error: BaseException
) -> PluginLoadError:
    """Why an entry point's module did not import; where there is none, the entry point is wrong."""
    if isinstance(error, ModuleNotFoundError) and f"{entry.module}.".startswith(f"{error.name}."):
        line = f'{entry.name} = "{entry.value}" in {entry.group}'
        return load_error(plugin, f"{error}; correct {line} and install it again")
    return code_error(plugin, "it cannot be imported", error)


def code_error(plugin: InstalledPlugin, problem: str, error: BaseException) -> PluginLoadError:
    """What a plugin's code raised; a declaration without a required argument is named as that."""
    lacking = _LACKING.fullmatch(str(error)) if isinstance(error, TypeError) else None
    if not lacking:
        return load_error(plugin, problem, error)
    name, arguments = lacking.groups()
    current = [kind.contract for kind in KINDS.values() if kind.spec.__name__ == name]
    remedy = f"; add contract={current[0]}" if current and "'contract'" in arguments else ""
    return load_error(plugin, f"its {name} lacks {arguments}{place_of(error)}{remedy}")


def separate(distributions: Sequence[str]) -> str:
    """The remedy where several distributions claim a name. The core itself has to stay."""
    others = [one for one in distributions if one != CORE]
    first, it = f"uninstall {others[0]}", "it"
    if len(others) > 1:
        first, it = f"uninstall one of {', '.join(others)}", "one"
    left_out = f"[{others[-1]}]"
    return (
        f"{first}, or leave {it} out with plugins: {{disable: {left_out}}} "
        f"(for a command: NANOVLLM_PLUGINS__DISABLE='{left_out}')"
    )


def core_requirement(lines: Iterable[str]) -> Requirement | None:
    """The requirement of a distribution on the core, if it has one outside its extras."""
    for line in lines:
        with suppress(InvalidRequirement):
            found = Requirement(line)
            if canonicalize_name(found.name) == CORE and (
                found.marker is None or found.marker.evaluate({"extra": ""})
            ):
                return found
    return None


def only_spec(plugin: InstalledPlugin, kind: Kind, specs: Sequence[Any]) -> Any:
    """The spec of this plugin's name among what the hook of its kind returned."""
    for strange in (spec for spec in specs if not isinstance(spec, kind.spec)):
        raise load_error(
            plugin, f"{kind.hook} returned {strange!r}, not {kind.spec.__name__} objects"
        )
    matching = [spec for spec in specs if spec.name == plugin.name]
    if len(matching) != 1:
        hint = "" if matching else "; rename the spec or the entry point"
        raise load_error(
            plugin,
            f"{kind.hook} must return one spec named {plugin.name!r}, as the entry point is; "
            f"it returned {[spec.name for spec in specs]}"
            f"{hint if specs else ' (is the function marked @hookimpl?)'}",
        )
    return matching[0]


def check_spec(
    plugin: InstalledPlugin, spec: PluginSpec | KindSpec, kind: Kind, owner: str
) -> None:
    """Refuse a spec or a declaration of another contract, or one that cannot be acted upon."""
    problem = contract_problem(kind, spec.contract, owner)
    if problem := problem or next(_problems(spec, kind), None):
        raise load_error(plugin, problem)


def _set_of(kind: type) -> Callable[[object], bool]:
    return lambda found: isinstance(found, Set) and all(isinstance(one, kind) for one in found)


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[object], bool]:
    return lambda found: found is None or is_right(found)


def _is_pair(found: object) -> bool:
    return isinstance(found, tuple) and [*map(type, found)] == [int, int]


_NAMES = _set_of(str)
_DEVICES = "not a set of torch's device types, such as {'cuda'}"
_DTYPES = "not a set of names, such as {'bfloat16'}"
_SIZES = "neither None nor a set of whole numbers, such as {64, 128}"
_PAIR = "neither None nor a pair such as (9, 0)"
_BOUNDS = "min_compute_capability", "max_compute_capability"
_FIELDS: tuple[tuple[type, tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (AttentionCapabilities, ("devices",), _NAMES, _DEVICES),
    (AttentionCapabilities, ("dtypes",), _NAMES, _DTYPES),
    (AttentionCapabilities, ("phases",), _NAMES, "not a set of phases, such as {'decode'}"),
    (AttentionCapabilities, ("head_sizes",), _or_none(_set_of(int)), _SIZES),
    (AttentionCapabilities, _BOUNDS, _or_none(_is_pair), _PAIR),
    (AttentionSpec, ("kv_layouts", "check", "rank"), callable, "not a function"),
    (AttentionSpec, ("provider",), _or_none(callable), "neither None nor a function"),
    (DeviceSpec, ("devices",), _NAMES, _DEVICES),
    (KernelSetSpec, ("dtypes",), _NAMES, _DTYPES),
    (KernelSetSpec, _BOUNDS[:1], _or_none(_is_pair), _PAIR),
    (KernelSetSpec, ("rank",), lambda it: type(it) is int, "not an integer"),
)
"""Fields that a listing or a selection reads, what each must be, and what a wrong one is not."""


def _problems(spec: PluginSpec | KindSpec, kind: Kind) -> Iterator[str]:
    """The reasons why a listing, a selection or a worker could not act upon the spec."""
    if isinstance(spec, KindSpec):
        yield from _declaration_problems(spec)
        return
    yield from _form_problems("impl", spec.impl)
    yield from _model_problems("options", spec.options)
    if isinstance(spec, LogitsProcessorSpec | ConstraintSpec):
        yield from _model_problems("arguments", spec.arguments)
    if isinstance(spec, KernelSetSpec) and spec.wake:
        yield from _form_problems("wake", spec.wake)
    if isinstance(spec, AttentionSpec):
        able: object = spec.capabilities
        if not isinstance(able, AttentionCapabilities):
            yield f"capabilities {able!r:.80} is not AttentionCapabilities"
        else:
            yield from _choice_problems("capabilities.cuda_graphs", able.cuda_graphs, GraphSupport)
            yield from _field_problems(able, "capabilities.")
    yield from _field_problems(spec)
    if isinstance(spec, SchedulerSpec):
        yield from _choice_problems("level", spec.level, get_type_hints(SchedulerSpec)["level"])
    if kind.name in KINDS and not kind.choice and spec.options.model_fields:
        yield f"options {spec.options.__name__} are given by no configuration to a {kind.name}"


def _field_problems(owner: object, path: str = "") -> Iterator[str]:
    for kind, names, is_right, wrong in _FIELDS:
        for field in names if isinstance(owner, kind) else ():
            if not is_right(found := getattr(owner, field)):
                yield f"{path}{field} {found!r:.80} is {wrong}"


def _choice_problems(field: str, found: object, literal: Any) -> Iterator[str]:
    if found not in (choices := get_args(literal)):
        yield f"{field} {found!r} is none of {', '.join(choices)}"


def _model_problems(field: str, model: object) -> Iterator[str]:
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        yield f"{field} {model!r} is not a pydantic model class"
    elif model.model_config.get("extra") != "forbid":
        yield f'{model.__name__} must set extra="forbid", or typos would go unnoticed'
    elif "<locals>" in model.__qualname__:
        yield f"{model.__qualname__} must be a class of a module, or no other process could read it"


def _declaration_problems(spec: KindSpec) -> Iterator[str]:
    """The reasons why no plugin of the declared kind could be found or checked."""
    taken = {*known_groups(), COMMAND_GROUP, SUITE_GROUP}
    if spec.name in KINDS or declared_group(spec.name) in taken:
        yield f"{spec.name!r} is a kind or a group of {CORE}; declare another name"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", spec.name):
        yield f"{spec.name!r} must be of lower-case letters, digits and underscores"
    if not (isinstance(spec.spec, type) and issubclass(spec.spec, PluginSpec)):
        yield f"spec {spec.spec!r} must be a class derived from PluginSpec"
    oldest, current = spec.oldest_contract, spec.current_contract
    if not (type(oldest) is type(current) is int and 1 <= oldest <= current):
        yield (
            f"oldest_contract {oldest!r} and current_contract {current!r} must be integers with "
            "1 <= oldest_contract <= current_contract"
        )
    if spec.interface:
        yield from _form_problems("interface", spec.interface)
    yield from _form_problems("conformance", spec.conformance)


def _form_problems(field: str, target: object) -> Iterator[str]:
    if not (isinstance(target, str) and re.fullmatch(r"[\w.]+:[\w.]+", target)):
        yield f"{field} {target!r} is not of the form 'package.module:Object'"


def missing_hook(module: ModuleType, hook: str) -> str | None:
    """Why a kind's module of hook specifications lacks its hook; None where it does not."""
    # pluggy marks what @hookspec decorates with an attribute named after the project.
    if hasattr(getattr(module, hook, None), f"{PROJECT}_spec"):
        return None
    return f"{module.__name__} must declare the hook {hook}, marked @hookspec"


def find_requirement(owner: str, package: str) -> tuple[str, str] | None:
    """What a distribution requires for a package, and of which extra, "" for none."""
    name = canonicalize_name(package)
    with suppress(PackageNotFoundError, InvalidRequirement):
        for line in requires(owner) or ():
            if f"{canonicalize_name(Requirement(line).name)}-".startswith(f"{name}-"):
                extra = re.search(r"""extra == ['"]([^'"]+)""", line)
                return line.partition(";")[0].strip(), extra[1] if extra else ""
    return None


def pip_install(owner: str, package: str) -> str:
    """The command that installs a package which a distribution requires; "" if it does not."""
    if found := find_requirement(owner, package):
        wanted, extra = found
        return f'pip install "{f"{owner}[{extra}]" if extra else wanted}"'
    return ""
