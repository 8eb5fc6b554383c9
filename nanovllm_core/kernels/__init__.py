"""What authors of kernels build on: the contract, its torch reference, and dependent launch.

The core's set is `TorchKernels`; sets for an accelerator are plugins. The other modules here hold
the sampler's kernels, which are the worker's.
"""

from nanovllm_core.interfaces.kernels import KernelSet, QKPrep
from nanovllm_core.kernels.dependent_launch import launch_options, supports_dependent_launch
from nanovllm_core.kernels.reference import TorchKernels

__all__ = ["KernelSet", "QKPrep", "TorchKernels", "launch_options", "supports_dependent_launch"]
