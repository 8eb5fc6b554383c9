"""Chooses the implementation of the row-table operations for a device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanovllm_core.errors import DeviceError
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.results import ResultRing
from nanovllm_core.worker.rows import RowTables


class RowOps(Protocol):
    """The operations of `rows_reference` (torch) and `rows_triton`; the former documents them."""

    def scatter_updates(self, arena: Tensor, updates_2N: Tensor) -> None: ...

    def prepare_decode(self, tables: RowTables, inputs: StepInputs) -> None: ...

    def prepare_prefill(
        self, tables: RowTables, chunks_5S: Tensor, inputs: StepInputs, max_query_len: int
    ) -> None: ...

    def finish_step(
        self,
        tables: RowTables,
        inputs: StepInputs,
        sampled_B: Tensor,
        results: ResultRing,
        skip: Tensor,
    ) -> None: ...


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


def get_row_ops(device: torch.device) -> RowOps:
    """Triton kernels on CUDA, torch operations elsewhere."""
    if device.type == "cuda":
        from nanovllm_core.worker import rows_triton

        return rows_triton
    from nanovllm_core.worker import rows_reference

    return rows_reference
