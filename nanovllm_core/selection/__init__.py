"""Start-up: which checkpoint and which plugins serve a configuration, and why not the others."""

from nanovllm_core.selection.attention import (
    SMALLEST_BLOCK as SMALLEST_BLOCK,
    evaluate as evaluate,
    unmet as unmet,
)
from nanovllm_core.selection.checkpoint import find_checkpoint as find_checkpoint
from nanovllm_core.selection.checkpoint_files import read_model_config as read_model_config
from nanovllm_core.selection.decisions import (
    Decisions as Decisions,
    compute_capability as compute_capability,
    resolve_device as resolve_device,
)
from nanovllm_core.selection.kernels import (
    KernelTarget as KernelTarget,
    select_kernels as select_kernels,
)
from nanovllm_core.selection.startup import start as start
