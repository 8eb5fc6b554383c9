"""Choose the attention backends: what was named, or the best that can serve, and say why.

Nothing here imports torch: backends state what they can do as data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from nanovllm_core.config.choices import AttentionChoice, AttentionSettings
from nanovllm_core.errors import (
    ConfigError,
    PluginError,
    PluginLoadError,
    UnsupportedError,
    shown,
)
from nanovllm_core.interfaces.attention import (
    AttentionCapabilities,
    AttentionRequirements,
    KVLayout,
)
from nanovllm_core.interfaces.specs import AttentionSpec, ResolvedPlugin
from nanovllm_core.registry.checks import describe
from nanovllm_core.registry.discovery import install_one
from nanovllm_core.registry.manager import PluginManager
from nanovllm_core.selection.fit import in_order, unmet_capability, unmet_device, unmet_dtype

SMALLEST_BLOCK = 16

INSTALL_ONE = install_one("attention")


@dataclass(frozen=True, slots=True)
class Selection:
    """The backends of an engine, the pages they share, and lines that say why these."""

    prefill: Candidate
    decode: Candidate
    layout: KVLayout
    block_size: int
    report: tuple[str, ...]
    eager_prompts: tuple[str, ...]
    """Why steps with prompts cannot be captured on a GPU; empty where they can."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that was loaded and asked; `reasons` is why it cannot serve, empty if it can."""

    resolved: ResolvedPlugin
    spec: AttentionSpec
    layouts: tuple[KVLayout, ...]
    rank: int
    reasons: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.resolved.name

    @property
    def label(self) -> str:
        """`triton 0.1.0`, and what it runs on where it chooses among libraries."""
        text = f"{self.resolved.name} {self.resolved.version}"
        if self.spec.provider and not self.reasons:
            text += f" ({self.spec.provider(self.resolved.options)})"
        return text


def select_attention(
    manager: PluginManager,
    settings: AttentionSettings,
    prefill: AttentionRequirements,
    decode: AttentionRequirements,
) -> Selection:
    """Choose a backend for each phase and the page size that suits both.

    Raises UnsupportedError with the reasons and the alternatives where a backend cannot serve,
    ConfigError for a wrong option or block size, PluginError where a plugin cannot be loaded.
    """
    report: list[str] = []
    same = settings.prefill == settings.decode
    chosen = []
    for requirements in (prefill, decode):
        choice: AttentionChoice = getattr(settings, requirements.phase)
        if choice.backend == "auto":
            chosen.append(_best(manager, requirements, report))
        else:
            path = "attention.options" if same else f"attention.{requirements.phase}.options"
            chosen.append(_named(manager, choice, requirements, path))
        report.append(f"attention {requirements.phase}: {chosen[-1].label}")
    layout, block_size = _common_pages(chosen[0], chosen[1], decode.block_size)
    captured = replace(prefill, cuda_graphs=True)
    eager_prompts = _ask(chosen[0].spec, chosen[0].resolved, captured).reasons
    if eager_prompts and decode.cuda_graphs:
        report.append(f"steps with prompts run without graphs: {'; '.join(eager_prompts)}")
    return Selection(
        prefill=chosen[0],
        decode=chosen[1],
        layout=layout,
        block_size=block_size,
        report=tuple(dict.fromkeys(report)),
        eager_prompts=eager_prompts,
    )


def unmet(capabilities: AttentionCapabilities, requirements: AttentionRequirements) -> list[str]:
    """Requirements that the backend does not declare, in plain words with value and limit."""
    reasons = []
    device = requirements.device.split(":")[0]
    if requirements.phase not in capabilities.phases:
        reasons.append(f"does not do {requirements.phase}, only {in_order(capabilities.phases)}")
    reasons += unmet_device(capabilities.devices, device)
    reasons += unmet_dtype(capabilities.dtypes, requirements.dtype)
    sizes = capabilities.head_sizes
    if sizes is not None and requirements.head_size not in sizes:
        reasons.append(f"has no head size {requirements.head_size}, only {in_order(sizes)}")
    if device == "cuda":
        reasons += unmet_capability(
            capabilities.min_compute_capability,
            capabilities.max_compute_capability,
            requirements.compute_capability,
        )
        if requirements.cuda_graphs and capabilities.cuda_graphs == "none":
            reasons.append(
                "cannot be captured in CUDA graphs; set cuda_graphs.enforce_eager to run without"
            )
        elif (
            requirements.cuda_graphs
            and requirements.phase == "prefill"
            and capabilities.cuda_graphs != "full"
        ):
            reasons.append("its prefill cannot be captured in CUDA graphs")
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
    manager: PluginManager,
    choice: AttentionChoice,
    requirements: AttentionRequirements,
    path: str = "attention.options",
) -> Candidate:
    """Load a backend's spec and ask whether it can serve; PluginError if it cannot be loaded."""
    resolved = manager.resolve("attention", choice.backend, choice.options, path)
    spec = cast(AttentionSpec, manager.spec("attention", choice.backend))
    return _ask(spec, resolved, requirements)


