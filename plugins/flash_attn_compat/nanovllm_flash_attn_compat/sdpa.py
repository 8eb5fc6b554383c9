"""flash-attn's two functions on torch's own attention, by nanovllm-attention-sdpa.

They run wherever torch does, in any floating dtype and at any head size;
`flash_attn_varlen_func` has gradients. On a GPU a call waits for the lengths, except one of
`flash_attn_with_kvcache` with single queries, which a CUDA graph can hold.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm_flash_attn_compat.backend import Backend, load_operators, refuse, requires_grad
from nanovllm_flash_attn_compat.functions import FlashAttention

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _check(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.dim() == 4 and requires_grad(q, k, v):
        refuse(
            function, "q, k, v", "a tensor that requires grad",
            "a cache gets no gradient; call it under torch.no_grad(), or pass packed k and v to "
            "flash_attn_varlen_func",
        )  # fmt: skip


_operators = load_operators("sdpa")
BACKEND = Backend(
    name="sdpa",
    packed_attention=_operators.packed_attention,
    paged_attention=_operators.paged_attention,
    lacks={},
    check=_check,
)
_functions = FlashAttention(lambda device: BACKEND)
flash_attn_varlen_func = _functions.flash_attn_varlen_func
flash_attn_with_kvcache = _functions.flash_attn_with_kvcache
