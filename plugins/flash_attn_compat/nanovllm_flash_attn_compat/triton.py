"""flash-attn's two functions on the Triton kernels of nanovllm-attention-triton.

They run on NVIDIA GPUs of compute capability 8.0 and newer, never wait for the device, and on a CPU
with Triton's interpreter alone (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from nanovllm_flash_attn_compat.backend import Backend, load_operators, refuse, requires_grad
from nanovllm_flash_attn_compat.choice import OLDEST_CAPABILITY
from nanovllm_flash_attn_compat.functions import FlashAttention

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_operators = load_operators("triton")
# Triton reads its switch when kernels are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_reasons: dict[torch.device, str] = {}


def _reason_against(device: torch.device) -> str:
    """Why the kernels do not run on a device, with the remedy; empty where they do."""
    if device not in _reasons:
        reason = ""
        if INTERPRETED:
            pass
        elif device.type != "cuda":
            reason = "triton runs on NVIDIA GPUs, and elsewhere with TRITON_INTERPRET=1 for tests"
        elif (capability := torch.cuda.get_device_capability(device)) < OLDEST_CAPABILITY:
            reason = f"compute capability {capability} is below triton's {OLDEST_CAPABILITY}"
        _reasons[device] = reason and f"{reason}; take nanovllm_flash_attn_compat.sdpa"
    return _reasons[device]


# The compiler runs it instead of tracing it, as in choice.py.
setattr(_reason_against, "_dynamo_marked_constant", True)  # noqa: B010


def _check(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if reason := _reason_against(q.device):
        refuse(function, "q", f"a tensor on {q.device}", reason)
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
    if k.dim() == 4:
        _check_blocks(function, k, v)


def _check_blocks(function: str, k: Tensor, v: Tensor) -> None:
    """Refuse blocks whose strides the kernels do not take; packed keys are copied."""
    if k.stride() != v.stride() and any(
        size != 1 and one != other
        for size, one, other in zip(k.shape, k.stride(), v.stride(), strict=True)
    ):
        refuse(
            function, "v", f"strides {v.stride()}",
            f"triton needs k's strides {k.stride()}; make both alike",
        )  # fmt: skip
    if k.stride(-1) != 1 and k.shape[-1] != 1:
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
        "softmax_scale": "needs a positive one; negate q",
        "num_splits": "splits by measured constants; pass 0, or 1 for no split",
    },
    check=_check,
)
_functions = FlashAttention(lambda device: BACKEND)
flash_attn_varlen_func = _functions.flash_attn_varlen_func
flash_attn_with_kvcache = _functions.flash_attn_with_kvcache
