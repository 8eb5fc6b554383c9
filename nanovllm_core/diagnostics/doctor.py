"""Checks of this environment, in the order in which one would look: behind `plugins doctor`.

Each part appends facts; nothing here raises for what it finds, for a doctor that falls over says
nothing. The plugins' own checks come through the hook `nanovllm_doctor`.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import (
    Distribution,
    EntryPoint,
    distributions,
)
from typing import Any

from pluggy import PluginValidationError

from nanovllm_core import __version__
from nanovllm_core.config.sources import load_config
from nanovllm_core.diagnostics.status import (
    PluginStatus,
    missing_code,
    plugin_statuses,
    requirements_here,
    typical_requirements,
)
from nanovllm_core.errors import NanoVLLMError, PluginConflictError, PluginError, did_you_mean
from nanovllm_core.interfaces.attention import AttentionRequirements
from nanovllm_core.interfaces.doctor import DoctorCheck
from nanovllm_core.registry.checks import (
    CORE,
    core_requirement,
    find_requirement,
    pip_install,
    separate,
)
from nanovllm_core.registry.discovery import (
    COMMAND_GROUP,
    COMMAND_PARENTS,
    GROUP_PREFIX,
    SUITE_GROUP,
    InstalledPlugin,
    known_groups,
)
from nanovllm_core.registry.kinds import EXTENSION, KIND, KIND_GROUP, KINDS
from nanovllm_core.registry.manager import PluginManager, get_plugin_manager
from nanovllm_core.registry.objects import load_object
from nanovllm_core.selection.checkpoint import conflict, holds_checkpoint
from nanovllm_core.selection.decisions import NAMED_KINDS, Decisions
from nanovllm_core.selection.fit import get_one


def examine() -> list[DoctorCheck]:
    """Every check, the machine's first. Imports torch, and the code of plugins that can run."""
    checks = [DoctorCheck("python", True, platform.python_version())]
    checks += check_torch()
    installed = [*distributions()]
    entries, unreadable = read_entry_points(installed)
    checks += [*check_installs(installed), *unreadable]
    checks += [*check_groups(entries), *check_commands(entries)]
    try:
        manager = get_plugin_manager(load_config("none").plugins.disable, entries)
    except PluginError as error:
        remedy = "correct NANOVLLM_PLUGINS__DISABLE: nanovllm plugins list has the names"
        checks.append(DoctorCheck("plugins.disable", False, str(error), remedy))
        manager = get_plugin_manager(entry_points=entries)
    try:
        typical = requirements_here()
    except Exception:  # check_torch has said so
        typical = typical_requirements("cpu", None)
    statuses = plugin_statuses(manager, typical)
    conflicts = [*check_conflicts(manager)]
    told = {check.name for check in conflicts}
    found = [check_plugin(manager, status) for status in statuses]
    checks += conflicts + [check for check in found if check.name not in told]
    checks += check_defaults(manager, statuses, typical)
    return [*checks, *ask_plugins(manager)]


def next_steps(checks: Iterable[DoctorCheck]) -> list[str]:
    """The remedies, the most urgent first; the command to generate text if nothing prevents it."""
    wrong = [check for check in checks if not check.ok and check.remedy]
    steps = [c.remedy for c in sorted(wrong, key=lambda check: not check.fatal)]
    if not any(check.fatal and not check.ok for check in checks):
        has_demo = any(check.ok and check.name == "checkpoint demo" for check in checks)
        model = "demo --chat" if has_demo else "MODEL"
        steps.append(f'write something: nanovllm generate --model {model} "What is 27 + 15?"')
    return [*dict.fromkeys(steps)]


# ------------------------------------------------------------------------------------ the machine


