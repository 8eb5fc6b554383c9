"""The kernel set: the fused operations layers are built on, each with its torch reference."""

from nanovllm_core.interfaces.kernels import KernelSet, QKPrep
from nanovllm_core.kernels.base import get_kernels

__all__ = ["KernelSet", "QKPrep", "get_kernels"]
