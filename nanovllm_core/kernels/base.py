"""The choice of a kernel set for a device."""

from __future__ import annotations

import torch

from nanovllm_core.errors import DeviceError
from nanovllm_core.interfaces.kernels import KernelSet


def get_kernels(device: torch.device) -> KernelSet:
    """The kernel set for a device: Triton on CUDA, the torch reference elsewhere.

    Raises DeviceError where CUDA was asked for and Triton cannot be imported.
    """
    if device.type != "cuda":
        from nanovllm_core.kernels.reference import TorchKernels

        return TorchKernels()
    try:
        from nanovllm_core.kernels.dependent_launch import supports_dependent_launch
        from nanovllm_core.kernels.triton_set import TritonKernels
    except ImportError as error:
        raise DeviceError(
            f"device {device} needs triton, which cannot be imported ({error}); "
            'run: pip install "triton>=3.6", or choose device: cpu'
        ) from error
    return TritonKernels(dependent_launch=supports_dependent_launch(device))
