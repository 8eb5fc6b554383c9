"""Every choice of a start, in one sequence: `start` runs through it, `explain` walks it.

A decision follows from the configuration and from other decisions. It is made once, when it is
first read. If it fails, each decision that needs it fails with the same error. No weight is read,
and nothing is allocated on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from nanovllm_core.config.choices import AUTO, PluginChoice, SamplerSettings, plugins_named
from nanovllm_core.config.settings import FIT, EngineConfig, check_device
from nanovllm_core.errors import (
    ArchitectureError,
    ConfigError,
    DeviceError,
    ExecutorError,
    NanoVLLMError,
    PluginNotFoundError,
    clip,
    describe_error,
    shown,
)
from nanovllm_core.interfaces.absorption import most_captured_tokens
from nanovllm_core.interfaces.attention import AttentionRequirements, Phase
from nanovllm_core.interfaces.cache_groups import SequenceNeed, make_groups
from nanovllm_core.interfaces.model import UNREADABLE_ERRORS, AttentionShape, ModelShape
from nanovllm_core.interfaces.specs import ResolvedPlugin, SamplerSpec
from nanovllm_core.registry.kinds import KINDS
from nanovllm_core.registry.manager import PluginManager, get_plugin_manager
from nanovllm_core.registry.objects import load_object
from nanovllm_core.selection.attention import Asked, Selection, select_attention
from nanovllm_core.selection.checkpoint import CheckpointSource, fetch_checkpoint, find_source
from nanovllm_core.selection.checkpoint_files import CONFIG_NAME, read_model_config
from nanovllm_core.selection.fit import Candidate, select, unmet_device
from nanovllm_core.selection.generation_config import read_sampling_defaults
from nanovllm_core.selection.kernels import KernelSelection, KernelTarget, select_kernels

T = TypeVar("T")


class decision(Generic[T]):  # noqa: N801 - used as `property` is
    """A property that is computed once; its error is kept, too, and raised again."""

    def __init__(self, decide: Callable[[Any], T]) -> None:
        self._decide = decide
        self.__doc__ = decide.__doc__

    def __get__(self, decisions: Decisions, owner: type) -> T:
        return decisions.once(self._decide)


class Decisions:
    """The choices that a configuration resolves to, each made when it is first read."""

    def __init__(self, config: EngineConfig, plugins: PluginManager | None = None) -> None:
        self.config = config
        self.plugins = plugins or get_plugin_manager(disable=config.plugins.disable)
        self._made: dict[object, Any] = {}

    def once(self, decide: Callable[[Decisions], T], key: object = None) -> T:
        """`decide(self)`, from memory after the first time; a NanoVLLMError is remembered too."""
        key = key or decide
        if key not in self._made:
            try:
                self._made[key] = decide(self)
            except NanoVLLMError as error:
                self._made[key] = error
        made: T = self._made[key]
        if isinstance(made, NanoVLLMError):
            raise made
        return made

    @decision
    def source(self) -> CheckpointSource:
        """The checkpoint plugin that gives the model, and why that one."""
        return find_source(self.plugins, self.config.model)

    @decision
    def checkpoint(self) -> Path:
        """The checkpoint's folder."""
        return fetch_checkpoint(self.source, self.config.model)

    @decision
    def model_config(self) -> Mapping[str, Any]:
        """The checkpoint's config.json."""
        return read_model_config(self.checkpoint)

    @decision
    def model(self) -> ResolvedPlugin:
        """The plugin for the checkpoint's architecture; its code is not imported yet."""
        file, architectures = self.checkpoint / CONFIG_NAME, self.model_config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise ArchitectureError(
                f"{file}: architectures={shown(architectures)} names no architecture; expected a "
                'list such as ["Qwen3ForCausalLM"]'
            )
        try:
            return self.plugins.resolve("model", str(architectures[0]), {}, path="model")
        except PluginNotFoundError as error:
            raise ArchitectureError(
                f"{file}: no installed plugin runs the architecture {shown(architectures[0])}; "
                f"install one that does, or use another checkpoint. {error}"
            ) from error

    @decision
    def shape(self) -> ModelShape:
        """The facts that the model plugin reads in config.json."""
        implementation, config = load_object(self.model), self.model_config
        try:
            return cast(ModelShape, implementation.shape(config))
        except UNREADABLE_ERRORS as error:
            raise ArchitectureError(
                f"{self.checkpoint / CONFIG_NAME} cannot be read by {self.model}: "
                f"{clip(describe_error(error), 1000)}; correct that setting or fetch the file "
                "again, or correct the plugin if it is at fault"
            ) from error

    @decision
    def device(self) -> str:
        """`cpu` or `cuda:N`."""
        return resolve_device(self.config.device)

    @decision
    def dtype(self) -> str:
        """The number format of weights and computation; `auto` is float32 on a CPU."""
        if self.config.dtype != AUTO:
            return self.config.dtype
        if self.device == "cpu":
            return "float32"
        config = self.model_config
        stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        if stored not in ("float32", "float16", "bfloat16"):
            raise ConfigError(
                f"dtype: auto follows the checkpoint, which says {shown(stored)}; choose float32, "
                "float16 or bfloat16"
            )
        return stored

    @property
    def cuda_graphs(self) -> bool:
        """Whether steps are captured."""
        return self.device.startswith("cuda") and not self.config.cuda_graphs.enforce_eager

    def requirements(self, phase: Phase) -> Asked:
        """The requirements of one phase on a backend that has the heads of one rank."""
        asked: dict[AttentionRequirements, list[int]] = {}
        shape = self.shape.on_rank(self.config.tensor_parallel_size)
        for layer, of_rank in enumerate(shape.attention_shapes):
            num_kv_heads, head_size, value_size = _key_value_heads(of_rank, phase)
            requirements = AttentionRequirements(
                phase=phase,
                device=self.device.split(":")[0],
                dtype=self.dtype,
                num_heads=of_rank.num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                compute_capability=compute_capability(self.device),
                cuda_graphs=self.cuda_graphs and phase == "decode",
                block_size=self.config.cache.block_size,
                sliding_window=of_rank.sliding_window is not None,
                soft_cap=of_rank.soft_cap is not None,
                latent=of_rank.latent is not None,
                value_size=value_size,
            )
            asked.setdefault(requirements, []).append(layer)
        return asked

    @decision
    def attention(self) -> Selection:
        """The backend of each phase, and the blocks that they share."""
        prefill, decode = self.requirements("prefill"), self.requirements("decode")
        selection = select_attention(self.plugins, self.config.attention, prefill, decode)
        for candidate in (selection.prefill, selection.decode):
            load_object(candidate.resolved)
        return selection

    @decision
    def block_size(self) -> int:
        """Tokens of a block; OutOfMemoryError where `cache.num_blocks` hold no sequence."""
        blocks, block_size = self.config.cache.num_blocks, self.attention.block_size
        if blocks is not None:
            least = 2 if self.config.limits.max_model_len == FIT else self.max_model_len
            self.sequence_need(block_size).check_fits(blocks, least, given=True)
        return block_size

    def sequence_need(self, block_size: int) -> SequenceNeed:
        """What one sequence takes of the KV cache."""
        shape = self.shape.on_rank(self.config.tensor_parallel_size)
        windows = [group.sliding_window for group in make_groups(shape)]
        return SequenceNeed(windows, block_size, self.config.limits.max_num_batched_tokens)

    @decision
    def kernels(self) -> KernelSelection:
        """The kernel set, and why that one."""
        capability = compute_capability(self.device)
        target = KernelTarget(device=self.device, dtype=self.dtype, compute_capability=capability)
        return select_kernels(self.plugins, self.config.kernels, target)

    def named(self, kind: str) -> tuple[ResolvedPlugin, ...]:
        """The plugins of a kind that the configuration names, in its order; not for attention.

        The code of each has been imported.
        """
        return self.once(partial(_choose, kind=kind), kind)

    @decision
    def sampling_defaults(self) -> Mapping[str, float]:
        """The checkpoint's sampling defaults; none if the configuration says `none`."""
        if self.config.generation_config == "none":
            return {}
        return read_sampling_defaults(self.checkpoint)

    @decision
    def extensions(self) -> tuple[str, ...]:
        """The extensions that are enabled, loaded."""
        self.plugins.enable(self.config.plugins.enable)
        return self.config.plugins.enable

    @decision
    def prompt_graph_sizes(self) -> tuple[int, ...]:
        """The prompt tokens that steps are padded to, so that they can be captured.

        None on a CPU, and none where the prefill backend cannot be captured, or steps of the size
        are faster without; ConfigError where the configuration names such sizes. Eager steps are
        padded alike.
        """
        if not self.device.startswith("cuda"):
            return ()
        named, most = self.config.cuda_graphs.prompt_sizes, most_captured_tokens(self.shape)
        if not self.attention.eager_prefill_reasons:
            if named and named[-1] > most:
                raise ConfigError(
                    f"cuda_graphs.prompt_sizes: {list(named)}, but steps with more than {most} "
                    "prompt tokens of latent attention are faster without a graph; leave out "
                    "larger sizes"
                )
            return tuple(size for size in self.config.prompt_graph_sizes if size <= most)
        if named:
            raise ConfigError(
                f"cuda_graphs.prompt_sizes: {list(named)}, but of "
                f"attention {self.attention.prefill.name!r}: "
                f"{'; '.join(self.attention.eager_prefill_reasons)}; leave prompt_sizes out, or "
                "choose another prefill backend"
            )
        return ()

    @decision
    def max_model_len(self) -> int:
        """The longest sequence; where the configuration says `fit`, a bound."""
        asked, trained = self.config.limits.max_model_len, self.shape.max_position
        if not isinstance(asked, int):
            return trained
        if asked > trained:
            raise ConfigError(
                f"limits.max_model_len: {asked} is beyond the {trained} positions that the model "
                f"was trained for (max_position_embeddings); use at most {trained}"
            )
        return asked


