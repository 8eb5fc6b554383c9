"""The public door of the core for plugins: contracts, specs, plain data, errors and hooks.

    from nanovllm_core.api import SchedulerSpec, SchedulingPolicy, hookimpl

Nothing here imports torch, so a plugin's light module may import from it. Three more doors need
torch: `nanovllm_core.layers` for models, `nanovllm_core.kernels` for kernel sets, and
`nanovllm_core.worker` for executors. `nanovllm_core.frontend` is the door for engine clients.

Each name is public because it stands in one of these five modules: a change of a name, a signature
or a field shows in tests/api/public_names.txt, and one that breaks a plugin raises the contract
version of its kind.
"""

from nanovllm_core.config.choices import NamedPlugin as NamedPlugin
from nanovllm_core.config.settings import EngineConfig as EngineConfig
from nanovllm_core.errors import (
    ArchitectureError as ArchitectureError,
    CheckpointError as CheckpointError,
    CheckpointNotFoundError as CheckpointNotFoundError,
    ConfigError as ConfigError,
    DeviceError as DeviceError,
    EngineClosedError as EngineClosedError,
    EngineError as EngineError,
    ExecutorError as ExecutorError,
    InconsistentStateError as InconsistentStateError,
    InvalidPromptError as InvalidPromptError,
    InvalidSamplingError as InvalidSamplingError,
    NanoVLLMError as NanoVLLMError,
    OutOfMemoryError as OutOfMemoryError,
    PluginConflictError as PluginConflictError,
    PluginFailedError as PluginFailedError,
    PluginLoadError as PluginLoadError,
    PluginNotFoundError as PluginNotFoundError,
    SchedulerError as SchedulerError,
    UnsupportedError as UnsupportedError,
    WeightsError as WeightsError,
)
from nanovllm_core.interfaces.attention import (
    AttentionBackend as AttentionBackend,
    AttentionCapabilities as AttentionCapabilities,
    AttentionConfig as AttentionConfig,
    AttentionRequirements as AttentionRequirements,
    DecodeMetadata as DecodeMetadata,
    GraphSupport as GraphSupport,
    KVLayout as KVLayout,
    PackedMetadata as PackedMetadata,
    Phase as Phase,
    PrefillMetadata as PrefillMetadata,
)
from nanovllm_core.interfaces.constraint import (
    Constraint as Constraint,
    ConstraintContext as ConstraintContext,
    ConstraintSpec as ConstraintSpec,
    allow_ids as allow_ids,
    allows as allows,
)
from nanovllm_core.interfaces.doctor import DoctorCheck as DoctorCheck
from nanovllm_core.interfaces.executor import (
    Executor as Executor,
    WorkerSetup as WorkerSetup,
)
from nanovllm_core.interfaces.kernels import (
    AdaptingKernels as AdaptingKernels,
    CompilingKernels as CompilingKernels,
    FetchingKernels as FetchingKernels,
    GatedKernels as GatedKernels,
    GeluKernels as GeluKernels,
    KernelSet as KernelSet,
    LatentPrep as LatentPrep,
    LoadingKernels as LoadingKernels,
    MixtureKernels as MixtureKernels,
    NormingKernels as NormingKernels,
    PostNormKernels as PostNormKernels,
    Product as Product,
    QKPrep as QKPrep,
    Routing as Routing,
    RoutingKernels as RoutingKernels,
)
from nanovllm_core.interfaces.logits_processor import (
    LogitsContext as LogitsContext,
    LogitsProcessor as LogitsProcessor,
    LogitsRequest as LogitsRequest,
)
from nanovllm_core.interfaces.model import (
    AttentionShape as AttentionShape,
    CausalLM as CausalLM,
    LatentHeads as LatentHeads,
    ModelShape as ModelShape,
)
from nanovllm_core.interfaces.observer import (
    ObserverContext as ObserverContext,
    RequestRecord as RequestRecord,
    StepObserver as StepObserver,
    StepRecord as StepRecord,
)
from nanovllm_core.interfaces.parallel import (
    SINGLE as SINGLE,
    ParallelContext as ParallelContext,
)
from nanovllm_core.interfaces.plan import (
    MAX_DEVICE_STOP_IDS as MAX_DEVICE_STOP_IDS,
    PADDED as PADDED,
    Admission as Admission,
    PrefillChunk as PrefillChunk,
    RowSampling as RowSampling,
    StepPlan as StepPlan,
    StepResult as StepResult,
    TokenLogprobs as TokenLogprobs,
    TokenMasks as TokenMasks,
    WorkerInfo as WorkerInfo,
    mask_words as mask_words,
)
from nanovllm_core.interfaces.plugins import Plugins as Plugins
from nanovllm_core.interfaces.sampler import (
    Sampler as Sampler,
    SamplerContext as SamplerContext,
)
from nanovllm_core.interfaces.sampling_params import SamplingParams as SamplingParams
from nanovllm_core.interfaces.scheduler import (
    PrefillShare as PrefillShare,
    RequestView as RequestView,
    Scheduler as Scheduler,
    SchedulerState as SchedulerState,
    SchedulingPolicy as SchedulingPolicy,
)
from nanovllm_core.interfaces.specs import (
    AttentionSpec as AttentionSpec,
    CheckpointSpec as CheckpointSpec,
    DeviceSpec as DeviceSpec,
    EngineClientSpec as EngineClientSpec,
    ExecutorSpec as ExecutorSpec,
    KernelSetSpec as KernelSetSpec,
    KindSpec as KindSpec,
    LogitsProcessorSpec as LogitsProcessorSpec,
    ModelSpec as ModelSpec,
    NoOptions as NoOptions,
    ObserverSpec as ObserverSpec,
    PluginSpec as PluginSpec,
    ResolvedPlugin as ResolvedPlugin,
    SamplerSpec as SamplerSpec,
    SchedulerSpec as SchedulerSpec,
)
from nanovllm_core.interfaces.tail import (
    LOGPROB_COLUMNS as LOGPROB_COLUMNS,
    MAX_ROW_BIASES as MAX_ROW_BIASES,
    MAX_ROW_LOGPROBS as MAX_ROW_LOGPROBS,
    NUM_ROW_COLUMNS as NUM_ROW_COLUMNS,
    CapturedTail as CapturedTail,
    RowColumn as RowColumn,
    RowFlag as RowFlag,
    ShardedTail as ShardedTail,
    ShardedTailKernels as ShardedTailKernels,
    TailKernels as TailKernels,
    TailTables as TailTables,
    VocabShard as VocabShard,
)
from nanovllm_core.registry.hookspecs import (
    hookimpl as hookimpl,
    hookspec as hookspec,
)
