"""Stand-ins for the providers: their functions have the real signatures and record calls."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


class Recorder:
    """Stands for a provider's function: binds each call to the real signature, and records it."""

    def __init__(self, signature: Callable[..., Any], result: Callable[[Tensor], Any]) -> None:
        self.signature = inspect.signature(signature)
        self.result = result
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Fail as Python does where an argument is unknown or missing."""
        bound = self.signature.bind(*args, **kwargs)
        self.calls.append(dict(bound.arguments))
        return self.result(args[0])


def answer(q: Tensor) -> Tensor:
    """A result that shows which queries it came from."""
    return q + 1


# The signatures of flash-attn-4 4.0.0b36 (flash_attn/cute/interface.py), flash-attn 3
# (hopper/flash_attn_interface.py) and flash-attn 2 (flash_attn/flash_attn_interface.py).


def fa4_varlen(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
    mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,
    scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    ...


def fa3_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    ...


def fa2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    ...


def fa2_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    ...


@pytest.fixture
def fake_providers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Every provider installed, as recorders by name; adapters are imported afresh."""
    recorders = {
        "fa4": Recorder(fa4_varlen, lambda q: (answer(q), None)),
        "fa3": Recorder(fa3_kvcache, answer),
        "fa2_varlen": Recorder(fa2_varlen, answer),
        "fa2_kvcache": Recorder(fa2_kvcache, answer),
    }
    flash_attn, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    fa3 = ModuleType("flash_attn_interface")
    vars(flash_attn).update(
        flash_attn_varlen_func=recorders["fa2_varlen"],
        flash_attn_with_kvcache=recorders["fa2_kvcache"],
        cute=cute,
    )
    vars(cute).update(flash_attn_varlen_func=recorders["fa4"])
    vars(fa3).update(flash_attn_with_kvcache=recorders["fa3"])
    for module in (flash_attn, cute, fa3):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        from torch.nn.attention import varlen
    except ImportError:
        real: Callable[..., Any] | None = None
    else:
        real = getattr(varlen, "varlen_attn", None)
    if real is not None and "block_table" in inspect.signature(real).parameters:
        recorders["torch"] = Recorder(real, answer)
        monkeypatch.setattr(varlen, "varlen_attn", recorders["torch"])
    forget_adapters(monkeypatch)
    monkeypatch.setattr(
        "nanovllm_attention_flash.providers.metadata.version",
        lambda name: torch.__version__ if name == "torch" else "9.8.7",
    )
    return recorders


def forget_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next import of an adapter run again, and forget it after the test."""
    for name in ("fa4", "fa3", "fa2", "torch_varlen"):
        module = f"nanovllm_attention_flash.adapters.{name}"
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.delitem(sys.modules, module)