def check_torch() -> Iterator[DoctorCheck]:
    """torch, Triton and the GPUs that they see."""
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        remedy = "pip install --force-reinstall torch (see pytorch.org for the build of your GPU)"
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        yield DoctorCheck("torch", False, detail, remedy, fatal=True)
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    yield DoctorCheck("torch", True, f"{torch.__version__}, {build}")
    has_gpu = torch.cuda.is_available()
    yield _check_triton(has_gpu)
    for index in range(torch.cuda.device_count() if has_gpu else 0):
        gpu = torch.cuda.get_device_properties(index)
        detail = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
        detail += f"{gpu.total_memory / 2**30:.0f} GiB"
        yield DoctorCheck(f"cuda:{index}", True, detail)
    yield _check_driver(has_gpu, torch.version.cuda)


def _check_triton(needed: bool) -> DoctorCheck:
    try:
        import triton
    except Exception as error:
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        remedy = 'pip install "triton>=3.6"' if needed else ""
        return DoctorCheck("triton", False, detail, remedy, fatal=needed)
    return DoctorCheck("triton", True, str(triton.__version__))


def _check_driver(has_gpu: bool, torch_cuda: str | None) -> DoctorCheck:
    """The driver, as nvidia-smi names it; wrong where it is there and torch sees no GPU."""
    driver = _driver_version()
    if driver is None:
        return DoctorCheck("driver", True, "no NVIDIA driver: computes on the CPU")
    if has_gpu:
        return DoctorCheck("driver", True, f"NVIDIA {driver}")
    built_for = f"CUDA {torch_cuda}" if torch_cuda else "CPUs"
    detail = f"NVIDIA {driver} is there, but torch sees no GPU; torch is built for {built_for}"
    remedy = "install a torch for a CUDA that the driver knows (pytorch.org), or update the driver"
    return DoctorCheck("driver", False, detail, remedy)


def _driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(result.stdout.split()), None)


# ------------------------------------------------------------------------- what is installed


def read_entry_points(
    installed: Iterable[Distribution],
) -> tuple[list[EntryPoint], list[DoctorCheck]]:
    """The entry points of each distribution alone: one that cannot be read hides no other."""
    entries: dict[tuple[str, str, str], EntryPoint] = {}
    checks = []
    for distribution in installed:
        try:
            for entry in distribution.entry_points:
                if entry.group.startswith(GROUP_PREFIX):
                    # Of two installs of one distribution the first on sys.path is imported.
                    entries.setdefault((distribution.name, entry.group, entry.name), entry)
        except Exception as error:
            name = distribution.metadata["Name"] or "a distribution"
            detail = f"entry_points.txt cannot be read: {type(error).__name__}: {error}"
            remedy = (
                f"pip install --force-reinstall {name} (or uninstall it): as it is, it stops every "
                "program that looks for plugins"
            )
            checks.append(DoctorCheck(name, False, detail, remedy, fatal=True))
    return [*entries.values()], checks


def check_installs(installed: Iterable[Distribution]) -> Iterator[DoctorCheck]:
    """The core and all that needs it: installed once, each with a core that it accepts."""
    versions: dict[str, list[str]] = defaultdict(list)
    yield DoctorCheck(CORE, True, __version__)
    for distribution in installed:
        name, version = distribution.metadata["Name"] or "", distribution.version
        needs = core_requirement(distribution.requires or ())
        if name == CORE or needs:
            versions[name].append(version)
        if needs and not needs.specifier.contains(__version__, prereleases=True):
            detail = f"needs {needs}, and {CORE} is {__version__}"
            remedy = f"pip install --upgrade {CORE} {name}"
            yield DoctorCheck(f"{name} {version}", False, detail, remedy)
    for name, found in versions.items():
        if len(set(found)) > 1:
            detail = f"installed more than once: {', '.join(found)}; the first is imported"
            remedy = f"pip uninstall {name}, until nothing is left, then install it once"
            yield DoctorCheck(name, False, detail, remedy)


