from .attention import AttentionConformance as AttentionConformance
from .checkpoint import CheckpointConformance as CheckpointConformance
from .conformance import (
    Conformance as Conformance,
    PluginUnderTest as PluginUnderTest,
    SpecConformance as SpecConformance,
    installed_plugin as installed_plugin,
    plugin_under_test as plugin_under_test,
)
from .constraint import ConstraintConformance as ConstraintConformance
from .engine_client import EngineClientConformance as EngineClientConformance
from .executor import ExecutorConformance as ExecutorConformance
from .extension import (
    ExtensionConformance as ExtensionConformance,
    extension_under_test as extension_under_test,
)
from .kernels import KernelSetConformance as KernelSetConformance
from .kind import (
    KindConformance as KindConformance,
    KindUnderTest as KindUnderTest,
    kind_under_test as kind_under_test,
)
from .logits_processor import (
    LogitsProcessorConformance as LogitsProcessorConformance,
)
from .model import ModelConformance as ModelConformance
from .observer import ObserverConformance as ObserverConformance
from .sampler import SamplerConformance as SamplerConformance
from .scheduler import (
    SchedulerConformance as SchedulerConformance,
    SchedulingPolicyConformance as SchedulingPolicyConformance,
)

def rewrite_asserts() -> None: ...
