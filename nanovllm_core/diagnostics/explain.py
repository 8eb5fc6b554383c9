"""What a configuration chooses at each seam, and why each alternative was not: `nanovllm explain`.

The decisions are those of `startup`, asked one by one: no weight is read, nothing is allocated.
Where one fails, those that do not depend on it are still explained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nanovllm_core.config.choices import AttentionChoice
from nanovllm_core.config.settings import FIT, EngineConfig
from nanovllm_core.config.sources import LoadedConfig
from nanovllm_core.diagnostics.status import plugin_statuses, typical_requirements
from nanovllm_core.errors import NanoVLLMError, shown
from nanovllm_core.interfaces.attention import Phase
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.registry.kinds import EXTENSION
from nanovllm_core.registry.manager import get_plugin_manager, load_object
from nanovllm_core.selection import startup
from nanovllm_core.selection.attention import Selection, able_backends, evaluate
from nanovllm_core.selection.checkpoint import find_checkpoint, find_source
from nanovllm_core.selection.generation_config import FILE_NAME, describe_defaults
from nanovllm_core.selection.plugins import kernel_set_name, select_kernels, select_sampler

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
    """Every seam, in the order in which an engine decides; problems are part of the answer."""
    decisions = Decisions(loaded)
    seams: list[Seam] = []
    for name, decide in SEAMS.items():
        try:
            seams.append(decide(decisions, name))
        except NanoVLLMError as error:
            known = any(seam.problem == str(error) for seam in seams)
            seams.append(
                Seam(name, problem="depends on the problem above" if known else str(error))
            )
    return seams


class Decisions:
    """What `startup.start` would decide, each when it is first asked for."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.config: EngineConfig = loaded.config
        self.sources = loaded.sources
        self.plugins = get_plugin_manager(disable=self.config.plugins.disable)

    @cached_property
    def checkpoint(self) -> Path:
        return find_checkpoint(self.plugins, self.config.model)

    @cached_property
    def model_config(self) -> Mapping[str, Any]:
        return startup.read_model_config(self.checkpoint)

    @cached_property
    def model(self) -> ResolvedPlugin:
        architecture = startup.read_architecture(self.model_config, self.checkpoint)
        return startup.find_model(self.plugins, architecture, self.checkpoint)

    @cached_property
    def shape(self) -> ModelShape:
        return startup.read_shape(self.model, self.model_config, self.checkpoint)

    @cached_property
    def device(self) -> str:
        return startup.resolve_device(self.config.device)

    @cached_property
    def dtype(self) -> str:
        return startup.resolve_dtype(self.config.dtype, self.device, self.model_config)

    @cached_property
    def cuda_graphs(self) -> bool:
        return startup.uses_cuda_graphs(self.config, self.device)

    @cached_property
    def attention(self) -> Selection:
        return startup.choose_attention(
            self.plugins, self.config, self.shape, self.device, self.dtype, self.cuda_graphs
        )

    @cached_property
    def prompt_graph_sizes(self) -> tuple[int, ...]:
        return startup.prompt_graph_sizes(self.config, self.attention, self.device)

    @cached_property
    def _device_type(self) -> str:
        """What alternatives are asked about; a device that is not there has no alternatives."""
        try:
            return self.device.split(":")[0]
        except NanoVLLMError:
            return self.config.device.split(":")[0]

    def said(self, path: str, automatic: str = "") -> str:
        """Who said the value at a path of the configuration; `automatic` where it is `auto`."""
        for known, source in self.sources.items():
            if f"{known}.".startswith(f"{path}."):
                return automatic or f"{path}, from {_source(source)}"
        return automatic or f"the default of {path}"

    def other_plugins(self, kind: str, *chosen: str) -> dict[str, str]:
        """The other plugins of a kind, and what speaks against each."""
        requirements = typical_requirements(self._device_type, None)
        return {
            status.plugin.name: f"{status.state}: {'; '.join(status.reasons)}"
            if status.reasons
            else NOT_NAMED
            for status in plugin_statuses(self.plugins, requirements, kind)
            if status.plugin.name not in chosen
        }


# -------------------------------------------------------------------------------------- the seams


def _checkpoint(decisions: Decisions, name: str) -> Seam:
    model = decisions.config.model
    source = find_source(decisions.plugins, model)
    return Seam(
        name,
        f"{source.plugin.name}: {decisions.checkpoint}",
        f"{decisions.said('model')}: {shown(model)}; {source.why}",
        decisions.other_plugins("checkpoint", source.plugin.name),
    )


def _model(decisions: Decisions, name: str) -> Seam:
    model, shape = decisions.model, decisions.shape
    others = decisions.other_plugins("model", model.name)
    return Seam(
        name,
        f"{_label(_importable(model))}: {shape.num_layers} layers, {shape.num_heads} query and "
        f"{shape.num_kv_heads} KV heads of size {shape.head_size}",
        "the architecture in the checkpoint's config.json",
        {
            other: "the checkpoint has another architecture" if why == NOT_NAMED else why
            for other, why in others.items()
        },
    )


