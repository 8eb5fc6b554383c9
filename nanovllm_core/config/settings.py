"""What an engine is told: one frozen model, checked before anything is loaded.

The fields of `EngineConfig` are the keys of the YAML file. `load_config`, in
`nanovllm_core.config.sources`, builds it from that file, the environment and keyword arguments.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from nanovllm_core.config.chat_template import check_chat_template_kwargs
from nanovllm_core.config.choices import (
    AttentionSettings,
    DistinctPlugins,
    ExecutorSettings,
    KernelSettings,
    PluginList,
    SamplerSettings,
    SchedulerSettings,
    Section,
)
from nanovllm_core.errors import clip, shown

BLOCK_SIZES = (16, 32, 64, 128, 256)

IntTuple = Annotated[tuple[int, ...], Field(strict=False, max_length=10_000)]
StrTuple = Annotated[tuple[str, ...], Field(strict=False, max_length=100)]


PROMPT_SIZES = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Prompt tokens to capture steps for. Beyond the last the host's launches hide behind the GPU."""


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes to capture graphs for: 1, 2, 4, then steps of 8; the last is the maximum.

    >>> bucket_sizes(20)
    (1, 2, 4, 8, 16, 20)
    """
    steps = (1, 2, 4, *range(8, max_num_seqs, 8))
    return (*(size for size in steps if size < max_num_seqs), max_num_seqs)


def _is_block_size(value: int) -> int:
    if value not in BLOCK_SIZES:
        raise ValueError(f"must be one of {', '.join(map(str, BLOCK_SIZES))}")
    return value


class CacheSettings(Section):
    """The KV cache: the engine's memory of the tokens it has already read or written."""

    block_size: Annotated[int, AfterValidator(_is_block_size)] | None = Field(
        default=None,
        description="The cache is handed out in blocks (pages), as a notebook is in pages; this is "
        "how many tokens one block holds: 16, 32, 64, 128 or 256. Small blocks waste less memory "
        "at the end of each sequence and share more of what prompts have in common; large ones "
        "suit some attention backends better. Left out, the attention backend's own page size "
        "is used, and 16 at least.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="How much of the GPU's memory this engine may fill, as a fraction: 0.9 is 90 "
        "percent. Weights come first, then working space, and what is left becomes cache; more "
        "cache means more sequences at once. Lower it when other programs use the same GPU, or "
        "another engine in this one: two of 0.4 go together. It does not apply on a CPU.",
    )
    num_blocks: int | None = Field(
        default=None,
        ge=1,
        description="Exactly how many blocks to reserve. Left out, as many as "
        "`gpu_memory_utilization` leaves room for. block_size times num_blocks is the number of "
        "tokens that all running sequences can hold together.",
    )
    prefix_caching: bool = Field(
        default=True,
        description="Keep what was computed for the beginning of a prompt, and use it again when "
        "another prompt begins with the same tokens. The results are the same; it saves time.",
    )


def _is_length(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """One message, where a union would have one for each of its types."""
    try:
        return check(value)
    except ValidationError:
        raise ValueError("must be a whole number of at least 2, or fit") from None


FIT: Final = "fit"
"""As long as the model's own limit and the KV cache allow."""
ModelLength = Annotated[Annotated[int, Field(ge=2)] | Literal["fit"], WrapValidator(_is_length)]


class LimitSettings(Section):
    """How much the engine takes on at once."""

    max_model_len: ModelLength | None = Field(
        default=None,
        description="The longest a sequence may become, prompt and answer together, in tokens (a "
        "token is about three quarters of an English word). Left out, the model's own limit; `fit` "
        "is that too, or as many tokens as the cache holds where memory is too small for it.",
    )
    max_num_seqs: int = Field(
        default=256,
        ge=1,
        le=2**16,
        description="How many sequences (prompts being read, answers being written) may be in "
        "work at the same time; further ones wait their turn. More at once gives more tokens per "
        "second in all, fewer gives each one its answer sooner and needs less memory.",
    )
    max_num_batched_tokens: int = Field(
        default=16384,
        ge=1,
        le=2**24,
        description="How many tokens the engine may compute in one step, over all sequences: each "
        "answer being written takes one, prompts being read share the rest. A prompt longer than "
        "this is read in several steps. More reads prompts faster; fewer keeps the answers that "
        "are being written from stalling, and needs less memory. At least max_num_seqs.",
    )

    @model_validator(mode="after")
    def _a_step_holds_every_sequence(self) -> LimitSettings:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence takes one token of a "
                "step; raise the first or lower the second"
            )
        return self


