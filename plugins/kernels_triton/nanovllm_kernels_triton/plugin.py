"""What this plugin offers, as data: importing it imports neither torch nor triton."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nanovllm_core.api import KernelSetSpec, WorkerInfo, hookimpl


@hookimpl
def nanovllm_kernels() -> Sequence[KernelSetSpec]:
    return [
        KernelSetSpec(
            name="triton",
            impl="nanovllm_kernels_triton.kernel_set:make_kernels",
            contract=4,
            summary="Fused Triton kernels; cuBLAS for products of many rows.",
            devices=frozenset({"cuda"}),
            min_compute_capability=(8, 0),
            rank=50,
            needs_warm_up=False,
            wake="nanovllm_kernels_triton.compilers:wake",
        )
    ]


@hookimpl
def nanovllm_engine_started(info: WorkerInfo) -> None:
    """The process that `wake` has started is not left behind where the start had no use for it."""
    if compilers := sys.modules.get("nanovllm_kernels_triton.compilers"):
        compilers.discard()
