"""Launches the product of a few rows in Gluon, and says where there is one."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from nanovllm_core.kernels import cdiv, supports_dependent_launch
from nanovllm_kernels_triton.linear_choice import FewRowsPlan
from nanovllm_kernels_triton.strides import in_units

GLUON_VERSIONS = ("3.6.", "3.7.")
"""Versions of Triton in whose Gluon, an experimental language, the kernel is known to compile."""


def has_few_rows_kernel(device: torch.device) -> bool:
    """Whether the GPU has dependent launch, by which the kernel gains, and the Triton is known.

    Its instruction would do from compute capability 8.0 on; whether it is faster there was not
    measured.
    """
    return supports_dependent_launch(device) and triton.__version__.startswith(GLUON_VERSIONS)


def run_few_rows(
    plan: FewRowsPlan,
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out: Tensor,
    **options: Any,
) -> None:
    """As `LinearLauncher.run`, into `out`; `options` are the launch's, with GATED, GELU and ADD."""
    # Imported by those who run it: another Triton may have another Gluon.
    from nanovllm_kernels_triton.few_rows_kernel import few_rows_kernel

    x_units, x_unit = in_units(x_TK.stride(0))
    span = plan.block_n // 2 if options["GATED"] else plan.block_n
    few_rows_kernel[(cdiv(out.shape[1], span),)](
        x_TK, weight_NK, bias_N, out, x_TK.shape[0], x_units, out.stride(0),
        X_UNIT=x_unit,
        OUTPUTS=out.shape[1],
        INPUTS=weight_NK.shape[1],
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        HELD=plan.held,
        num_warps=plan.num_warps,
        **options,
    )  # fmt: skip
