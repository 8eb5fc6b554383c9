"""From a configuration to everything an engine needs, chosen and checked before work begins."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from nanovllm_core.config.settings import EngineConfig, check_device
from nanovllm_core.errors import (
    ArchitectureError,
    CheckpointNotFoundError,
    ConfigError,
    DeviceError,
    ExecutorError,
    PluginLoadError,
    PluginNotFoundError,
    clip,
    shown,
)
from nanovllm_core.interfaces.attention import AttentionRequirements, Phase
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.model import UNREADABLE_ERRORS, ModelShape
from nanovllm_core.interfaces.observer import StepObserver
from nanovllm_core.interfaces.scheduler import Scheduler, SchedulingPolicy
from nanovllm_core.interfaces.specs import (
    ExecutorSpec,
    LogitsProcessorSpec,
    ResolvedPlugin,
    SchedulerSpec,
)
from nanovllm_core.registry.checks import describe
from nanovllm_core.registry.manager import PluginManager, get_plugin_manager, load_object
from nanovllm_core.selection.attention import Selection, select_attention
from nanovllm_core.selection.checkpoint import CONFIG_NAME, find_checkpoint
from nanovllm_core.selection.generation_config import describe_defaults, read_sampling_defaults
from nanovllm_core.selection.plugins import (
    make_observers,
    resolve_observers,
    select_kernels,
    select_logits_processors,
    select_sampler,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Startup:
    """What a configuration resolved to."""

    plugins: PluginManager
    setup: WorkerSetup
    scheduler: Scheduler
    executor: Executor
    logits_processors: Mapping[str, LogitsProcessorSpec]
    """What requests may ask for, in the order in which they run."""
    observers: Mapping[str, StepObserver]
    """By a label that names the plugin and its distribution."""
    sampling_defaults: Mapping[str, float]
    """The checkpoint's, by field of `SamplingParams`."""


def start(config: EngineConfig) -> Startup:
    """Resolve every choice of `config`; loads no weights and allocates nothing on the device."""
    plugins = get_plugin_manager(disable=config.plugins.disable)
    plugins.enable(config.plugins.enable)
    checkpoint = find_checkpoint(plugins, config.model)
    model_config = read_model_config(checkpoint)
    architecture = read_architecture(model_config, checkpoint)
    model = find_model(plugins, architecture, checkpoint)
    shape = read_shape(model, model_config, checkpoint)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, model_config)
    max_model_len = resolve_max_model_len(config, shape)
    sampling_defaults = resolve_sampling_defaults(config, checkpoint)
    cuda_graphs = uses_cuda_graphs(config, device)
    attention = choose_attention(plugins, config, shape, device, dtype, cuda_graphs)
    specs, processors = select_logits_processors(plugins, config.logits_processors)
    setup = WorkerSetup(
        config=config,
        checkpoint=str(checkpoint),
        model_config=model_config,
        model=model,
        prefill_attention=attention.prefill,
        decode_attention=attention.decode,
        kernels=select_kernels(plugins, config.kernels, device),
        sampler=select_sampler(plugins, config.sampler, device, cuda_graphs),
        logits_processors=processors,
        tokenizer=config.tokenizer or str(checkpoint),
        kv_layout=attention.layout,
        block_size=attention.block_size,
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
        cuda_graphs=cuda_graphs,
        prompt_graph_sizes=prompt_graph_sizes(config, attention, device),
    )
    scheduler, executor = make_scheduler(plugins, config), _make_executor(plugins, config)
    observers = resolve_observers(plugins, config.observers)
    # By now every selected plugin is known, so each hears of it, as extensions do.
    plugins.hook.nanovllm_configure(config=config, plugins=plugins)
    made = make_observers(plugins, observers, config)
    return Startup(plugins, setup, scheduler, executor, specs, made, sampling_defaults)


def read_model_config(checkpoint: Path) -> Mapping[str, Any]:
    """The checkpoint's config.json."""
    file = checkpoint / CONFIG_NAME
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{checkpoint} holds no config.json, so it is no checkpoint; `model` must name a "
            "folder with config.json, a tokenizer and safetensors files"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointNotFoundError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointNotFoundError(f"{file} holds {type(config).__name__}, not an object")
    return config


