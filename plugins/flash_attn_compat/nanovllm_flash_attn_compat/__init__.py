"""flash-attn 2's two functions for inference, with flash-attn's signatures.

    from nanovllm_flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache

The device of `q` decides the backend; `chosen_backend` returns its name and the reason. The modules
`nanovllm_flash_attn_compat.triton` and `.sdpa` have the same two functions on one backend. Inside
`debug()` lengths and block ids on a GPU are checked too.
"""

from nanovllm_flash_attn_compat.bounds import debug
from nanovllm_flash_attn_compat.choice import backend_for, chosen_backend
from nanovllm_flash_attn_compat.functions import FlashAttention

__all__ = ["chosen_backend", "debug", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_functions = FlashAttention(backend_for)
flash_attn_varlen_func = _functions.flash_attn_varlen_func
flash_attn_with_kvcache = _functions.flash_attn_with_kvcache
