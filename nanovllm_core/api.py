"""Everything a plugin imports of nanovllm, besides `nanovllm_core.testing`.

    from nanovllm_core.api import SchedulerSpec, SchedulingPolicy, hookimpl

What stands here is public: a change of a name, a signature or a field shows in
tests/api/public_names.txt, and one that breaks a plugin raises the contract version of its kind.

Importing this module imports no torch, so a plugin's light module may import from it. The layers,
the kernels and the executor need torch; they are imported when their names are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import (
    ArchitectureError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DeviceError,
    ExecutorError,
    InconsistentStateError,
    InvalidSamplingError,
    NanoVLLMError,
    OutOfMemoryError,
    PluginLoadError,
    SchedulerError,
    UnsupportedError,
    WeightsError,
)
from nanovllm_core.hookspecs import hookimpl, hookspec
from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionConfig,
    AttentionRequirements,
    DecodeMetadata,
    GraphSupport,
    KVLayout,
    Phase,
    PrefillMetadata,
)
from nanovllm_core.interfaces.doctor import DoctorCheck
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.kernels import KernelSet, QKPrep
from nanovllm_core.interfaces.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
)
from nanovllm_core.interfaces.model import CausalLM, ModelShape
from nanovllm_core.interfaces.observer import (
    ObserverContext,
    RequestRecord,
    StepObserver,
    StepRecord,
)
from nanovllm_core.interfaces.plan import (
    MAX_DEVICE_STOP_IDS,
    PADDED,
    Admission,
    PageAppend,
    PrefillChunk,
    RowSampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerInfo,
)
from nanovllm_core.interfaces.plugins import Plugins
from nanovllm_core.interfaces.sampler import Sampler, SamplerContext
from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
    SchedulingPolicy,
)
from nanovllm_core.interfaces.specs import (
    AttentionSpec,
    CheckpointSpec,
    ExecutorSpec,
    KernelSetSpec,
    KindSpec,
    LogitsProcessorSpec,
    ModelSpec,
    NoOptions,
    ObserverSpec,
    PluginSpec,
    ResolvedPlugin,
    SamplerSpec,
    SchedulerSpec,
)
from nanovllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm_core.kernels import TorchKernels, launch_options, supports_dependent_launch
    from nanovllm_core.layers import (
        Attention,
        AttentionRuntime,
        ColumnParallelLinear,
        DecoderConfig,
        DecoderForCausalLM,
        Layer,
        LayerContext,
        MergedColumnParallelLinear,
        ModelParameter,
        ParallelLMHead,
        QKVParallelLinear,
        RMSNorm,
        RopeConfig,
        RowParallelLinear,
        SingleRank,
        TensorParallel,
        VocabParallelEmbedding,
        build_cos_sin_cache,
        finalize_layers,
        gated_mlp,
        heads_per_rank,
        linear_add,
        make_parameter,
        norm_linear,
        positive_float,
        positive_int,
        refuse_unless,
    )
    from nanovllm_core.worker.executor import SingleProcessExecutor

__all__ = [
    "MAX_DEVICE_STOP_IDS",
    "PADDED",
    "Admission",
    "ArchitectureError",
    "Attention",
    "AttentionBackend",
    "AttentionCapabilities",
    "AttentionConfig",
    "AttentionRequirements",
    "AttentionRuntime",
    "AttentionSpec",
    "CausalLM",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointSpec",
    "ColumnParallelLinear",
    "ConfigError",
    "DecodeMetadata",
    "DecoderConfig",
    "DecoderForCausalLM",
    "DeviceError",
    "DoctorCheck",
    "EngineConfig",
    "Executor",
    "ExecutorError",
    "ExecutorSpec",
    "GraphSupport",
    "InconsistentStateError",
    "InvalidSamplingError",
    "KVLayout",
    "KernelSet",
    "KernelSetSpec",
    "KindSpec",
    "Layer",
    "LayerContext",
    "LogitsContext",
    "LogitsProcessor",
    "LogitsProcessorSpec",
    "LogitsRequest",
    "MergedColumnParallelLinear",
    "ModelParameter",
    "ModelShape",
    "ModelSpec",
    "NanoVLLMError",
    "NoOptions",
    "ObserverContext",
    "ObserverSpec",
    "OutOfMemoryError",
    "PageAppend",
    "ParallelLMHead",
    "Phase",
    "PluginLoadError",
    "PluginSpec",
    "Plugins",
    "PrefillChunk",
    "PrefillMetadata",
    "PrefillShare",
    "QKPrep",
    "QKVParallelLinear",
    "RMSNorm",
    "RequestRecord",
    "RequestView",
    "ResolvedPlugin",
    "RopeConfig",
    "RowParallelLinear",
    "RowSampling",
    "Sampler",
    "SamplerContext",
    "SamplerSpec",
    "SamplingParams",
    "Scheduler",
    "SchedulerError",
    "SchedulerSpec",
    "SchedulerState",
    "SchedulingPolicy",
    "SingleProcessExecutor",
    "SingleRank",
    "StepObserver",
    "StepPlan",
    "StepRecord",
    "StepResult",
    "TensorParallel",
    "TokenLogprobs",
    "TorchKernels",
    "UnsupportedError",
    "VocabParallelEmbedding",
    "WeightsError",
    "WorkerInfo",
    "WorkerSetup",
    "build_cos_sin_cache",
    "finalize_layers",
    "gated_mlp",
    "heads_per_rank",
    "hookimpl",
    "hookspec",
    "launch_options",
    "linear_add",
    "make_parameter",
    "norm_linear",
    "positive_float",
    "positive_int",
    "refuse_unless",
    "supports_dependent_launch",
]

_NEED_TORCH = {
    "nanovllm_core.kernels": ("TorchKernels", "launch_options", "supports_dependent_launch"),
    "nanovllm_core.layers": (
        "Attention",
        "AttentionRuntime",
        "ColumnParallelLinear",
        "DecoderConfig",
        "DecoderForCausalLM",
        "Layer",
        "LayerContext",
        "MergedColumnParallelLinear",
        "ModelParameter",
        "ParallelLMHead",
        "QKVParallelLinear",
        "RMSNorm",
        "RopeConfig",
        "RowParallelLinear",
        "SingleRank",
        "TensorParallel",
        "VocabParallelEmbedding",
        "build_cos_sin_cache",
        "finalize_layers",
        "gated_mlp",
        "heads_per_rank",
        "linear_add",
        "make_parameter",
        "norm_linear",
        "positive_float",
        "positive_int",
        "refuse_unless",
    ),
    "nanovllm_core.worker.executor": ("SingleProcessExecutor",),
}
_HOMES = {name: module for module, names in _NEED_TORCH.items() for name in names}


if not TYPE_CHECKING:  # A type checker would take any name to be there.

    def __getattr__(name: str) -> Any:
        """Import what needs torch on first use (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