def _ask(
    spec: AttentionSpec, resolved: ResolvedPlugin, requirements: AttentionRequirements
) -> Candidate:
    layouts: tuple[KVLayout, ...] = ()
    rank = 0
    reasons = unmet(spec.capabilities, requirements)
    if not reasons:  # A plugin's own check may rely on what its capabilities promise.
        try:
            options = resolved.options
            reasons = list(spec.check(requirements, options))
            layouts = tuple(spec.kv_layouts(requirements, options))
            rank = spec.rank(requirements)
        except Exception as error:
            raise PluginLoadError(
                f"{describe(resolved)} failed while it was asked what it supports: "
                f"{type(error).__name__}: {error}"
            ) from error
        size = requirements.block_size
        if not reasons and size and all(size % layout.page_multiple for layout in layouts):
            multiples = in_order(layout.page_multiple for layout in layouts)
            reasons.append(f"cannot use cache.block_size {size}, only multiples of {multiples}")
    return Candidate(resolved, spec, layouts, rank, tuple(reasons))


def _named(
    manager: PluginManager, choice: AttentionChoice, requirements: AttentionRequirements, path: str
) -> Candidate:
    """The backend that the configuration names, or an error that names the alternatives."""
    candidate = evaluate(manager, choice, requirements, path)
    if not candidate.reasons:
        return candidate
    able, _ = able_backends(manager, requirements)
    raise UnsupportedError(
        f"attention backend {shown(choice.backend)} ({candidate.resolved.distribution} "
        f"{candidate.resolved.version}) cannot serve {requirements.phase} here: "
        f"{'; '.join(candidate.reasons)}. "
        + (f"These can: {_names(able)}." if able else f"No other installed one can; {INSTALL_ONE}"),
        candidate.reasons,
    )


def _best(
    manager: PluginManager, requirements: AttentionRequirements, report: list[str]
) -> Candidate:
    """The able backend of the highest rank; `report` gets why each other one lost."""
    able, unable = able_backends(manager, requirements)
    losers = [f"{name}: {reason}" for name, reason in unable.items()]
    for loser in losers:
        report.append(f"attention auto, {requirements.phase}: not {loser}")
    if not able:
        installed = "None is installed" if not losers else "; ".join(losers)
        raise UnsupportedError(
            f"no attention backend can serve {requirements.phase} on {requirements.device} in "
            f"{requirements.dtype}. {installed}. {INSTALL_ONE}",
            losers,
        )
    best, *others = able
    for other in others:
        report.append(
            f"attention auto, {requirements.phase}: not {other.resolved.name}: it can serve, but "
            f"its rank {other.rank} is not above {best.resolved.name}'s {best.rank}"
        )
    return best


def able_backends(
    manager: PluginManager, requirements: AttentionRequirements
) -> tuple[list[Candidate], dict[str, str]]:
    """The installed backends that can serve, best first, and why each other one cannot."""
    able: list[Candidate] = []
    unable: dict[str, str] = {}
    for name in manager.names("attention"):
        try:
            candidate = evaluate(manager, AttentionChoice(backend=name), requirements)
        except (PluginError, ConfigError) as error:
            unable[name] = str(error)
            continue
        if candidate.reasons:
            unable[name] = "; ".join(candidate.reasons)
        else:
            able.append(candidate)
    return sorted(able, key=lambda c: (-c.rank, c.resolved.name)), unable


def _common_pages(
    prefill: Candidate, decode: Candidate, block_size: int | None
) -> tuple[KVLayout, int]:
    """The decode backend's first layout that prefill prefers too, and a page size for both.

    Layouts that both list come before those that only suit both (multiples of 128 suit one that
    lists 128 and one that lists 16).
    """
    suitable = [
        KVLayout(mine.name, math.lcm(mine.page_multiple, other.page_multiple))
        for mine in decode.layouts
        for other in prefill.layouts
        if mine.name == other.name
    ]
    listed = [layout for layout in decode.layouts if layout in prefill.layouts]
    common = list(dict.fromkeys((*listed, *suitable)))
    if not common:
        raise UnsupportedError(
            "the attention pair has no KV layout in common: decode "
            f"{decode.resolved.name} reads {_layouts(decode)}, prefill {prefill.resolved.name} "
            f"reads {_layouts(prefill)}; choose another pair"
        )
    if block_size is None:
        multiple = common[0].page_multiple
        return common[0], -(-SMALLEST_BLOCK // multiple) * multiple
    for layout in common:
        if block_size % layout.page_multiple == 0:
            return layout, block_size
    raise ConfigError(
        f"cache.block_size: {block_size} does not suit both backends, which need a multiple of "
        f"{in_order(layout.page_multiple for layout in common)} (decode {decode.resolved.name}: "
        f"{_layouts(decode)}; prefill {prefill.resolved.name}: {_layouts(prefill)}); change it or "
        "leave it out"
    )


def _layouts(candidate: Candidate) -> str:
    return ", ".join(f"{x.name} by {x.page_multiple}" for x in candidate.layouts) or "none"


def _names(candidates: Sequence[Candidate]) -> str:
    return ", ".join(candidate.resolved.name for candidate in candidates)