def check_groups(entries: Sequence[EntryPoint]) -> Iterator[DoctorCheck]:
    """Entry points of unknown groups: a misspelt group, or a plugin for a newer core."""
    known = known_groups(entry.name for entry in entries if entry.group == KIND_GROUP)
    for entry in entries:
        if entry.group not in {*known, COMMAND_GROUP, SUITE_GROUP}:
            owner = entry.dist.name if entry.dist else "its package"
            detail = f"{CORE} {__version__} reads no group {entry.group!r}, so this plugin is "
            remedy = f"in {owner}, correct the group"
            remedy += f"{did_you_mean(entry.group, known, GROUP_PREFIX)} (or update {CORE})"
            name = f"{entry.group}: {entry.name}"
            yield DoctorCheck(name, False, f"{detail}never found", remedy)


def check_commands(entries: Iterable[EntryPoint]) -> Iterator[DoctorCheck]:
    """Commands and suites that would not be found, or whose code is not there.

    Their code is not imported: that it can be found is asked of the import system.
    """
    owners: dict[tuple[str, str], list[EntryPoint]] = defaultdict(list)
    for entry in entries:
        if entry.group in (COMMAND_GROUP, SUITE_GROUP):
            owners[entry.group, entry.name].append(entry)
    for (group, name), found in owners.items():
        names = [entry.dist.name if entry.dist else entry.value for entry in found]
        label = f"{group}: {name}"
        parent = name.rpartition(".")[0]
        if len(found) > 1:
            remedy = f"uninstall one of {', '.join(names)}"
            detail = f"registered by {' and '.join(names)}"
            yield DoctorCheck(label, False, detail, remedy)
        elif group == COMMAND_GROUP and parent not in COMMAND_PARENTS:
            detail = f"the command has no group {parent!r}, so {name!r} is never found"
            remedy = f"in {names[0]}, name it NAME or plugins.NAME"
            yield DoctorCheck(label, False, detail, remedy)
        elif problem := missing_code(found[0].value):
            yield DoctorCheck(label, False, problem, f"reinstall {names[0]}")


def check_conflicts(manager: PluginManager) -> Iterator[DoctorCheck]:
    """Names that two distributions, or a source and a folder here, claim; an error to select."""
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    for plugin in manager.installed():
        owners[plugin.kind, plugin.name].append(plugin.distribution)
    for (kind, name), found in owners.items():
        if len(found) > 1:
            detail = f"registered by {' and '.join(found)}"
            yield DoctorCheck(f"{kind} {name}", False, detail, separate(found))
        elif kind == "checkpoint" and holds_checkpoint(name):
            meanings, remedy = conflict(manager, name)
            detail = f"in this folder, model: {name} is {meanings}"
            yield DoctorCheck(f"{kind} {name}", False, detail, f"as the model, {remedy}")


# ------------------------------------------------------------------------------------ the plugins


def check_plugin(manager: PluginManager, status: PluginStatus) -> DoctorCheck:
    """One plugin: does its light module load, can it run here, is its code importable."""
    plugin = status.plugin
    label = f"{plugin.kind} {plugin.name}"
    said = f"{status.state}: {'; '.join(status.reasons)}"
    if status.state in ("unsupported", "disabled"):
        return DoctorCheck(label, False, said)
    contract = ""
    try:
        if plugin.kind == EXTENSION:
            manager.enable([plugin.name])
        elif plugin.kind == KIND:
            contract = f"current contract {manager.kind(plugin.name).contract}; "
        else:
            spec = manager.spec(plugin.kind, plugin.name)
            load_object(spec.impl)
            contract = f"contract {spec.contract}; "
    except PluginError as error:
        if status.state == "broken":
            return DoctorCheck(label, False, said, _remedy(plugin, error))
        if missing := _missing_extra(plugin, error):
            return DoctorCheck(label, False, missing)  # it may be left out: nothing is wrong
        return DoctorCheck(label, False, str(error), _remedy(plugin, error))
    if status.state == "broken":  # it loads, and answers wrongly
        return DoctorCheck(label, False, said, _repair(plugin))
    who = f"{plugin.distribution} {plugin.version}"
    return DoctorCheck(label, True, f"{who}; {contract}{status.note}")


