"""The core's two kernel sets, made for a device."""

from __future__ import annotations

import torch
from pydantic import BaseModel

from nanovllm_core.errors import DeviceError
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.kernels.reference import TorchKernels


def make_triton_kernels(options: BaseModel, device: torch.device) -> KernelSet:
    """Triton on CUDA; DeviceError where Triton cannot be imported."""
    try:
        from nanovllm_core.kernels.dependent_launch import supports_dependent_launch
        from nanovllm_core.kernels.triton_set import TritonKernels
    except ImportError as error:
        raise DeviceError(
            f"device {device} needs triton, which cannot be imported ({error}); "
            'run: pip install "triton>=3.6", or choose device: cpu'
        ) from error
    return TritonKernels(dependent_launch=supports_dependent_launch(device))


def get_kernels(device: torch.device) -> KernelSet:
    """The set that `kernels: auto` takes, for programs that have no configuration."""
    make = make_triton_kernels if device.type == "cuda" else TorchKernels
    return make(NoOptions(), device)