class GraphSettings(Section):
    """CUDA graphs: a step is recorded once and replayed, which spares the CPU work."""

    enforce_eager: bool = Field(
        default=False,
        description="Run every step without CUDA graphs. Slower; starts sooner, uses less memory "
        "and is easier to debug.",
    )
    sizes: IntTuple | None = Field(
        default=None,
        description="The numbers of sequences to record a graph for, increasing, the last one "
        "max_num_seqs; a step is padded to the next larger size. Left out: 1, 2, 4, 8, then every "
        "8 up to max_num_seqs.",
    )

    prompt_sizes: IntTuple | None = Field(
        default=None,
        description="The numbers of prompt tokens to record a graph for, increasing; a step that "
        "computes prompts is padded to the next larger size, and runs without a graph beyond the "
        "last. Empty: no such graphs. Left out: 128 to 4096, where the attention backend can be "
        "recorded with prompts.",
    )

    @model_validator(mode="after")
    def _sizes_increase(self) -> GraphSettings:
        if self.sizes == ():
            raise ValueError("sizes [] must be positive and increasing, and end with max_num_seqs")
        for name, sizes in (("sizes", self.sizes), ("prompt_sizes", self.prompt_sizes)):
            given = sizes or ()
            if any(low >= high for low, high in zip((0, *given), given, strict=False)):
                raise ValueError(f"{name} {shown([*given])} must be positive and increasing")
        return self


class PluginSettings(Section):
    """Which plugins to leave out, and which extensions to load."""

    disable: StrTuple = Field(
        default=(),
        description="Plugins to act as if they were not installed: a name (`flash`), a kind and a "
        "name (`attention:flash`), or a distribution (`nanovllm-attention-flash`).",
    )
    enable: StrTuple = Field(
        default=(),
        description="Extensions to load, by name; an extension that is not named stays unloaded.",
    )
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="The settings of extensions, by the extension's name."
    )

    @model_validator(mode="after")
    def _options_of_enabled_extensions(self) -> PluginSettings:
        for name in self.options:
            if name not in self.enable:
                raise ValueError(
                    f"options.{clip(name)}: {shown(name)} is not in enable "
                    f"{shown([*self.enable])}, so nothing would read them"
                )
        return self


