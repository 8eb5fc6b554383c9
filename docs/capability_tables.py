"""The tables of docs/capabilities.md: what the shipped plugins declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from results_tables import table
from settings_tables import allowed, default

from nanovllm_attention_flash.providers import PROVIDERS
from nanovllm_core.errors import in_ranges
from nanovllm_core.interfaces.attention import AttentionRequirements
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.specs import (
    AttentionSpec,
    KernelSetSpec,
    PluginSpec,
    SamplerSpec,
    SchedulerSpec,
)
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_kernels_triton.kernel_set import TritonKernels

SHIPPED = {
    "attention": ("sdpa", "triton", "flash"),
    "scheduler": ("fcfs", "sjf", "lpt"),
    "sampler": ("gumbel",),
    "kernels": ("torch", "triton"),
}


def shipped(kind: str) -> list[PluginSpec]:
    """The specs of this repository's plugins of a kind."""
    manager = get_plugin_manager()
    return [manager.spec(kind, name) for name in SHIPPED[kind]]


def capability_table() -> str:
    """What each shipped attention backend declares, a row for each field."""
    specs = [spec for spec in shipped("attention") if isinstance(spec, AttentionSpec)]
    names = [field.name for field in fields(specs[0].capabilities)]
    rows = [
        [words(name), *(in_words(getattr(spec.capabilities, name)) for spec in specs)]
        for name in names
    ]
    for phase in ("prefill", "decode"):
        asked = AttentionRequirements(
            phase=phase,
            device="cuda",
            dtype="bfloat16",
            num_heads=16,
            num_kv_heads=8,
            head_size=128,
            compute_capability=(9, 0),
            cuda_graphs=True,
        )
        blocks = [spec.kv_layouts(asked, spec.options())[0].block_multiple for spec in specs]
        rows.append([f"Preferred block multiple, {phase}", *(f"{size} tokens" for size in blocks)])
        rows.append([f"Rank, {phase}", *(str(spec.rank(asked)) for spec in specs)])
    return table(["", *(f"`{spec.name}`" for spec in specs)], rows)


CACHES: Mapping[str, str | None] = {
    "a key and a value of each KV head": None,
    "the same, of which a query sees the last ones (sliding window)": "sliding_window",
    "one row for all heads (latent attention)": "latent",
}
"""What a layer keeps of a token, and the capability that it takes."""


def cache_table() -> str:
    """Which attention backend serves which cache, by the capabilities that it declares."""
    specs = [spec for spec in shipped("attention") if isinstance(spec, AttentionSpec)]
    rows = [
        [what, *(in_words(not name or getattr(spec.capabilities, name, False)) for spec in specs)]
        for what, name in CACHES.items()
    ]
    return table(["a token in the cache", *(f"`{spec.name}`" for spec in specs)], rows)


def operation_table() -> str:
    """Which operations of the kernel set `triton` have kernels, and which are the reference's."""
    operations = [name for name, one in vars(KernelSet).items() if inspect.isfunction(one)]
    rows = [
        [f"`{name}`", in_words(getattr(TritonKernels, name) is not getattr(TorchKernels, name))]
        for name in operations
        if not name.startswith("_")
    ]
    return table(["operation", "`triton` has kernels"], rows)


def words(name: str) -> str:
    """A field's name as a heading: `needs_finite_tail` is "Needs finite tail"."""
    return name.replace("_", " ").capitalize().replace("Gqa", "Grouped heads (GQA)")


def in_words(value: object) -> str:
    """A declared value."""
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return ", ".join(map(str, in_ranges(value)))
    if isinstance(value, tuple):
        return ".".join(str(one) for one in value)
    return str(value)


def provider_table() -> str:
    """What each provider of `flash` has, from the plugin's own list."""
    rows = [
        [
            f"`{one.name}`",
            one.distribution,
            f"{one.capabilities[0]}.x to {one.capabilities[1]}.x",
            f"{one.block_multiple} tokens",
            in_words(one.sliding_window),
            in_words(one.soft_cap),
            in_words(one.verified),
        ]
        for one in PROVIDERS.values()
    ]
    head = "provider", "package", "compute capability", "block multiple", "sliding window"
    return table([*head, "soft cap", "run on a GPU here"], rows)


def other_table() -> str:
    """What the shipped plugins of other kinds declare."""
    rows = []
    for kind in SHIPPED:
        for spec in shipped(kind):
            if not isinstance(spec, AttentionSpec):
                rows.append([kind, f"`{spec.name}`", declarations(spec)])
    return table(["kind", "plugin", "declares"], rows)


def declarations(spec: PluginSpec) -> str:
    """A spec's own fields, in words; those of attention have a table to themselves."""
    if isinstance(spec, SamplerSpec):
        captured = "captured in CUDA graphs" if spec.cuda_graphs else "not captured"
        return f"{in_words(spec.devices)}; {captured}"
    if isinstance(spec, KernelSetSpec):
        return f"{in_words(spec.devices)}; rank {spec.rank}"
    if isinstance(spec, SchedulerSpec):
        if spec.max_overtaking_steps is None:
            return f"{spec.level}; no bound"
        steps = spec.max_overtaking_steps(spec.options(), job(600, 0))
        return f"{spec.level}; {steps:.0f} steps"
    return ""


def option_table() -> str:
    """Every option of the shipped plugins that have some."""
    rows = []
    for kind in SHIPPED:
        for spec in shipped(kind):
            schema = spec.options.model_json_schema()
            for name, field in spec.options.model_fields.items():
                one = schema["properties"][name]
                cells = (f"`{spec.name}`", f"`{name}`", allowed(one), default(one, False))
                rows.append([*cells, str(field.description)])
    return table(["plugin", "option", "takes", "default", "meaning"], rows)


def job(tokens: int, arrival_step: int) -> Any:
    """A request as a policy sees it."""
    return SimpleNamespace(num_tokens=tokens, num_scheduled=0, arrival_step=arrival_step)


CAPABILITIES: Mapping[str, Callable[[], str]] = {
    "capabilities": capability_table,
    "caches": cache_table,
    "operations": operation_table,
    "providers": provider_table,
    "other kinds": other_table,
    "options": option_table,
}
