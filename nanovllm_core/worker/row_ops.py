"""Chooses the implementation of the row-table operations for a device."""

from __future__ import annotations

from types import ModuleType

import torch

from nanovllm_core.errors import DeviceError


def require_triton(device: torch.device) -> None:
    """DeviceError on CUDA where Triton, in which the worker's kernels are written, is missing."""
    if device.type != "cuda":
        return
    try:
        import triton  # noqa: F401 - the kernels' modules import it when they are first needed
    except ImportError as error:
        raise DeviceError(
            f"device {device} needs triton, which cannot be imported ({error}); "
            'run: pip install "triton>=3.6", or choose device: cpu'
        ) from error


def get_row_ops(device: torch.device) -> ModuleType:
    """The module of Triton kernels on CUDA, of torch operations elsewhere: the same functions.

    `rows_reference` documents them.
    """
    if device.type == "cuda":
        from nanovllm_core.worker import rows_triton

        return rows_triton
    from nanovllm_core.worker import rows_reference

    return rows_reference
