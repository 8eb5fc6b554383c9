"""flash-attn's two functions on the Triton kernels of nanovllm-attention-triton.

They run on NVIDIA GPUs of compute capability 8.0 and newer, never wait for the device, and on a CPU
with Triton's interpreter alone (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm_flash_attn_compat.backend import Backend, load_operators, refuse, requires_grad
from nanovllm_flash_attn_compat.functions import FlashAttention

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_operators = load_operators("triton")


def _check(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if requires_grad(q, k, v):
        refuse(
            function, "q, k, v", "a tensor that requires grad",
            "triton is forward only; call it under torch.no_grad(), or train with "
            "nanovllm_flash_attn_compat.sdpa.flash_attn_varlen_func",
        )  # fmt: skip
    if q.dtype not in DTYPES:
        refuse(function, "q", q.dtype, f"triton computes in {', '.join(map(str, DTYPES))}")
    if q.shape[-1] > _operators.MAX_HEAD_SIZE:
        refuse(
            function, "q", f"head size {q.shape[-1]}",
            f"triton has at most {_operators.MAX_HEAD_SIZE}; take nanovllm_flash_attn_compat.sdpa",
        )  # fmt: skip
    if k.dim() == 4 and k.stride() != v.stride():
        refuse(
            function, "v", f"strides {v.stride()}",
            f"triton needs k's strides {k.stride()}; make both alike",
        )  # fmt: skip
    if k.stride(-1) != 1:
        refuse(
            function, "k, v", f"strides {k.stride()}",
            "triton needs a contiguous head dimension; call .contiguous()",
        )  # fmt: skip


BACKEND = Backend(
    name="triton",
    packed_attention=_operators.packed_attention,
    paged_attention=_operators.paged_attention,
    lacks={
        "alibi_slopes": "has no ALiBi; pass None, or take nanovllm_flash_attn_compat.sdpa",
        "num_splits": "splits by measured constants; pass 0, or 1 for no split",
    },
    check=_check,
)
_functions = FlashAttention(lambda device: BACKEND)
flash_attn_varlen_func = _functions.flash_attn_varlen_func
flash_attn_with_kvcache = _functions.flash_attn_with_kvcache
