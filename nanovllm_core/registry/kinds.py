"""The kinds of plugins, as data: where each is found, what declares it, which contract it keeps.

A contract is versioned kind by kind. The core takes plugins written for the current version and for
the one before; what changes the meaning of a contract raises its number here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nanovllm_core.interfaces.specs import (
    AttentionSpec,
    CheckpointSpec,
    ExecutorSpec,
    KernelSetSpec,
    KindSpec,
    LogitsProcessorSpec,
    ModelSpec,
    ObserverSpec,
    PluginSpec,
    SamplerSpec,
    SchedulerSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of plugin.

    Its entry points are in `group`; `hook` returns its specs, of the type `spec`. `contract` is the
    current version of its contract. `conformance` is the suite that plugins of a declared kind must
    pass, `"package.module:Class"`; those of the core's kinds are registered in the group
    `nanovllm.suites`.
    """

    name: str
    group: str
    hook: str
    spec: type[PluginSpec]
    contract: int
    conformance: str = ""


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind(
                name="attention",
                group="nanovllm.attention",
                hook="nanovllm_attention",
                spec=AttentionSpec,
                contract=1,
            ),
            Kind(
                name="scheduler",
                group="nanovllm.schedulers",
                hook="nanovllm_schedulers",
                spec=SchedulerSpec,
                contract=1,
            ),
            Kind(
                name="model",
                group="nanovllm.models",
                hook="nanovllm_models",
                spec=ModelSpec,
                contract=1,
            ),
            Kind(
                name="checkpoint",
                group="nanovllm.checkpoints",
                hook="nanovllm_checkpoints",
                spec=CheckpointSpec,
                contract=1,
            ),
            Kind(
                name="executor",
                group="nanovllm.executors",
                hook="nanovllm_executors",
                spec=ExecutorSpec,
                contract=1,
            ),
            Kind(
                name="sampler",
                group="nanovllm.samplers",
                hook="nanovllm_samplers",
                spec=SamplerSpec,
                contract=1,
            ),
            Kind(
                name="logits_processor",
                group="nanovllm.logits_processors",
                hook="nanovllm_logits_processors",
                spec=LogitsProcessorSpec,
                contract=1,
            ),
            Kind(
                name="observer",
                group="nanovllm.observers",
                hook="nanovllm_observers",
                spec=ObserverSpec,
                contract=1,
            ),
            Kind(
                name="kernels",
                group="nanovllm.kernels",
                hook="nanovllm_kernels",
                spec=KernelSetSpec,
                contract=1,
            ),
        )
    }
)
"""The core's own kinds; plugins may declare more (see `KindSpec`)."""

EXTENSION = "extension"
EXTENSION_GROUP = "nanovllm.extensions"
"""Plugins of lifecycle and command-line hooks; loaded only when `plugins.enable` names them."""

KIND = "kind"
KIND_GROUP = "nanovllm.kinds"
KIND_HOOK = "nanovllm_kinds"
KIND_CONTRACT = 1
"""Plugins that declare a kind; loaded when a plugin of that kind is."""

NO_SPEC = (EXTENSION, KIND)
"""Kinds whose plugins are not selected by a name and options, and so have no `PluginSpec`."""


def declared_group(name: str) -> str:
    """The entry-point group of a kind that a plugin declares."""
    return f"nanovllm.{name}s"


def declared_hook(name: str) -> str:
    """The hook of a kind that a plugin declares."""
    return f"nanovllm_{name}s"


def declared_kind(spec: KindSpec) -> Kind:
    """The kind that a valid declaration describes."""
    return Kind(
        name=spec.name,
        group=declared_group(spec.name),
        hook=declared_hook(spec.name),
        spec=spec.spec,
        contract=spec.current_contract,
        conformance=spec.conformance,
    )


def contract_problem(kind: str, current: int, stated: object, owner: str) -> str | None:
    """Why a plugin's contract version is not taken; None where it is the current or the last one.

    `owner` is the distribution that defines the kind, which is to be upgraded for a newer plugin.
    """
    if not isinstance(stated, int) or isinstance(stated, bool) or stated < 1:
        return (
            f"contract {stated!r} is not a version; state the number that it was written for, "
            f"contract={current} today"
        )
    oldest = max(1, current - 1)
    taken = f"{oldest} and {current}" if oldest < current else f"{current}"
    if stated < oldest:
        return (
            f"it is too old: it was written for contract {stated} of {kind}, and {owner} takes "
            f"{taken}; upgrade the plugin, or install an older {owner}"
        )
    if stated > current:
        return (
            f"it is too new: it was written for contract {stated} of {kind}, and {owner} takes "
            f"{taken}; upgrade {owner}, or install an older version of the plugin"
        )
    return None
