"""The choice at each seam for a configuration, and why each alternative lost: `nanovllm explain`.

The decisions are those of a start, in its sequence (`nanovllm_core.selection.decisions`); here are
the words for them. Where one fails, those that do not depend on it are still explained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from nanovllm_core.config.choices import AUTO, AttentionChoice, PluginChoice
from nanovllm_core.config.settings import FIT, EngineConfig
from nanovllm_core.config.sources import LoadedConfig
from nanovllm_core.diagnostics.status import plugin_statuses, typical_requirements
from nanovllm_core.errors import NanoVLLMError, shown
from nanovllm_core.interfaces.attention import Phase
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.registry.kinds import EXTENSION, KINDS, Kind
from nanovllm_core.selection.attention import Candidate, evaluate
from nanovllm_core.selection.decisions import NAMED_KINDS, SEQUENCE, Decisions, compute_capability
from nanovllm_core.selection.fit import beaten, rivals
from nanovllm_core.selection.generation_config import FILE_NAME, describe_defaults

NOT_NAMED = "installed, and not named"


@dataclass(frozen=True, slots=True)
class Seam:
    """One decision. `others` says of each alternative why it was not taken.

    `problem` is why nothing could be chosen; an engine would stop with it.
    """

    name: str
    chosen: str = ""
    why: str = ""
    others: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    def to_json(self) -> Mapping[str, Any]:
        """The same as plain data."""
        return asdict(self)


def explain(loaded: LoadedConfig) -> list[Seam]:
    """Every decision, in the order of a start; problems are part of the answer."""
    view = View(loaded)
    seams: list[Seam] = []
    problems: list[NanoVLLMError] = []
    for name, decide in SEQUENCE.items():
        try:
            decide(view.decisions)
        except NanoVLLMError as error:
            known = any(error is problem for problem in problems)
            seams.append(
                Seam(name, problem="depends on the problem above" if known else str(error))
            )
            problems.append(error)
        else:
            seams.append(VIEWS[name](view, name))
    return seams


class View:
    """The decisions of a configuration, the sources of its values, and the other plugins."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.config: EngineConfig = loaded.config
        self.sources = loaded.sources
        self.decisions = Decisions(loaded.config)
        self.plugins = self.decisions.plugins

    @property
    def _device_type(self) -> str:
        """The device type that alternatives are checked for; the configured one as a fallback."""
        try:
            return self.decisions.device.split(":")[0]
        except NanoVLLMError:
            return self.config.device.split(":")[0]

    @property
    def _capability(self) -> tuple[int, int] | None:
        """The compute capability of the chosen GPU; None without one."""
        try:
            return compute_capability(self.decisions.device)
        except NanoVLLMError:
            return None

    def stated_where(self, path: str, automatic: str = "") -> str:
        """The source of the value at a path of the configuration; `automatic` if it is `auto`."""
        for known, source in self.sources.items():
            if f"{known}.".startswith(f"{path}."):
                return automatic or f"{path}, from {_source(source)}"
        return automatic or f"the default of {path}"

    def other_plugins(self, kind: str, *chosen: str) -> dict[str, str]:
        """The other plugins of a kind, and what speaks against each."""
        requirements = typical_requirements(self._device_type, self._capability)
        return {
            status.plugin.name: f"{status.state}: {'; '.join(status.reasons)}"
            if status.reasons
            else NOT_NAMED
            for status in plugin_statuses(self.plugins, requirements, kind)
            if status.plugin.name not in chosen
        }


# -------------------------------------------------------------------------------------- the views


def _checkpoint(view: View, name: str) -> Seam:
    source = view.decisions.source
    return Seam(
        name,
        f"{source.plugin.name}: {view.decisions.checkpoint}",
        f"{view.stated_where('model')}: {shown(view.config.model)}; {source.why}",
        view.other_plugins(source.plugin.kind, source.plugin.name),
    )


