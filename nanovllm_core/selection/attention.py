"""Choose the attention backends: what was named, or the best that can serve, and say why.

Nothing here imports torch: backends state what they can do as data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import cast

from nanovllm_core.config.choices import AttentionSettings, PluginChoice
from nanovllm_core.errors import PluginLoadError, describe_error, shown
from nanovllm_core.interfaces.attention import (
    AttentionCapabilities,
    AttentionRequirements,
    KVLayout,
)
from nanovllm_core.interfaces.specs import AttentionSpec, ResolvedPlugin
from nanovllm_core.registry.manager import PluginManager
from nanovllm_core.selection import fit

SMALLEST_BLOCK = 16

Asked = Mapping[AttentionRequirements, Sequence[int]]
"""The requirements of one phase, each with the numbers of the attention layers that have them."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The backends of an engine, the blocks they share, and lines that say why these."""

    prefill: Candidate
    decode: Candidate
    layout: KVLayout
    block_size: int
    report: tuple[str, ...]
    eager_prefill_reasons: tuple[str, ...]
    """Why steps with prompts cannot be captured on a GPU; empty where they can."""


@dataclass(frozen=True, slots=True)
class Candidate(fit.Candidate):
    """A backend that was loaded and asked, and the KV layouts that it can read."""

    spec: AttentionSpec
    layouts: tuple[KVLayout, ...]

    @property
    def label(self) -> str:
        """`triton 0.1.0`, and what it runs on where it chooses among libraries."""
        text = f"{self.resolved.name} {self.resolved.version}"
        if self.spec.provider and not self.reasons:
            try:
                text += f" ({self.spec.provider(self.resolved.options)})"
            except Exception as error:
                raise _failed(self.resolved, error) from error
        return text


def select_attention(
    manager: PluginManager,
    settings: AttentionSettings,
    prefill: Asked,
    decode: Asked,
) -> Selection:
    """Choose a backend for each phase, which serves all layers, and the block size that suits both.

    Raises UnsupportedError with the reasons and the alternatives where a backend cannot serve,
    ConfigError for a wrong option, PluginError where a plugin cannot be loaded, or answers wrongly.
    """
    report: list[str] = []
    same = settings.prefill == settings.decode
    remedy = fit.get_one(manager, "attention")
    chosen: list[Candidate] = []
    for asked in (prefill, decode):
        requirements = next(iter(asked))
        phase = requirements.phase
        path = "attention.options" if same else f"attention.{phase}.options"
        ask = partial(evaluate_layers, manager, asked=asked, path=path)
        target = f"{phase} on {requirements.device} in {requirements.dtype}"
        taken, others = fit.select(
            manager, "attention", getattr(settings, phase), ask, target, remedy
        )
        report += [f"attention auto, {phase}: not {name}: {why}" for name, why in others.items()]
        report.append(f"attention {phase}: {taken.label}")
        chosen.append(taken)
    layout, block_size = _common_blocks(chosen[0], chosen[1], requirements.block_size)
    captured = _captured_prefill(prefill, decode)
    eager_prefill_reasons = _ask_all(chosen[0].spec, chosen[0].resolved, captured).reasons
    if eager_prefill_reasons and requirements.cuda_graphs:
        report.append(f"steps with prompts run without graphs: {'; '.join(eager_prefill_reasons)}")
    return Selection(
        prefill=chosen[0],
        decode=chosen[1],
        layout=layout,
        block_size=block_size,
        report=tuple(dict.fromkeys(report)),
        eager_prefill_reasons=eager_prefill_reasons,
    )


def _captured_prefill(prefill: Asked, decode: Asked) -> Asked:
    """The requirements of captured steps with prompts; latent rows are attended as in decode."""
    attended = [(one, layers) for one, layers in prefill.items() if not one.latent]
    attended += [(one, layers) for one, layers in decode.items() if one.latent]
    return {replace(one, phase="prefill", cuda_graphs=True): layers for one, layers in attended}


def unmet(capabilities: AttentionCapabilities, requirements: AttentionRequirements) -> list[str]:
    """Requirements that the backend does not declare, in plain words with value and limit."""
    device, size = requirements.device.split(":")[0], requirements.head_size
    sizes = {size} if requirements.latent else capabilities.head_sizes or {size}
    reasons = [
        *fit.outside(capabilities.phases, requirements.phase, "does not do {}, only {}"),
        *fit.unmet_device(capabilities.devices, device),
        *fit.unmet_dtype(capabilities.dtypes, requirements.dtype),
        *fit.outside(sizes, size, "has no head size {}, only {}"),
    ]
    if device == "cuda":
        reasons += fit.unmet_capability(
            capabilities.min_compute_capability,
            capabilities.max_compute_capability,
            requirements.compute_capability,
        )
        captured = requirements.cuda_graphs and capabilities.cuda_graphs
        if captured == "none":
            reasons.append(
                "cannot be captured in CUDA graphs; set cuda_graphs.enforce_eager to run without"
            )
        elif captured == "decode" and requirements.phase == "prefill":
            reasons.append("its prefill cannot be captured in CUDA graphs")
    if requirements.latent and not capabilities.latent:
        reasons.append("has no latent attention, and the model caches one row per token for it")
    captures_prompts = requirements.cuda_graphs and requirements.phase == "prefill"
    if requirements.latent and captures_prompts and not capabilities.latent_prefill:
        reasons.append("its run_prefill does not attend to latent rows, as captured prompts do")
    if requirements.num_heads != requirements.num_kv_heads and not capabilities.gqa:
        reasons.append(
            f"needs as many KV heads as query heads (the model has {requirements.num_heads} query "
            f"and {requirements.num_kv_heads} KV heads)"
        )
    if requirements.sliding_window and not capabilities.sliding_window:
        reasons.append("has no sliding window, and the model needs one")
    if requirements.soft_cap and not capabilities.soft_cap:
        reasons.append("has no logit soft cap, and the model needs one")
    return reasons