def check_device(value: str) -> str:
    """The name of a device as it is; ValueError for what can be none."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,6})?", value):
        raise ValueError("must be auto, cpu, cuda or cuda:N (N the number of the GPU, from 0)")
    return value


class EngineConfig(Section):
    """Everything an engine is told. Frozen; unknown keys are errors."""

    model: str = Field(
        min_length=1,
        description="The model: a folder with a checkpoint, the name of a checkpoint plugin "
        "(`demo`), `source:reference`, or a name on the Hugging Face hub (`Qwen/Qwen3-0.6B`). "
        "A plugin's name wins over a folder of that name without a checkpoint; where the folder "
        "has one too, write `./demo` for it or `demo:` for the plugin.",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="Where the tokenizer is, if not with the model. It cuts text into tokens.",
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_chat_template_kwargs)] = (
        Field(
            default_factory=dict,
            description="Variables for the checkpoint's chat template, such as `{enable_thinking: "
            "false}` for Qwen3; a call may override them. A template ignores those that it does not"
            " know.",
        )
    )
    generation_config: Literal["checkpoint", "none"] = Field(
        default="checkpoint",
        description="Where temperature, top_k, top_p, min_p and repetition_penalty come from for a "
        "request that does not state them: `checkpoint` is its generation_config.json, `none` "
        "leaves them neutral.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="`auto` reads the checkpoint's weights; `dummy` makes up random ones of the "
        "right shapes, to measure speed with a config.json alone.",
    )
    device: Annotated[str, AfterValidator(check_device)] = Field(
        default="auto",
        description="Where to compute: `cpu`, `cuda` (the first GPU), `cuda:1` (the second), or "
        "`auto`: a GPU where there is one.",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="The number format of weights and computation. `auto` is the checkpoint's on "
        "a GPU, and float32 on a CPU.",
    )
    attention: AttentionSettings = Field(
        default_factory=AttentionSettings,
        description="The attention backend: a name, {backend, options}, or a {prefill, decode} "
        "pair of these.",
    )
    scheduler: SchedulerSettings = Field(
        default_factory=SchedulerSettings,
        description="Who is served first: a name or {name, options}.",
    )
    executor: ExecutorSettings = Field(
        default_factory=ExecutorSettings,
        description="How the model runs: a name or {name, options}.",
    )
    sampler: SamplerSettings = Field(
        default_factory=SamplerSettings,
        description="How a token is chosen: a name or {name, options}.",
    )
    kernels: KernelSettings = Field(
        default_factory=KernelSettings,
        description="The operations that layers are built on: a name or {name, options}.",
    )
    logits_processors: DistinctPlugins = Field(
        default=(),
        description="Plugins that change logits, each a name or {name, options}, in the order in "
        "which they run. A request asks for one by name; the others are not touched.",
    )
    observers: PluginList = Field(
        default=(),
        description="Plugins that are told about every step (metrics), each a name or {name, "
        "options}.",
    )
    cache: CacheSettings = Field(
        default_factory=CacheSettings,
        description="The KV cache: the memory of tokens already read or written.",
    )
    limits: LimitSettings = Field(
        default_factory=LimitSettings, description="How much the engine takes on at once."
    )
    cuda_graphs: GraphSettings = Field(
        default_factory=GraphSettings, description="Recorded steps on a GPU."
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Where the dice start: the same seed and requests give the same noise.",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Over how many GPUs each layer is split. More than 1 needs an executor that "
        "can do it.",
    )
    steps_ahead: int = Field(
        default=1,
        ge=0,
        le=8,
        description="How many steps are launched before the results of the first one are read. 1 "
        "hides the CPU's work behind the GPU's; 0 waits for each step.",
    )
    debug: bool = Field(
        default=False,
        description="Check the engine's own bookkeeping, and that logits are finite, at every "
        "step. Slow; for developers.",
    )
    plugins: PluginSettings = Field(
        default_factory=PluginSettings, description="Plugins to leave out, extensions to load."
    )

    @model_validator(mode="after")
    def _graph_sizes_end_at_the_maximum(self) -> EngineConfig:
        sizes, maximum = self.cuda_graphs.sizes, self.limits.max_num_seqs
        if sizes is not None and sizes[-1] != maximum:
            raise ValueError(
                f"cuda_graphs.sizes must end with limits.max_num_seqs ({maximum}), "
                f"not with {sizes[-1]}"
            )
        return self

    @model_validator(mode="after")
    def _prompt_sizes_are_within_the_budget(self) -> EngineConfig:
        sizes, most = self.cuda_graphs.prompt_sizes, self.limits.max_num_batched_tokens
        if sizes and sizes[-1] > most:
            raise ValueError(
                f"cuda_graphs.prompt_sizes {shown([*sizes])} must not go beyond "
                f"limits.max_num_batched_tokens ({most}): no step has more prompt tokens"
            )
        return self

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The batch sizes that steps are padded to; the last is `limits.max_num_seqs`."""
        return self.cuda_graphs.sizes or bucket_sizes(self.limits.max_num_seqs)

    @property
    def prompt_graph_sizes(self) -> tuple[int, ...]:
        """The numbers of prompt tokens that captured steps are padded to, where they can be."""
        sizes, most = self.cuda_graphs.prompt_sizes, self.limits.max_num_batched_tokens
        if sizes is None:
            return tuple(size for size in PROMPT_SIZES if size <= most)
        return sizes