def _model(view: View, name: str) -> Seam:
    model, shape = view.decisions.model, view.decisions.shape
    others = view.other_plugins(model.kind, model.name)
    return Seam(
        name,
        f"{_label(model)}: {shape.num_layers} layers, {shape.num_heads} query and "
        f"{shape.num_kv_heads} KV heads of size {shape.head_size}",
        "the architecture in the checkpoint's config.json",
        {
            other: "the checkpoint has another architecture" if why == NOT_NAMED else why
            for other, why in others.items()
        },
    )


def _device(view: View, name: str) -> Seam:
    chosen = view.decisions.device
    if view.config.device != AUTO:
        return Seam(name, chosen, view.stated_where("device"))
    if chosen == "cpu":
        return Seam(name, chosen, "auto: the CPU", {"cuda": "torch sees no CUDA device"})
    return Seam(name, chosen, "auto: the first GPU", {"cpu": "a GPU is there"})


def _dtype(view: View, name: str) -> Seam:
    chosen = view.decisions.dtype
    if view.config.dtype != AUTO:
        return Seam(name, chosen, view.stated_where("dtype"))
    try:
        config = view.decisions.model_config
    except NanoVLLMError:  # a CPU computes in float32, whatever the checkpoint says
        return Seam(name, chosen, "auto: float32 on a CPU")
    stored = config.get("dtype") or config.get("torch_dtype")
    if view.decisions.device == "cpu":
        return Seam(name, chosen, f"auto: float32 on a CPU (the checkpoint says {stored})")
    return Seam(name, chosen, f"auto: as the checkpoint says ({stored or 'nothing, so bfloat16'})")


def _attention(view: View, name: str, phase: Phase) -> Seam:
    taken: Candidate = getattr(view.decisions.attention, phase)
    requirements = view.decisions.requirements(phase)
    choice: AttentionChoice = getattr(view.config.attention, phase)
    ask = partial(evaluate, view.plugins, requirements=requirements)
    able, others = rivals(view.plugins, "attention", choice, ask)
    others |= (
        beaten(taken, able)
        if choice.is_auto
        else dict.fromkeys((one.name for one in able), "it can serve, and is not named")
    )
    others.pop(taken.name, None)
    why = view.stated_where(
        f"attention.{phase}.backend", f"auto: rank {taken.rank}" if choice.is_auto else ""
    )
    return Seam(name, taken.label, why, others)


def _blocks(view: View, name: str) -> Seam:
    selection = view.decisions.attention
    pair = f"{selection.prefill.name} and {selection.decode.name}"
    if selection.prefill.name == selection.decode.name:
        pair = selection.decode.name
    automatic = f"the first layout that {pair} can read: multiples of "
    automatic += f"{selection.layout.block_multiple}, and 16 at least"
    given = view.config.cache.block_size is not None
    chosen = f"{selection.block_size} tokens, layout {selection.layout.name}"
    return Seam(name, chosen, view.stated_where("cache.block_size", "" if given else automatic))


def _kernels(view: View, name: str) -> Seam:
    selection, automatic = view.decisions.kernels, ""
    if view.config.kernels.is_auto:
        automatic = f"auto: rank {selection.rank}, the highest of those that fit"
    chosen = selection.chosen
    others = view.other_plugins(chosen.kind, chosen.name) | dict(selection.others)
    return Seam(name, _label(chosen), view.stated_where("kernels.name", automatic), others)


def _named(view: View, name: str, kind: Kind) -> Seam:
    """The plugins of a kind that the configuration names one by one."""
    chosen = view.decisions.named(kind.name)
    choices = getattr(view.config, kind.choice)
    path = f"{kind.choice}.{choices.KEY}" if isinstance(choices, PluginChoice) else kind.choice
    others = view.other_plugins(kind.name, *(one.name for one in chosen))
    return Seam(name, "; ".join(map(_label, chosen)) or "none", view.stated_where(path), others)


