"""Programmatic dependent launch: a kernel starts while the one before it in the stream ends.

CUDA's guide calls it programmatic dependent launch; it exists from compute capability 9.0 on. A
kernel that takes part is compiled with DEPENDENT and obeys one order: signal, fetch what no kernel
writes (weights), wait, and only then read or write anything else. The signal lets the next kernel
start as soon as every program of this one has begun; the wait returns when all memory operations of
the kernel before are visible. As every kernel waits, what it sees is what it would see in order, so
results have the same bits. Kernels that do not take part (cuBLAS) run in the usual order.
"""

from __future__ import annotations

from typing import Any

import torch


def supports_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched this way."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(dependent_launch: bool) -> dict[str, Any]:
    """The keyword arguments of a launch of a Triton kernel that has a DEPENDENT parameter."""
    if not dependent_launch:
        return {"DEPENDENT": False}  # without `launch_pdl`: the interpreter does not know it
    return {"DEPENDENT": True, "launch_pdl": True}