def read_architecture(model_config: Mapping[str, Any], checkpoint: Path) -> str:
    """The first of config.json's architectures; ArchitectureError where it names none."""
    architectures = model_config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ArchitectureError(
            f"{checkpoint}/config.json: architectures={shown(architectures)} names no "
            "architecture; "
            'expected a list such as ["Qwen3ForCausalLM"]'
        )
    return str(architectures[0])


def find_model(plugins: PluginManager, architecture: str, checkpoint: Path) -> ResolvedPlugin:
    """The model plugin of an architecture; ArchitectureError where none is installed."""
    try:
        return plugins.resolve("model", architecture, {}, path="model")
    except PluginNotFoundError as error:
        raise ArchitectureError(
            f"{checkpoint}/config.json: no installed plugin runs the architecture "
            f"{shown(architecture)}; install one that does, or use another checkpoint. {error}"
        ) from error


def read_shape(
    model: ResolvedPlugin, model_config: Mapping[str, Any], checkpoint: Path
) -> ModelShape:
    """What the model plugin reads in config.json; ArchitectureError where it cannot."""
    implementation = load_object(model)
    try:
        return cast(ModelShape, implementation.shape(model_config))
    except UNREADABLE_ERRORS as error:
        raise ArchitectureError(
            f"{checkpoint}/config.json cannot be read by {model.name} ({model.distribution} "
            f"{model.version}): {type(error).__name__}: {clip(str(error), 1000)}; correct that "
            "setting, or fetch the file again"
        ) from error


def resolve_device(device: str) -> str:
    """`auto` -> the first GPU, or the CPU; DeviceError for a GPU that is not there."""
    import torch

    try:
        check_device(device)
    except ValueError as error:
        raise DeviceError(f"device: {shown(device)} {error}") from None
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device: {shown(device)}, but torch {torch.__version__} sees no CUDA device; use "
            "device: "
            "cpu (or auto), or install a CUDA build of torch and the driver"
        )
    index = int(device.split(":")[1]) if ":" in device else 0
    count = torch.cuda.device_count()
    if index >= count:
        raise DeviceError(
            f"device: {shown(device)}, but there are {count} GPUs: cuda:0 to cuda:{count - 1}"
        )
    return f"cuda:{index}"


def resolve_dtype(dtype: str, device: str, model_config: Mapping[str, Any]) -> str:
    """`auto` -> float32 on a CPU, else as the checkpoint; ConfigError where that cannot be."""
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    stored = str(model_config.get("dtype") or model_config.get("torch_dtype") or "bfloat16")
    if stored not in ("float32", "float16", "bfloat16"):
        raise ConfigError(
            f"dtype: auto follows the checkpoint, which says {shown(stored)}; choose float32, "
            "float16 "
            "or bfloat16"
        )
    return stored


def resolve_max_model_len(config: EngineConfig, shape: ModelShape) -> int:
    """The configured length, or the model's own, which `fit` may cut; ConfigError beyond that."""
    asked = config.limits.max_model_len
    if not isinstance(asked, int):
        return shape.max_position
    if asked > shape.max_position:
        raise ConfigError(
            f"limits.max_model_len: {asked} is beyond the {shape.max_position} positions that the "
            f"model was trained for (max_position_embeddings); use at most {shape.max_position}"
        )
    return asked


def resolve_sampling_defaults(config: EngineConfig, checkpoint: Path) -> Mapping[str, float]:
    """What the checkpoint states of sampling; nothing where the configuration says `none`."""
    if config.generation_config == "none":
        return {}
    defaults = read_sampling_defaults(checkpoint)
    if defaults:
        logger.info("sampling defaults of the checkpoint: %s", describe_defaults(defaults))
    return defaults


def uses_cuda_graphs(config: EngineConfig, device: str) -> bool:
    """Whether steps are captured on that device ("cuda:0")."""
    return device.startswith("cuda") and not config.cuda_graphs.enforce_eager


