"""The installed plugins, and whether this machine can run them, for `nanovllm plugins list`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.machinery import ModuleSpec
from itertools import accumulate
from typing import Literal

from nanovllm_core.config.choices import AttentionChoice
from nanovllm_core.errors import NanoVLLMError
from nanovllm_core.interfaces.attention import AttentionRequirements
from nanovllm_core.interfaces.specs import AttentionSpec, DeviceSpec, KernelSetSpec, PluginSpec
from nanovllm_core.registry.discovery import InstalledPlugin
from nanovllm_core.registry.kinds import EXTENSION, KIND
from nanovllm_core.registry.manager import PluginManager
from nanovllm_core.selection.attention import evaluate
from nanovllm_core.selection.decisions import compute_capability, resolve_device
from nanovllm_core.selection.fit import unmet_device
from nanovllm_core.selection.kernels import unmet

# What may define a name without spelling it.
_DYNAMIC = re.compile(r"import \*|\b__getattr__\b|\bglobals\(\)")

State = Literal["ready", "unsupported", "broken", "disabled"]


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """One installed plugin: ready here, or why not. `note` says what it is or what it runs on."""

    plugin: InstalledPlugin
    state: State
    reasons: tuple[str, ...] = ()
    note: str = ""

    def to_json(self) -> Mapping[str, object]:
        """The same as plain data."""
        values = asdict(self)
        return {**values.pop("plugin"), **values}


def typical_requirements(
    device: str, compute_capability: tuple[int, int] | None
) -> AttentionRequirements:
    """The requirements of a usual model: grouped heads of size 128, in the device's dtype."""
    device = device.split(":")[0]
    return AttentionRequirements(
        phase="decode",
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        compute_capability=compute_capability,
        cuda_graphs=device == "cuda",
    )


def requirements_here() -> AttentionRequirements:
    """The requirements of a usual model on the device that `auto` takes. Imports torch."""
    device = resolve_device("auto")
    return typical_requirements(device, compute_capability(device))


def plugin_statuses(
    manager: PluginManager, requirements: AttentionRequirements, kind: str | None = None
) -> list[PluginStatus]:
    """The state of every installed plugin, or of those of one kind; a broken one is no error."""
    statuses = [
        plugin_status(manager, plugin, requirements)
        for plugin in manager.installed()
        if kind in (None, plugin.kind)
    ]
    statuses += [
        PluginStatus(plugin, "disabled", ("listed in plugins.disable",))
        for plugin in manager.disabled()
        if kind in (None, plugin.kind)
    ]
    return sorted(statuses, key=lambda status: status.plugin)


def plugin_status(
    manager: PluginManager, plugin: InstalledPlugin, requirements: AttentionRequirements
) -> PluginStatus:
    """The state of one plugin, by its light module, and whether its code is where that says.

    The code is not imported: one that fails when it is stays "ready" here.
    """
    if plugin.kind == EXTENSION:
        return PluginStatus(plugin, "ready", note="loaded when plugins.enable names it")
    try:
        if plugin.kind == KIND:
            return PluginStatus(plugin, "ready", note=manager.declaration(plugin.name).summary)
        spec = manager.spec(plugin.kind, plugin.name)
        if missing := missing_code(spec.impl):
            return PluginStatus(plugin, "broken", (missing,))
        reasons, note = _ask(manager, spec, requirements)
    except NanoVLLMError as error:
        return PluginStatus(plugin, "broken", (str(error),))
    return PluginStatus(plugin, "unsupported" if reasons else "ready", tuple(reasons), note)


def _ask(
    manager: PluginManager, spec: PluginSpec, requirements: AttentionRequirements
) -> tuple[Iterable[str], str]:
    """Why the plugin cannot run here, if it states that, and what it is or what it runs on.

    An attention backend is asked about each phase that it claims, with its default options.
    """
    if isinstance(spec, AttentionSpec):
        choice, note = AttentionChoice(backend=spec.name), spec.summary
        reasons: dict[str, None] = {}
        for phase in sorted(spec.capabilities.phases):
            candidate = evaluate(manager, choice, replace(requirements, phase=phase))
            reasons |= dict.fromkeys(candidate.reasons)
            note = note if candidate.reasons else candidate.label
        return reasons, note
    if isinstance(spec, KernelSetSpec):
        return unmet(spec, requirements), spec.summary
    if isinstance(spec, DeviceSpec):
        return unmet_device(spec.devices, requirements.device), spec.summary
    return (), spec.summary


def missing_code(impl: str) -> str | None:
    """Why `"package.module:Object"` cannot be loaded, as far as that shows without importing it.

    None where nothing is wrong, or where only an import would tell.
    """
    module, _, name = impl.partition(":")
    cannot = f"its code {impl!r} cannot be loaded: "
    lacks = f"{cannot}{module} has no {name!r}"
    try:
        if module in sys.modules:
            return None if _has(sys.modules[module], name) else lacks
        spec = find_module(module)
        if spec is None:
            return f"{cannot}there is no module {module!r}"
        source = getattr(spec.loader, "get_source", lambda _: None)(module)
    except Exception:  # finders, loaders and modules are anybody's code; an import will tell
        return None
    first = name.partition(".")[0]
    if source is None or _DYNAMIC.search(source) or re.search(rf"\b{re.escape(first)}\b", source):
        return None
    return lacks


def find_module(module: str) -> ModuleSpec | None:
    """A module as importlib finds it, but no package on the way there is imported."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    for name in accumulate(module.split("."), "{}.{}".format):
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next(filter(None, found), None)
        path = spec.submodule_search_locations if spec else None
        if path is None and name != module:
            return None
    return spec


def _has(found: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
