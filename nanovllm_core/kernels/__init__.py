"""The public door for kernel sets: the reference of every operation, and dependent launch."""

from nanovllm_core.kernels.dependent_launch import (
    launch_options as launch_options,
    supports_dependent_launch as supports_dependent_launch,
)
from nanovllm_core.kernels.reference import TorchKernels as TorchKernels
