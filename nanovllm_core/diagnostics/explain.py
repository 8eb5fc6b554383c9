"""The choice at each seam for a configuration, and why each alternative lost: `nanovllm explain`.

The decisions are those of a start, in its sequence (`nanovllm_core.selection.decisions`); here are
the words for them. Where one fails, those that do not depend on it are still explained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from nanovllm_core.config.choices import AUTO, AttentionChoice, PluginChoice
from nanovllm_core.config.settings import FIT
from nanovllm_core.config.sources import LoadedConfig
from nanovllm_core.diagnostics.status import plugin_statuses, typical_requirements
from nanovllm_core.errors import NanoVLLMError, shown
from nanovllm_core.interfaces.attention import Phase
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.registry.kinds import EXTENSION, KINDS, Kind
from nanovllm_core.selection.attention import SMALLEST_BLOCK, Candidate, evaluate_layers
from nanovllm_core.selection.decisions import (
    BY_SIZE,
    NAMED_KINDS,
    SEQUENCE,
    Decisions,
    compute_capability,
)
from nanovllm_core.selection.fit import beaten, rivals
from nanovllm_core.selection.generation_config import FILE_NAME, describe_defaults

NOT_NAMED = "installed, and not named"

Words = tuple[str, str, Mapping[str, str]]
"""The choice, why it was made, and why each alternative was not."""


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


def explain(loaded: LoadedConfig) -> list[Seam]:
    """Every decision, in the order of a start; problems are part of the answer."""
    view = View(loaded)
    seams: list[Seam] = []
    problems: list[NanoVLLMError] = []
    for name, decide in SEQUENCE.items():
        try:
            decide(view)
            seams.append(Seam(name, *VIEWS[name](view)))
        except NanoVLLMError as error:
            said = "depends on the problem above" if error in problems else str(error)
            seams.append(Seam(name, problem=said))
            problems.append(error)
    return seams


class View(Decisions):
    """The decisions of a configuration, the sources of its values, and the other plugins."""

    def __init__(self, loaded: LoadedConfig) -> None:
        super().__init__(loaded.config)
        self.sources = loaded.sources

    def stated_where(self, path: str, automatic: str = "") -> str:
        """The source of the value at a path of the configuration; `automatic` if it is `auto`."""
        if automatic:
            return automatic
        for known, source in self.sources.items():
            if f"{known}.".startswith(f"{path}."):
                return f"{path}, from {'the command line' if source == 'argument' else source}"
        return f"the default of {path}"

    def other_plugins(self, kind: str, *chosen: str) -> dict[str, str]:
        """The other plugins of a kind, and what speaks against each.

        They are checked for the chosen device; for the configured one where that is not there.
        """
        try:
            device = self.device
            requirements = typical_requirements(device, compute_capability(device))
        except NanoVLLMError:
            requirements = typical_requirements(self.config.device, None)
        return {
            status.plugin.name: f"{status.state}: {'; '.join(status.reasons)}"
            if status.reasons
            else NOT_NAMED
            for status in plugin_statuses(self.plugins, requirements, kind)
            if status.plugin.name not in chosen
        }


# -------------------------------------------------------------------------------------- the views


def _checkpoint(view: View) -> Words:
    source = view.source
    return (
        f"{source.plugin.name}: {view.checkpoint}",
        f"{view.stated_where('model')}: {shown(view.config.model)}; {source.why}",
        view.other_plugins(source.plugin.kind, source.plugin.name),
    )


def _model(view: View) -> Words:
    model, shape = view.model, view.shape
    others = view.other_plugins(model.kind, model.name)
    return (
        f"{_label(model)}: {shape.num_layers} layers, {shape.num_heads} query and "
        f"{shape.num_kv_heads} KV heads of size {shape.head_size}",
        "the architecture in the checkpoint's config.json",
        {
            other: "the checkpoint has another architecture" if why == NOT_NAMED else why
            for other, why in others.items()
        },
    )


def _device(view: View) -> Words:
    chosen = view.device
    if view.config.device != AUTO:
        return chosen, view.stated_where("device"), {}
    if chosen == "cpu":
        return chosen, "auto: the CPU", {"cuda": "torch sees no CUDA device"}
    return chosen, "auto: the first GPU", {"cpu": "a GPU is there"}


def _dtype(view: View) -> Words:
    if view.config.dtype != AUTO:
        why = view.stated_where("dtype")
    elif view.device == "cpu":
        why = "auto: float32 on a CPU"
    else:
        config = view.model_config
        stored = config.get("dtype") or config.get("torch_dtype") or "nothing, so bfloat16"
        why = f"auto: as the checkpoint says ({stored})"
    return view.dtype, why, {}


def _attention(view: View, phase: Phase) -> Words:
    taken: Candidate = getattr(view.attention, phase)
    choice: AttentionChoice = getattr(view.config.attention, phase)
    ask = partial(evaluate_layers, view.plugins, asked=view.requirements(phase))
    able, others = rivals(view.plugins, "attention", choice, ask)
    if choice.is_auto:
        others |= beaten(taken, able)
    else:
        others |= dict.fromkeys((one.name for one in able), "it can serve, and is not named")
    others.pop(taken.name, None)
    automatic = f"auto: rank {taken.rank}" if choice.is_auto else ""
    return taken.label, view.stated_where(f"attention.{phase}.backend", automatic), others


def _blocks(view: View) -> Words:
    selection, automatic = view.attention, ""
    if view.config.cache.block_size is None:
        pair = " and ".join(dict.fromkeys((selection.prefill.name, selection.decode.name)))
        automatic = f"the first layout that {pair} can read: multiples of "
        automatic += f"{selection.layout.block_multiple}, and {SMALLEST_BLOCK} at least"
    chosen = f"{selection.block_size} tokens, layout {selection.layout.name}"
    return chosen, view.stated_where("cache.block_size", automatic), {}


def _kernels(view: View) -> Words:
    selection = view.kernels
    automatic = f"auto: rank {selection.rank}, the highest of those that fit"
    chosen, why, others = _named(view, KINDS["kernels"], automatic)
    return chosen, why, {**others, **selection.others}


def _named(view: View, kind: Kind, automatic: str = "") -> Words:
    """The plugins that the configuration names, of a kind; `automatic` is why, for `auto`."""
    chosen = view.named(kind.name)
    if kind.name in BY_SIZE:
        size = BY_SIZE[kind.name][0]
        automatic = f"auto: {size} is {getattr(view.config, size)}"
    path, choices = kind.choice, getattr(view.config, kind.choice)
    if isinstance(choices, PluginChoice):
        path, automatic = f"{path}.{choices.KEY}", automatic if choices.is_auto else ""
    others = view.other_plugins(kind.name, *(one.name for one in chosen))
    return "; ".join(map(_label, chosen)) or "none", view.stated_where(path, automatic), others


def _extensions(view: View) -> Words:
    enabled = view.extensions
    others = view.other_plugins(EXTENSION, *enabled)
    return ", ".join(enabled) or "none", view.stated_where("plugins.enable"), others


def _sampling_defaults(view: View) -> Words:
    is_read = view.config.generation_config != "none"
    why = view.stated_where("generation_config", f"the checkpoint's {FILE_NAME}" if is_read else "")
    return describe_defaults(view.sampling_defaults), why, {}


def _graphs(view: View) -> Words:
    if view.device == "cpu":
        return "none", "a CPU has none", {}
    if not view.cuda_graphs:
        return "none", view.stated_where("cuda_graphs.enforce_eager"), {}
    sizes = view.config.graph_sizes
    rows = ", ".join(map(str, sizes if len(sizes) < 8 else (*sizes[:4], "...", sizes[-1])))
    why = view.stated_where("cuda_graphs", "a GPU, and no enforce_eager")
    if prompts := view.prompt_graph_sizes:
        return f"captured for {rows} rows, and with up to {prompts[-1]} prompt tokens", why, {}
    reasons = "; ".join(view.attention.eager_prefill_reasons)
    others = {"with prompts": reasons or view.stated_where("cuda_graphs")}
    return f"captured for {rows} rows", why, others


def _length(view: View) -> Words:
    chosen, asked = view.max_model_len, view.config.limits.max_model_len
    said, blocks = view.stated_where("limits.max_model_len"), view.config.cache.num_blocks
    if asked is None:
        said = "the model's own limit (max_position_embeddings)"
    if asked != FIT:
        return f"{chosen} tokens", said, {}
    # Known where the number of blocks is; otherwise an engine that starts measures it.
    if blocks is None:
        why = f"{said}: fit; the memory that is left as an engine starts decides"
        return f"at most {chosen} tokens", why, {}
    fitting = view.sequence_need(view.block_size).fitting_length(blocks, chosen)
    return f"{fitting} tokens", f"{said}: fit; cache.num_blocks decides", {}


def _stated(view: View, path: str) -> Words:
    return str(attrgetter(path)(view.config)), view.stated_where(path), {}


VIEWS: Mapping[str, Callable[[View], Words]] = {
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


def _label(plugin: ResolvedPlugin) -> str:
    given = plugin.options.model_dump()
    options = ", ".join(f"{key}={shown(value)}" for key, value in given.items())
    text = f"{plugin.name} {plugin.version}, {plugin.distribution}"
    return f"{text} ({options})" if options else text