def _key_value_heads(shape: AttentionShape, phase: Phase) -> tuple[int, int, int | None]:
    """What a phase attends with: KV heads, their size, and the size of values where it differs."""
    if shape.latent is None:
        return shape.num_kv_heads, shape.head_size, None
    if phase == "decode":
        return shape.num_kv_heads, shape.head_size, shape.latent.latent_size
    return shape.num_heads, shape.latent.key_size, shape.latent.value_size


def resolve_device(device: str) -> str:
    """`auto` -> the first GPU, or the CPU; DeviceError for a GPU that is not there."""
    try:
        if check_device(device) == "cpu":
            return device
    except ValueError as error:
        raise DeviceError(f"device: {shown(device)} {error}") from None
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == AUTO:
        return "cuda:0" if count else "cpu"
    index = int(device.partition(":")[2] or 0)
    if not count:
        raise DeviceError(
            f"device: {shown(device)}, but torch {torch.__version__} sees no CUDA device; use "
            "device: cpu (or auto), or install a CUDA build of torch and the driver"
        )
    if index >= count:
        seen = ", ".join(f"cuda:{each}" for each in range(count))
        raise DeviceError(f"device: {shown(device)}, but torch sees only {seen}; use one of these")
    return f"cuda:{index}"


def compute_capability(device: str) -> tuple[int, int] | None:
    """Of a GPU ("cuda:0"), such as (9, 0); None of a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return torch.cuda.get_device_capability(device)


def select_sampler(
    plugins: PluginManager, choice: SamplerSettings, device: str, cuda_graphs: bool
) -> ResolvedPlugin:
    """The sampler; UnsupportedError where it does not run on `device`, or not in a graph."""

    def ask(one: PluginChoice) -> Candidate:
        resolved = plugins.resolve("sampler", one.plugin, one.options, path="sampler.options")
        spec = cast(SamplerSpec, plugins.spec("sampler", one.plugin))
        reasons = unmet_device(spec.devices, device)
        if cuda_graphs and not spec.cuda_graphs:
            reasons.append("it cannot be captured; set cuda_graphs: {enforce_eager: true}")
        return Candidate(resolved, 0, tuple(reasons))

    remedy = "take sampler:gumbel out of plugins.disable"
    return select(plugins, "sampler", choice, ask, device, remedy)[0].resolved


BY_SIZE: Mapping[str, tuple[str, tuple[str, str], type[NanoVLLMError]]] = {
    "executor": ("tensor_parallel_size", ("single", "parallel"), ExecutorError),
    "engine_client": ("data_parallel_size", ("thread", "processes"), ConfigError),
}
"""The kinds whose `auto` follows a size: its field, the plugins for 1 and for more, the error."""


def select_by_size(plugins: PluginManager, config: EngineConfig, kind: str) -> ResolvedPlugin:
    """The plugin of a kind in `BY_SIZE`; raises its error where the plugin has a lower limit."""
    field, names, error = BY_SIZE[kind]
    choice, size = getattr(config, kind), getattr(config, field)
    name = names[size > 1] if choice.is_auto else choice.name
    resolved = plugins.resolve(kind, name, choice.options, path=f"{kind}.options")
    most = getattr(plugins.spec(kind, name), f"max_{field}")
    if size > most:
        raise error(
            f"{field}: {size}, but the {kind.replace('_', ' ')} {shown(name)} runs at most {most}; "
            f"set {field} to that, or {kind}: auto"
        )
    return resolved


def _choose(decisions: Decisions, kind: str) -> tuple[ResolvedPlugin, ...]:
    field = KINDS[kind].choice
    if kind in CHOOSERS:
        chosen = [CHOOSERS[kind](decisions)]
    else:
        chosen = [
            decisions.plugins.resolve(kind, choice.plugin, choice.options, f"{path}.options")
            for path, choice in plugins_named(getattr(decisions.config, field), field)
        ]
    for one in chosen:
        load_object(one)
    return tuple(chosen)


CHOOSERS: Mapping[str, Callable[[Decisions], ResolvedPlugin]] = {
    "kernels": lambda d: d.kernels.chosen,
    "sampler": lambda d: select_sampler(d.plugins, d.config.sampler, d.device, d.cuda_graphs),
    "executor": lambda d: select_by_size(d.plugins, d.config, "executor"),
    "engine_client": lambda d: select_by_size(d.plugins, d.config, "engine_client"),
}
"""The kinds whose plugin must suit the device or the configuration; any other is taken as named."""

NAMED_KINDS: Mapping[str, str] = {
    kind.choice.replace("_", " "): kind.name
    for kind in KINDS.values()
    if kind.choice and kind.name != "attention"
}
"""The kinds whose plugins the configuration names one by one, by the name of the decision."""

SEQUENCE: Mapping[str, Callable[[Decisions], object]] = {
    "extensions": lambda decisions: decisions.extensions,
    "checkpoint": lambda decisions: decisions.checkpoint,
    "model": lambda decisions: decisions.shape,
    "device": lambda decisions: decisions.device,
    "dtype": lambda decisions: decisions.dtype,
    "attention, prefill": lambda decisions: decisions.attention.prefill,
    "attention, decode": lambda decisions: decisions.attention.decode,
    "KV blocks": lambda decisions: decisions.block_size,
    **{name: partial(Decisions.named, kind=kind) for name, kind in NAMED_KINDS.items()},
    "sampling defaults": lambda decisions: decisions.sampling_defaults,
    "CUDA graphs": lambda decisions: decisions.prompt_graph_sizes,
    "longest sequence": lambda decisions: decisions.max_model_len,
    "sequences at once": lambda decisions: decisions.config.limits.max_num_seqs,
    "tokens per step": lambda decisions: decisions.config.limits.max_num_batched_tokens,
    "steps ahead": lambda decisions: decisions.config.steps_ahead,
}
"""Every decision in the order in which a start makes them."""