def attention_requirements(
    phase: Phase,
    config: EngineConfig,
    shape: ModelShape,
    device: str,
    dtype: str,
    cuda_graphs: bool,
) -> AttentionRequirements:
    """What one phase asks of a backend."""
    capability = None
    if device.startswith("cuda"):
        import torch

        capability = torch.cuda.get_device_capability(device)
    return AttentionRequirements(
        phase=phase,
        device=device.split(":")[0],
        dtype=dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        compute_capability=capability,
        cuda_graphs=cuda_graphs and phase == "decode",
        block_size=config.cache.block_size,
        sliding_window=shape.sliding_window is not None,
        soft_cap=shape.soft_cap is not None,
    )


def choose_attention(
    plugins: PluginManager,
    config: EngineConfig,
    shape: ModelShape,
    device: str,
    dtype: str,
    cuda_graphs: bool,
) -> Selection:
    """The backend of each phase and the pages that they share; says why in the log."""
    asked = (config, shape, device, dtype, cuda_graphs)
    prefill = attention_requirements("prefill", *asked)
    decode = attention_requirements("decode", *asked)
    selection = select_attention(plugins, config.attention, prefill, decode)
    for line in selection.report:
        logger.info(line)
    return selection


def prompt_graph_sizes(config: EngineConfig, attention: Selection, device: str) -> tuple[int, ...]:
    """The prompt tokens that steps are padded to, so that they can be captured.

    None on a CPU, and none where the prefill backend cannot be captured; ConfigError where the
    configuration names sizes for such a backend. Eager steps are padded alike.
    """
    if not device.startswith("cuda"):
        return ()
    if not attention.eager_prompts:
        return config.prompt_graph_sizes
    if config.cuda_graphs.prompt_sizes:
        raise ConfigError(
            f"cuda_graphs.prompt_sizes: {list(config.cuda_graphs.prompt_sizes)}, but of attention "
            f"{attention.prefill.name!r}: {'; '.join(attention.eager_prompts)}; leave prompt_sizes "
            "out, or choose another prefill backend"
        )
    return ()


def make_scheduler(plugins: PluginManager, config: EngineConfig) -> Scheduler:
    """The configured scheduler; a policy is wrapped in the core's own scheduler.

    Raises PluginLoadError where it is not of the level that its spec states.
    """
    from nanovllm_core.engine.scheduler import TokenBudgetScheduler

    choice = config.scheduler
    resolved = plugins.resolve("scheduler", choice.name, choice.options, path="scheduler.options")
    made = plugins.make(resolved, (SchedulingPolicy, Scheduler))
    spec = cast(SchedulerSpec, plugins.spec("scheduler", choice.name))
    found, level = ("SchedulingPolicy", "policy")
    if not isinstance(made, SchedulingPolicy):
        found, level = ("Scheduler", "scheduler")
    if spec.level != level:
        raise PluginLoadError(
            f"{describe(resolved)}: its level is {spec.level!r}, and {resolved.impl} makes a "
            f"{found}; state level={level!r} in its spec"
        )
    if level == "policy":
        return TokenBudgetScheduler(made, describe(resolved))
    return cast(Scheduler, made)


def _make_executor(plugins: PluginManager, config: EngineConfig) -> Executor:
    choice = config.executor
    check_tensor_parallel_size(plugins, config)
    resolved = plugins.resolve("executor", choice.name, choice.options, path="executor.options")
    return cast(Executor, plugins.make(resolved, Executor))


def check_tensor_parallel_size(plugins: PluginManager, config: EngineConfig) -> None:
    """ExecutorError where the configured executor does not span that many devices."""
    choice, size = config.executor, config.tensor_parallel_size
    spec = cast(ExecutorSpec, plugins.spec("executor", choice.name))
    if size > spec.max_tensor_parallel_size:
        raise ExecutorError(
            f"tensor_parallel_size: {size}, but the executor {shown(choice.name)} runs at most "
            f"{spec.max_tensor_parallel_size}; set tensor_parallel_size: 1, or install and name an "
            "executor that spans several devices"
        )