def _extensions(view: View, name: str) -> Seam:
    enabled = view.decisions.extensions
    others = view.other_plugins(EXTENSION, *enabled)
    return Seam(name, ", ".join(enabled) or "none", view.stated_where("plugins.enable"), others)


def _graphs(view: View, name: str) -> Seam:
    if view.decisions.cuda_graphs:
        sizes = view.config.graph_sizes
        rows = ", ".join(map(str, sizes if len(sizes) < 8 else (*sizes[:4], "...", sizes[-1])))
        why = view.stated_where("cuda_graphs", "a GPU, and no enforce_eager")
        prompts = view.decisions.prompt_graph_sizes
        beside = f", and with up to {prompts[-1]} prompt tokens" if prompts else ""
        reasons = "; ".join(view.decisions.attention.eager_prefill_reasons)
        others = {} if prompts else {"with prompts": reasons or view.stated_where("cuda_graphs")}
        return Seam(name, f"captured for {rows} rows{beside}", why, others)
    if view.decisions.device == "cpu":
        return Seam(name, "none", "a CPU has none")
    return Seam(name, "none", view.stated_where("cuda_graphs.enforce_eager"))


def _length(view: View, name: str) -> Seam:
    chosen, asked = view.decisions.max_model_len, view.config.limits.max_model_len
    said, blocks = view.stated_where("limits.max_model_len"), view.config.cache.num_blocks
    if asked is None:
        said = "the model's own limit (max_position_embeddings)"
    if asked != FIT:
        return Seam(name, f"{chosen} tokens", said)
    # Known where the number of blocks is; otherwise an engine that starts measures it.
    if blocks is None:
        why = f"{said}: fit; the memory that is left as an engine starts decides"
        return Seam(name, f"at most {chosen} tokens", why)
    from nanovllm_core.worker.kv_cache import fitting_length  # torch comes with it

    fitting = fitting_length(blocks, view.decisions.block_size, chosen)
    return Seam(name, f"{fitting} tokens", f"{said}: fit; cache.num_blocks decides")


def _sampling_defaults(view: View, name: str) -> Seam:
    is_read = view.config.generation_config != "none"
    why = view.stated_where("generation_config", f"the checkpoint's {FILE_NAME}" if is_read else "")
    return Seam(name, describe_defaults(view.decisions.sampling_defaults), why)


def _stated(view: View, name: str, path: str) -> Seam:
    return Seam(name, str(SEQUENCE[name](view.decisions)), view.stated_where(path))


VIEWS: Mapping[str, Callable[[View, str], Seam]] = {
    "extensions": _extensions,
    "checkpoint": _checkpoint,
    "model": _model,
    "device": _device,
    "dtype": _dtype,
    "attention, prefill": partial(_attention, phase="prefill"),
    "attention, decode": partial(_attention, phase="decode"),
    "KV blocks": _blocks,
    **{name: partial(_named, kind=KINDS[kind]) for name, kind in NAMED_KINDS.items()},
    "kernels": _kernels,
    "sampling defaults": _sampling_defaults,
    "CUDA graphs": _graphs,
    "longest sequence": _length,
    "sequences at once": partial(_stated, path="limits.max_num_seqs"),
    "tokens per step": partial(_stated, path="limits.max_num_batched_tokens"),
    "steps ahead": partial(_stated, path="steps_ahead"),
}
"""The words for each decision of `SEQUENCE` that was made."""


def problems(seams: Sequence[Seam]) -> list[str]:
    """Why an engine would not start; empty where it would."""
    return [f"{seam.name}: {seam.problem}" for seam in seams if seam.problem]


def _label(plugin: ResolvedPlugin) -> str:
    given = plugin.options.model_dump()
    options = ", ".join(f"{key}={shown(value)}" for key, value in given.items())
    text = f"{plugin.name} {plugin.version}, {plugin.distribution}"
    return f"{text} ({options})" if options else text


def _source(source: str) -> str:
    return "the command line" if source == "argument" else source