def _device(decisions: Decisions, name: str) -> Seam:
    asked, chosen = decisions.config.device, decisions.device
    if asked != "auto":
        return Seam(name, chosen, decisions.said("device"))
    if chosen == "cpu":
        return Seam(name, chosen, "auto: the CPU", {"cuda": "torch sees no CUDA device"})
    return Seam(name, chosen, "auto: the first GPU", {"cpu": "a GPU is there"})


def _dtype(decisions: Decisions, name: str) -> Seam:
    chosen = decisions.dtype
    automatic = ""
    if decisions.config.dtype == "auto":
        stored = decisions.model_config.get("dtype") or decisions.model_config.get("torch_dtype")
        automatic = (
            f"auto: float32 on a CPU (the checkpoint says {stored})"
            if decisions.device == "cpu"
            else f"auto: as the checkpoint says ({stored or 'nothing, so bfloat16'})"
        )
    return Seam(name, chosen, decisions.said("dtype", automatic))


def _attention(phase: Phase) -> Callable[[Decisions, str], Seam]:
    def decide(decisions: Decisions, name: str) -> Seam:
        chosen = getattr(decisions.attention, phase).name
        asked = getattr(decisions.config.attention, phase)
        requirements = startup.attention_requirements(
            phase,
            decisions.config,
            decisions.shape,
            decisions.device,
            decisions.dtype,
            decisions.cuda_graphs,
        )
        # The others are asked with their defaults, the chosen one with the options it was given.
        taken = evaluate(
            decisions.plugins, AttentionChoice(backend=chosen, options=asked.options), requirements
        )
        able, others = able_backends(decisions.plugins, requirements)
        others |= {
            candidate.resolved.name: f"it can serve, with rank {candidate.rank}; {chosen} has "
            f"{taken.rank}"
            if asked.backend == "auto"
            else "it can serve, and is not named"
            for candidate in able
        }
        others.pop(chosen, None)
        automatic = f"auto: rank {taken.rank}" if asked.backend == "auto" else ""
        why = decisions.said(f"attention.{phase}.backend", automatic)
        _importable(taken.resolved)
        return Seam(name, taken.label, why, others)

    return decide


def _pages(decisions: Decisions, name: str) -> Seam:
    selection = decisions.attention
    chosen = f"{selection.block_size} tokens, layout {selection.layout.name}"
    pair = f"{selection.prefill.name} and {selection.decode.name}"
    if selection.prefill.name == selection.decode.name:
        pair = selection.decode.name
    automatic = f"the first layout that {pair} can read: multiples of "
    automatic += f"{selection.layout.page_multiple}, and 16 at least"
    given = decisions.config.cache.block_size is not None
    blocks = decisions.config.cache.num_blocks
    if blocks is not None and decisions.config.limits.max_model_len != FIT:
        length = startup.resolve_max_model_len(decisions.config, decisions.shape)
        from nanovllm_core.worker.kv_cache import check_one_sequence_fits  # torch comes with it

        check_one_sequence_fits(blocks, selection.block_size, length, given=True)
    return Seam(name, chosen, decisions.said("cache.block_size", "" if given else automatic))


def _kernels(decisions: Decisions, name: str) -> Seam:
    choice = decisions.config.kernels
    chosen = select_kernels(decisions.plugins, choice, decisions.device)
    automatic = f"auto: the core's own for {decisions.device}" if choice.name == "auto" else ""
    others = decisions.other_plugins("kernels", kernel_set_name(choice, decisions.device))
    return Seam(
        name, _label(_importable(chosen)), decisions.said("kernels.name", automatic), others
    )


def _sampler(decisions: Decisions, name: str) -> Seam:
    choice = decisions.config.sampler
    chosen = select_sampler(decisions.plugins, choice, decisions.device, decisions.cuda_graphs)
    others = decisions.other_plugins("sampler", choice.name)
    return Seam(name, _label(_importable(chosen)), decisions.said("sampler.name"), others)


def _scheduler(decisions: Decisions, name: str) -> Seam:
    return _named(decisions, name, "scheduler")


def _executor(decisions: Decisions, name: str) -> Seam:
    startup.check_tensor_parallel_size(decisions.plugins, decisions.config)
    return _named(decisions, name, "executor")


def _named(decisions: Decisions, name: str, kind: str) -> Seam:
    choice = getattr(decisions.config, kind)
    chosen = decisions.plugins.resolve(kind, choice.name, choice.options, f"{kind}.options")
    others = decisions.other_plugins(kind, choice.name)
    return Seam(name, _label(_importable(chosen)), decisions.said(f"{kind}.name"), others)


def _several(kind: str, path: str) -> Callable[[Decisions, str], Seam]:
    def decide(decisions: Decisions, name: str) -> Seam:
        choices = getattr(decisions.config, path)
        chosen = [
            _importable(
                decisions.plugins.resolve(
                    kind, choice.name, choice.options, f"{path}[{index}].options"
                )
            )
            for index, choice in enumerate(choices)
        ]
        others = decisions.other_plugins(kind, *(choice.name for choice in choices))
        return Seam(name, "; ".join(map(_label, chosen)) or "none", decisions.said(path), others)

    return decide


