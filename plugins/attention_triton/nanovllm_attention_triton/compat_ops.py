"""The custom operators behind `compat`: opaque to torch.compile, with shapes it can know.

Each has a fake kernel, which says what comes out without running anything, so that a function that
calls it compiles whole. Operators are called with all of their arguments by place, so a fake kernel
names those that it needs; `with_lse` is the last. They have no gradient; `compat` refuses inputs
that require one.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from nanovllm_attention_triton.decode import DecodeShape, DecodeWorkspace, num_multiprocessors
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.prefill import fits_large_tiles, prefill_attention
from nanovllm_attention_triton.tuning import decode_tuning, prefill_tuning
from nanovllm_core.api import UnsupportedError

NAMESPACE = __name__.partition(".")[0]


def refuse(function: str, parameter: str, value: object, reason: str) -> NoReturn:
    """Raise UnsupportedError that names a function's parameter, its value and the reason."""
    raise UnsupportedError(f"{function}({parameter}={value}): attention_triton {reason}")


@torch.library.custom_op(f"{NAMESPACE}::attend_packed", mutates_args=())
def attend_packed(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    block_table: Tensor | None,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    left: int,
    right: int,
    soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Packed queries to packed keys [total, K, D] or pages: out [T, H, D], lse [H, T] or [0]."""
    name = "flash_attn_varlen_func"
    lens = (key_starts[1:] - key_starts[:-1]).int()
    _check_lens(name, "cu_seqlens_k", lens, max_key_len)
    _check_lens(name, "cu_seqlens_q", query_starts[1:] - query_starts[:-1], max_query_len)
    if block_table is None:
        # Packed keys are a cache whose pages hold one token each.
        k, v = k.contiguous()[:, None], v.contiguous()[:, None]
        steps = torch.arange(max(max_key_len, 1), dtype=torch.int32, device=q_THD.device)
        block_table = key_starts[:-1, None].int() + steps
    elif k.stride() != v.stride():
        refuse(name, "v", f"strides {v.stride()}", f"needs k's {k.stride()}")
    return _prefill(
        q_THD, k, v, block_table, lens, query_starts, max_query_len, scale, (left, right), soft_cap,
        with_lse,
    )  # fmt: skip


@attend_packed.register_fake
def _(q_THD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q_THD, with_lse=others[-1])


@torch.library.custom_op(f"{NAMESPACE}::append_to_cache", mutates_args=("k_cache", "v_cache"))
def append_to_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lens: Tensor, block_table: Tensor
) -> None:
    """Store `k` and `v` [B, new, K, D] behind each row's `lens` tokens, in place."""
    page = k_cache.shape[1]
    room = block_table.shape[1] * page - k.shape[1]
    _check_lens("flash_attn_with_kvcache", "cache_seqlens", lens, room)
    positions = lens.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    pages = block_table.long().gather(1, positions // page)
    k_cache[pages, positions % page] = k
    v_cache[pages, positions % page] = v


@torch.library.custom_op(f"{NAMESPACE}::attend_cache", mutates_args=())
def attend_cache(
    q_BQHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lens: Tensor,
    block_table: Tensor,
    scale: float,
    left: int,
    right: int,
    soft_cap: float,
    may_split: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """A few queries per row to pages: out [B, Q, H, D], lse [H, B * Q] or [0]."""
    batch, query_len = q_BQHD.shape[:2]
    capacity = block_table.shape[1] * k_pages.shape[1]
    _check_lens("flash_attn_with_kvcache", "cache_seqlens", lens, capacity)
    if query_len == 1 and may_split and not with_lse:
        window = left + 1 if left >= 0 else None
        out = _decode(q_BQHD, k_pages, v_pages, block_table, lens, scale, window, soft_cap)
        return out, _lse(q_BQHD, with_lse)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q_BQHD.device) * query_len
    out, lse = _prefill(
        q_BQHD.flatten(0, 1), k_pages, v_pages, block_table, lens, starts, query_len, scale,
        (left, right), soft_cap, with_lse,
    )  # fmt: skip
    return out.view(q_BQHD.shape), lse


@attend_cache.register_fake
def _(q_BQHD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q_BQHD, with_lse=others[-1])


def _outputs(q: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
    """New tensors for the output [..., H, D], contiguous, and the log-sum-exp."""
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), _lse(q, with_lse)


def _lse(q: Tensor, with_lse: bool) -> Tensor:
    """[H, queries] float32, or empty where nobody asked for it."""
    shape = (q.shape[-2], q.shape[:-2].numel()) if with_lse else (0,)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _check_lens(function: str, parameter: str, lens: Tensor, limit: int) -> None:
    """Refuse lengths beyond `limit`, where looking at them does not wait for a GPU."""
    if lens.device.type == "cpu" and lens.numel() and int(lens.max()) > limit:
        refuse(function, parameter, int(lens.max()), f"has room for {limit} here")


def _prefill(
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lens: Tensor,
    query_starts: Tensor,
    max_query_len: int,
    scale: float,
    window: tuple[int, int],
    soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Run the prefill kernel into new tensors."""
    out, lse = _outputs(q_THD, with_lse)
    large = fits_large_tiles(k_pages, v_pages)
    prefill_attention(
        q_THD if q_THD.stride(-1) == 1 else q_THD.contiguous(),
        k_pages,
        v_pages,
        block_table.int().contiguous(),
        lens.contiguous(),
        query_starts.int().contiguous(),
        max_query_len,
        scale,
        out,
        prefill_tuning(q_THD.element_size(), q_THD.shape[-1], large, TritonOptions()),
        window=window,
        soft_cap=soft_cap,
        lse_HT=lse if with_lse else None,
    )
    return out, lse


def _decode(
    q_BQHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lens: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float,
) -> Tensor:
    """Run the decode kernels for one query per row, with a workspace made for the call."""
    batch, _, num_heads, head_size = q_BQHD.shape
    capacity = block_table.shape[1] * k_pages.shape[1]
    shape = DecodeShape(
        num_heads=num_heads,
        num_kv_heads=k_pages.shape[2],
        head_size=head_size,
        max_num_seqs=batch,
        max_seq_len=capacity,
        num_multiprocessors=num_multiprocessors(q_BQHD.device),
        window=window,
        soft_cap=soft_cap,
    )
    tuning = decode_tuning(q_BQHD.element_size(), head_size, batch, TritonOptions())
    workspace = DecodeWorkspace(shape, tuning, q_BQHD.device)
    block_table = block_table.int().contiguous()
    workspace.plan(lens.contiguous(), block_table, k_pages.shape[1])
    out, _ = _outputs(q_BQHD, with_lse=False)
    q_BHD = q_BQHD[:, 0]
    q_BHD = q_BHD if q_BHD.stride(-1) == 1 else q_BHD.contiguous()
    workspace.run(q_BHD, k_pages, v_pages, block_table, capacity, scale, out[:, 0])
    return out