def _remedy(plugin: InstalledPlugin, error: PluginError) -> str:
    """What to do about a plugin that cannot be loaded, by the cause."""
    package = _missing_package(error)
    ours = CORE.replace("-", "_")
    own = re.split(r"[.:]", plugin.entry_point)[0]
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and package not in ("", ours, own):
        return f"{_install(plugin.distribution, package)}, or uninstall {plugin.distribution}"
    if cause is None or package == ours or isinstance(cause, PluginValidationError):
        return (
            f"install a version of {plugin.distribution} that fits {CORE} {__version__}, or "
            f"uninstall it; if it is yours: nanovllm plugins validate {plugin.name}"
        )
    return _repair(plugin)


def _missing_package(error: PluginError) -> str:
    """The first part of the name of the module that an import behind the error did not find."""
    cause = error.__cause__
    return (cause.name or "").partition(".")[0] if isinstance(cause, ImportError) else ""


def _missing_extra(plugin: InstalledPlugin, error: PluginError) -> str:
    """What a plugin lacks that an extra of its distribution brings; "" where that is not it."""
    owner, package = plugin.distribution, _missing_package(error)
    _, extra = (package and find_requirement(owner, package)) or ("", "")
    if not extra:
        return ""
    return f"needs {package}, of the extra {extra}: {_install(owner, package)}"


def _repair(plugin: InstalledPlugin) -> str:
    return (
        f"reinstall, repair or uninstall {plugin.distribution}; if it is yours: "
        f"nanovllm plugins validate {plugin.name}"
    )


def _install(owner: str, package: str) -> str:
    """How to install a package that a distribution lacks: by its extra or what it requires."""
    return pip_install(owner, package) or f"install {package!r}, which {owner} imports"


def check_defaults(
    manager: PluginManager, statuses: Iterable[PluginStatus], typical: AttentionRequirements
) -> Iterator[DoctorCheck]:
    """Whether something can be generated: a model, attention, and what no configuration names.

    The latter is chosen as a start does; a GPU without a kernel set built for it is told too.
    """
    ready = {status.plugin.kind for status in statuses if status.state == "ready"}
    for name, kind in KINDS.items():
        if kind.is_needed and name not in ready:
            detail = f"no {name} plugin can run here"
            yield DoctorCheck(name, False, detail, get_one(manager, name), fatal=True)
    overrides = {"device": typical.device, "dtype": typical.dtype}
    # Of the environment `manager` has read plugins.disable; no other variable is a default.
    decisions = Decisions(load_config("none", overrides=overrides, env={}), manager)
    for name in NAMED_KINDS.values():
        try:
            decisions.named(name)
        except NanoVLLMError as error:
            detail = f"the default where no file chooses cannot be used: {error}"
            remedy = f"take the {name} of the core out of plugins.disable, or reinstall {CORE}"
            if isinstance(error, PluginConflictError):  # its text has the remedy
                remedy = ""
            yield DoctorCheck(name, False, detail, remedy, fatal=True)
        else:
            if name == "kernels" and decisions.kernels.warning:
                yield DoctorCheck(name, False, decisions.kernels.warning, decisions.kernels.remedy)


def ask_plugins(manager: PluginManager) -> Iterator[DoctorCheck]:
    """The findings of the plugins' own checks; a check that fails is a finding too."""
    for implementation in manager.hook.nanovllm_doctor.get_hookimpls():
        try:
            answer: Any = implementation.function()
            found = [*answer]
            for check in found:
                if not isinstance(check, DoctorCheck):
                    raise TypeError(f"it returned {check!r:.80}, which is no DoctorCheck")
        except Exception as error:
            name = implementation.plugin_name
            detail = f"its nanovllm_doctor failed: {type(error).__name__}: {error}"
            found = [DoctorCheck(name, False, detail, f"tell the authors of {name}")]
        yield from found