def _extensions(decisions: Decisions, name: str) -> Seam:
    enabled = decisions.config.plugins.enable
    decisions.plugins.enable(enabled)
    others = decisions.other_plugins(EXTENSION, *enabled)
    return Seam(name, ", ".join(enabled) or "none", decisions.said("plugins.enable"), others)


def _graphs(decisions: Decisions, name: str) -> Seam:
    if decisions.cuda_graphs:
        sizes = decisions.config.graph_sizes
        shown = ", ".join(map(str, sizes if len(sizes) < 8 else (*sizes[:4], "...", sizes[-1])))
        why = decisions.said("cuda_graphs", "a GPU, and no enforce_eager")
        prompts = decisions.prompt_graph_sizes
        beside = f", and with up to {prompts[-1]} prompt tokens" if prompts else ""
        reasons = "; ".join(decisions.attention.eager_prompts)
        others = {} if prompts else {"with prompts": reasons or decisions.said("cuda_graphs")}
        return Seam(name, f"captured for {shown} rows{beside}", why, others)
    if decisions.device == "cpu":
        return Seam(name, "none", "a CPU has none")
    return Seam(name, "none", decisions.said("cuda_graphs.enforce_eager"))


def _length(decisions: Decisions, name: str) -> Seam:
    chosen = startup.resolve_max_model_len(decisions.config, decisions.shape)
    if decisions.config.limits.max_model_len == FIT:
        return _fitting_length(decisions, name, chosen)
    given = decisions.config.limits.max_model_len is not None
    automatic = "" if given else "the model's own limit (max_position_embeddings)"
    return Seam(name, f"{chosen} tokens", decisions.said("limits.max_model_len", automatic))


def _sampling_defaults(decisions: Decisions, name: str) -> Seam:
    chosen = describe_defaults(
        startup.resolve_sampling_defaults(decisions.config, decisions.checkpoint)
    )
    automatic = (
        "" if decisions.config.generation_config == "none" else f"the checkpoint's {FILE_NAME}"
    )
    return Seam(name, chosen, decisions.said("generation_config", automatic))


def _fitting_length(decisions: Decisions, name: str, most: int) -> Seam:
    """Known where the number of pages is; otherwise an engine that starts measures it."""
    said, blocks = decisions.said("limits.max_model_len"), decisions.config.cache.num_blocks
    if blocks is None:
        why = f"{said}: fit; the memory that is left as an engine starts decides"
        return Seam(name, f"at most {most} tokens", why)
    from nanovllm_core.worker.kv_cache import fitting_length  # torch comes with it

    chosen = fitting_length(blocks, decisions.attention.block_size, most)
    return Seam(name, f"{chosen} tokens", f"{said}: fit; cache.num_blocks decides")


def _limit(path: str, unit: str) -> Callable[[Decisions, str], Seam]:
    def decide(decisions: Decisions, name: str) -> Seam:
        value: Any = decisions.config
        for part in path.split("."):
            value = getattr(value, part)
        return Seam(name, f"{value} {unit}".strip(), decisions.said(path))

    return decide


SEAMS: Mapping[str, Callable[[Decisions, str], Seam]] = {
    "checkpoint": _checkpoint,
    "model": _model,
    "device": _device,
    "dtype": _dtype,
    "attention, prefill": _attention("prefill"),
    "attention, decode": _attention("decode"),
    "KV pages": _pages,
    "kernels": _kernels,
    "sampler": _sampler,
    "sampling defaults": _sampling_defaults,
    "logits processors": _several("logits_processor", "logits_processors"),
    "scheduler": _scheduler,
    "executor": _executor,
    "observers": _several("observer", "observers"),
    "extensions": _extensions,
    "CUDA graphs": _graphs,
    "longest sequence": _length,
    "sequences at once": _limit("limits.max_num_seqs", ""),
    "tokens per step": _limit("limits.max_num_batched_tokens", ""),
    "steps ahead": _limit("steps_ahead", ""),
}
"""In the order in which they are shown."""


def problems(seams: Sequence[Seam]) -> list[str]:
    """Why an engine would not start; empty where it would."""
    return [f"{seam.name}: {seam.problem}" for seam in seams if seam.problem]


def _importable(plugin: ResolvedPlugin) -> ResolvedPlugin:
    """The same; PluginLoadError where its code cannot be imported, at which an engine stops."""
    load_object(plugin)
    return plugin


def _label(plugin: ResolvedPlugin) -> str:
    options = ", ".join(f"{key}={shown(value)}" for key, value in plugin.options.items())
    text = f"{plugin.name} {plugin.version}, {plugin.distribution}"
    return f"{text} ({options})" if options else text


def _source(source: str) -> str:
    return "the command line" if source == "argument" else source
