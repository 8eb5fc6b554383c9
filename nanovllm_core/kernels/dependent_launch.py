"""Programmatic dependent launch: a kernel starts while the one before it in the stream ends.

CUDA's guide calls it programmatic dependent launch; it exists from compute capability 9.0 on. A
kernel that takes part is compiled with DEPENDENT. Before it waits it writes nothing, and reads
only memory that no kernel before it can still be writing (weights; in decode attention the step's
plan and the keys of earlier steps). The wait returns when all memory operations of the
kernel before are visible. The signal lets the next kernel's programs start when every program of
this one has given it: early where they then fetch weights or cost nothing, behind the main loop
where they would only take its place. As every kernel waits, it sees what it would see in order, so
results have the same bits. Kernels that do not take part (cuBLAS) run in the usual order.
"""

from __future__ import annotations

from typing import Any

import torch


def supports_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched this way."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(dependent_launch: bool) -> dict[str, Any]:
    """The keyword arguments of a launch of a Triton kernel that has a DEPENDENT parameter."""
    if not dependent_launch:
        return {"DEPENDENT": False}  # without `launch_pdl`: the interpreter does not know it
    return {"DEPENDENT": True, "launch_pdl": True}
