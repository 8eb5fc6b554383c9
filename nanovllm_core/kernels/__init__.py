"""The public door for kernel sets: the reference of every operation, and their launches."""

from nanovllm_core.kernels.dependent_launch import (
    launch_options as launch_options,
    supports_dependent_launch as supports_dependent_launch,
)
from nanovllm_core.kernels.reference import TorchKernels as TorchKernels
from nanovllm_core.kernels.sizes import cdiv as cdiv, next_power_of_2 as next_power_of_2