def evaluate(
    manager: PluginManager, choice: PluginChoice, requirements: AttentionRequirements
) -> Candidate:
    """Load a backend's spec and ask whether it can serve; PluginError if it cannot be loaded."""
    return evaluate_layers(manager, choice, {requirements: ()})


def evaluate_layers(
    manager: PluginManager, choice: PluginChoice, asked: Asked, path: str = "attention.options"
) -> Candidate:
    """The same for all layers of a model: a reason that not all of them give names its layers."""
    resolved = manager.resolve("attention", choice.plugin, choice.options, path)
    spec = cast(AttentionSpec, manager.spec("attention", choice.plugin))
    return _ask_all(spec, resolved, asked)


def _ask_all(spec: AttentionSpec, resolved: ResolvedPlugin, asked: Asked) -> Candidate:
    answers = {one: _ask(spec, resolved, one) for one in asked}
    reasons: dict[str, list[int]] = {}
    for one, answer in answers.items():
        for reason in answer.reasons:
            reasons.setdefault(reason, []).extend(asked[one])
    num_layers = sum(map(len, asked.values()))
    texts = (
        reason if len(layers) == num_layers else f"layers {fit.in_order(layers)}: {reason}"
        for reason, layers in reasons.items()
    )
    layouts = reduce(_common_layouts, (answer.layouts for answer in answers.values()))
    rank = min(answer.rank for answer in answers.values())
    return Candidate(resolved, rank, tuple(texts), spec, layouts)


def _ask(
    spec: AttentionSpec, resolved: ResolvedPlugin, requirements: AttentionRequirements
) -> Candidate:
    layouts: tuple[KVLayout, ...] = ()
    rank = 0
    reasons = unmet(spec.capabilities, requirements)
    if not reasons:  # A plugin's own check may rely on what its capabilities promise.
        reasons, layouts, rank = _answers(spec, resolved, requirements)
        size = requirements.block_size
        if not reasons and size and all(size % layout.block_multiple for layout in layouts):
            multiples = fit.in_order(layout.block_multiple for layout in layouts)
            reasons.append(f"cannot use cache.block_size {size}, only multiples of {multiples}")
    return Candidate(resolved, rank, tuple(reasons), spec, layouts)


def _answers(
    spec: AttentionSpec, resolved: ResolvedPlugin, requirements: AttentionRequirements
) -> tuple[list[str], tuple[KVLayout, ...], int]:
    """A plugin's reasons, layouts and rank; PluginLoadError for an answer of another type."""
    try:
        reasons: object = spec.check(requirements, resolved.options)
        layouts: object = spec.kv_layouts(requirements, resolved.options)
        rank: object = spec.rank(requirements)
    except Exception as error:
        raise _failed(resolved, error) from error
    has_layouts = _holds(layouts, KVLayout) and bool(layouts or reasons)
    for function, given, is_right, expected in (
        ("check", reasons, _holds(reasons, str), "a list of texts"),
        ("kv_layouts", layouts, has_layouts, "a list of one KVLayout or more"),
        ("rank", rank, isinstance(rank, int) and not isinstance(rank, bool), "an integer"),
    ):
        if not is_right:
            raise PluginLoadError(f"{resolved}: {function} gave {shown(given)}, not {expected}")
    return list(cast(list[str], reasons)), tuple(cast(list[KVLayout], layouts)), cast(int, rank)


def _holds(given: object, kind: type) -> bool:
    """Whether it is a list or a tuple of such objects."""
    return isinstance(given, (list, tuple)) and all(isinstance(one, kind) for one in given)


def _failed(resolved: ResolvedPlugin, error: Exception) -> PluginLoadError:
    return PluginLoadError(
        f"{resolved} failed while it was asked what it supports: {describe_error(error)}"
    )


def _common_layouts(
    mine: Collection[KVLayout], others: Collection[KVLayout]
) -> tuple[KVLayout, ...]:
    """The layouts that suit both, in the order of the first.

    Layouts that both list come before those that only suit both (multiples of 128 suit one that
    lists 128 and one that lists 16).
    """
    listed = [layout for layout in mine if layout in others]
    suitable = (
        KVLayout(one.name, math.lcm(one.block_multiple, other.block_multiple))
        for one in mine
        for other in others
        if one.name == other.name
    )
    return tuple(dict.fromkeys((*listed, *suitable)))


def _common_blocks(
    prefill: Candidate, decode: Candidate, block_size: int | None
) -> tuple[KVLayout, int]:
    """The decode backend's first layout that prefill prefers too, and a block size for both.

    There is one: all layouts have one name, and of two block multiples one divides the other.
    """
    common = _common_layouts(decode.layouts, prefill.layouts)
    layout = next(one for one in common if (block_size or 0) % one.block_multiple == 0)
    return layout, block_size or max(SMALLEST_BLOCK, layout.block_multiple)
