"""The configuration of an engine: one frozen model, checked before anything is loaded.

The fields of `EngineConfig` are the keys of the YAML file. `load_config`, in
`nanovllm_core.config.sources`, builds it from that file, the environment and keyword arguments.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from nanovllm_core.config.choices import (
    AttentionSettings,
    DistinctPlugins,
    EngineClientSettings,
    ExecutorSettings,
    KernelSettings,
    PluginList,
    SamplerSettings,
    SchedulerSettings,
    Section,
)
from nanovllm_core.errors import clip, shown

BLOCK_SIZES = (16, 32, 64, 128, 256)


def folder_text(value: object) -> object:
    """A path as text; a relative one begins with a dot, so that it is no plugin's or hub's name."""
    if not isinstance(value, os.PathLike):
        return value
    path = os.fspath(value)
    return path if os.path.isabs(path) else os.path.join(os.curdir, path)


FolderOrName = Annotated[str, Field(min_length=1), BeforeValidator(folder_text)]
StrTuple = Annotated[tuple[str, ...], Field(strict=False, max_length=100)]

PROMPT_SIZES = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Prompt tokens to capture steps for. In larger steps the GPU runs longer than the launches."""

RESERVED = frozenset(
    {
        *("self", "messages", "conversation", "conversations"),
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Names that the engine sets when it applies a template; most are transformers' arguments."""


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes to capture graphs for: 1, 2, 4, then steps of 8; the last is the maximum.

    192 is left out. For most models cuBLAS 13 picks a product there that takes longer than that of
    200, on an H200 by up to half.

    >>> bucket_sizes(20)
    (1, 2, 4, 8, 16, 20)
    """
    steps = (1, 2, 4, *range(8, max_num_seqs, 8))
    return (*(size for size in steps if size < max_num_seqs and size != 192), max_num_seqs)


def _is_block_size(value: int) -> int:
    if value not in BLOCK_SIZES:
        raise ValueError(f"must be one of {', '.join(map(str, BLOCK_SIZES))}")
    return value


def _increase(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if any(low >= high for low, high in itertools.pairwise((0, *sizes))):
        raise ValueError("must be positive and increasing")
    return sizes


Sizes = Annotated[
    tuple[int, ...], Field(strict=False, max_length=10_000), AfterValidator(_increase)
]


class CacheSettings(Section):
    """The KV cache: the keys and values of the tokens that the engine has already computed."""

    block_size: Annotated[int, AfterValidator(_is_block_size)] | None = None
    """Tokens per block. A block, which others call a page, is the unit in which the cache is
    allocated: 16, 32, 64, 128 or 256 tokens. Small blocks waste less memory at the end of each
    sequence and share more of a common prefix; large ones suit some attention backends better. Left
    out, the size that the attention backend prefers, at least 16."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """The fraction of the GPU's memory that this engine may fill: 0.9 is 90 percent. Weights and
    workspaces take their part first, and the rest becomes cache; more cache means more sequences at
    once. Lower it when other programs use the same GPU, or another engine in this process: two of
    0.4 fit together. It does not apply on a CPU."""
    num_blocks: int | None = Field(default=None, ge=1)
    """The exact number of blocks. Left out, as many as `gpu_memory_utilization` allows. block_size
    times num_blocks is the number of tokens that all running sequences can hold together."""
    prefix_caching: bool = True
    """Keep the blocks of a prompt, and use them again when another prompt begins with the same
    tokens. The results are the same; it saves time."""


FIT: Final = "fit"
"""As long as the model's own limit and the KV cache allow."""


def _is_length(value: object) -> object:
    """One message, where a union would have one for each of its types."""
    if value != FIT and (type(value) is not int or value < 2):
        raise ValueError("must be a whole number of at least 2, or fit")
    return value


ModelLength = Annotated[Annotated[int, Field(ge=2)] | Literal["fit"], BeforeValidator(_is_length)]


class LimitSettings(Section):
    """How much the engine computes at once."""

    max_model_len: ModelLength | None = None
    """The most tokens of a sequence, prompt and answer together (a token is about three quarters of
    an English word). Left out, the model's own limit. `fit` is the model's limit too, or as many
    tokens as the cache holds if memory is too small for that."""
    max_num_seqs: int = Field(default=256, ge=1, le=2**16)
    """The most sequences (in prefill or decode) that may run at the same time; further ones wait.
    More give a higher throughput; fewer give each sequence a lower latency and need less memory."""
    max_num_batched_tokens: int = Field(default=16384, ge=1, le=2**24)
    """The most tokens that the engine computes in one step, over all sequences: each decoding
    sequence takes one, and prompts share the rest. A longer prompt is computed in several steps.
    More compute prompts faster; fewer delay decoding sequences less and need less memory. At least
    max_num_seqs."""

    constraint_seconds: float = Field(default=5.0, gt=0, le=3600)
    """The longest wait for the constraints of one sequence, in seconds per step. The whole engine
    waits meanwhile. A sequence whose constraints are not done by then ends with an error; others do
    not, and a step waits longer where many are slow."""

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
    """CUDA graphs: a step is captured once and replayed, which saves CPU time."""

    enforce_eager: bool = False
    """Run every step without CUDA graphs. Slower; starts sooner, uses less memory and is easier to
    debug."""
    sizes: Sizes | None = None
    """The numbers of sequences to capture a graph for, increasing, the last one max_num_seqs; a
    step is padded to the next larger size. Left out: 1, 2, 4, 8, then every 8 up to
    max_num_seqs, without 192."""
    prompt_sizes: Sizes | None = None
    """The numbers of prompt tokens to capture a graph for, increasing; a step that computes prompts
    is padded to the next larger size, and runs without a graph beyond the last. Empty: no such
    graphs. Left out: 128 to 4096, if the attention backend supports capture with prompts. Of latent
    attention, sizes that are faster without a graph have none."""


class PluginSettings(Section):
    """Plugins to leave out, and extensions to load."""

    disable: StrTuple = ()
    """Plugins to treat as not installed: a name (`flash`), a kind and a name (`attention:flash`),
    or a distribution (`nanovllm-attention-flash`)."""
    enable: StrTuple = ()
    """Extensions to load, by name; other extensions are not loaded."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """The settings of extensions, by the extension's name."""

    @model_validator(mode="after")
    def _options_of_enabled_extensions(self) -> PluginSettings:
        for name in self.options:
            if name not in self.enable:
                raise ValueError(
                    f"options.{clip(name)}: {shown(name)} is not in enable "
                    f"{shown([*self.enable])}, so nothing would read them"
                )
        return self


def check_chat_template_kwargs(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """The same variables; ValueError for what no template may be given."""
    if not isinstance(kwargs, Mapping):
        raise ValueError(
            f'{shown(kwargs)} must map names to values, as in {{"enable_thinking": false}}'
        )
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{shown(name)} cannot name a variable; leave it out")
        if name in RESERVED:
            raise ValueError(f"{name!r} is set by the engine itself; leave it out")
    return kwargs


def check_device(value: str) -> str:
    """The name of a device, unchanged. Raises ValueError if it cannot name one."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,6})?", value):
        raise ValueError("must be auto, cpu, cuda or cuda:N (N the number of the GPU, from 0)")
    return value


class EngineConfig(Section):
    """The whole configuration of an engine. Frozen; unknown keys are errors."""

    model: FolderOrName
    """The model: a folder with a checkpoint, the name of a checkpoint plugin (`demo`),
    `source:reference`, or a name on the Hugging Face hub (`Qwen/Qwen3-0.6B`). A plugin's name wins
    over a folder of that name without a checkpoint. If the folder holds a checkpoint too, write
    `./demo` for the folder or `demo:` for the plugin. In Python a `Path` is always a folder."""
    tokenizer: FolderOrName | None = None
    """The folder of the tokenizer's files, if not the model's own."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_chat_template_kwargs)] = (
        Field(default_factory=dict)
    )
    """Variables for the checkpoint's chat template, such as `{enable_thinking: false}` for Qwen3; a
    call may override them. A template ignores unknown variables."""
    generation_config: Literal["checkpoint", "none"] = "checkpoint"
    """The source of temperature, top_k, top_p, min_p and repetition_penalty for a request that does
    not set them: `checkpoint` is its generation_config.json, `none` leaves them neutral."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`auto` reads the checkpoint's weights; `dummy` makes random weights of the right shapes, to
    measure speed with a config.json alone."""
    device: Annotated[str, AfterValidator(check_device)] = "auto"
    """The device: `cpu`, `cuda` (the first GPU), `cuda:1` (the second), or `auto`: a GPU if there
    is one."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """The number format of weights and computation. `auto` is the checkpoint's on a GPU, and
    float32 on a CPU."""
    attention: AttentionSettings = AttentionSettings()
    """The attention backend: a name, {backend, options}, or a {prefill, decode} pair of these."""
    scheduler: SchedulerSettings = SchedulerSettings()
    """The order of admission: a name or {name, options}."""
    executor: ExecutorSettings = ExecutorSettings()
    """How the model runs: a name or {name, options}."""
    engine_client: EngineClientSettings = EngineClientSettings()
    """Where engines run: a name or {name, options}."""
    sampler: SamplerSettings = SamplerSettings()
    """How a token is chosen: a name or {name, options}."""
    kernels: KernelSettings = KernelSettings()
    """The operations that layers are built on: a name or {name, options}."""
    logits_processors: DistinctPlugins = ()
    """Plugins that change logits, each a name or {name, options}, in the order in which they run.
    They change only requests that use them by name."""
    constraints: DistinctPlugins = ()
    """Plugins that say which tokens may come next, such as grammars, each a name or
    {name, options}. They change only requests that use them by name."""
    observers: PluginList = ()
    """Plugins that receive a record of every step, such as metrics; each a name or
    {name, options}."""
    cache: CacheSettings = CacheSettings()
    """The KV cache: keys and values of tokens already computed."""
    limits: LimitSettings = LimitSettings()
    """How much the engine computes at once."""
    cuda_graphs: GraphSettings = GraphSettings()
    """Captured steps on a GPU."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """The engine's random seed: the same seed and requests give the same noise."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """The number of GPUs over which each layer is split, from `device` on. More than 1 needs an
    executor that supports it, such as `parallel`."""
    data_parallel_size: int = Field(default=1, ge=1, le=1024)
    """The number of engines that share the requests, each with all weights and
    `tensor_parallel_size` GPUs of its own. More than 1 needs an engine client that supports it,
    such as `processes`."""
    steps_ahead: int = Field(default=1, ge=0, le=8)
    """The number of steps launched before the results of the first one are read. 1 overlaps the
    CPU's work with the GPU's; 0 waits for each step."""
    debug: bool = False
    """Check the engine's own bookkeeping, and that logits are finite, at every step. Slow; for
    developers."""
    plugins: PluginSettings = PluginSettings()
    """Plugins to leave out, extensions to load."""

    @model_validator(mode="after")
    def _graph_sizes_fit_the_limits(self) -> EngineConfig:
        sizes, maximum = self.cuda_graphs.sizes, self.limits.max_num_seqs
        if sizes is not None and sizes[-1:] != (maximum,):
            raise ValueError(
                f"cuda_graphs.sizes {shown([*sizes])} must increase and end with "
                f"limits.max_num_seqs ({maximum})"
            )
        prompts, most = self.cuda_graphs.prompt_sizes, self.limits.max_num_batched_tokens
        if prompts and prompts[-1] > most:
            raise ValueError(
                f"cuda_graphs.prompt_sizes {shown([*prompts])} must not go beyond "
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

    @property
    def full_step_size(self) -> int | None:
        """The tokens of a step that fills `limits.max_num_batched_tokens`, where it is captured.

        None where that is more than any captured step has, or where the sizes are given.
        """
        most = self.limits.max_num_batched_tokens
        given = self.cuda_graphs.prompt_sizes is not None
        return None if given or most > PROMPT_SIZES[-1] else most
