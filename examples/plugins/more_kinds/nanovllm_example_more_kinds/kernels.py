"""Every operation in float64, rounded only where the contract says so.

Slow, and each product copies its weight to float64: it is for comparing. Where an answer with this
set differs from one with the set in use, rounding alone made the difference.
Shape suffixes as in `nanovllm_core.api.KernelSet`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from nanovllm_core.api import QKPrep
from nanovllm_core.kernels import TorchKernels


class Float64Kernels(TorchKernels):
    """What rounds is its own; the core's torch set makes the fused operations of these."""

    name = "float64"

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        return (normalised(x_TE.double(), eps).to(weight_E.dtype) * weight_E).to(x_TE.dtype)

    def silu_and_mul(self, gate_up_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.double().chunk(2, dim=-1)
        return (silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)

    def linear(
        self,
        x_TE: Tensor,
        weight_XE: Tensor,
        bias_X: Tensor | None = None,
        out_TX: Tensor | None = None,
    ) -> Tensor:
        y_TX = product(x_TE, weight_XE, bias_X)
        return y_TX.to(x_TE.dtype) if out_TX is None else out_TX.copy_(y_TX)

    def linear_add(
        self,
        x_TF: Tensor,
        weight_EF: Tensor,
        residual_TE: Tensor,
        bias_E: Tensor | None = None,
    ) -> Tensor:
        return residual_TE.copy_(product(x_TF, weight_EF, bias_E) + residual_TE)

    def prepare_qkv(
        self,
        qkv_TX: Tensor,
        prep: QKPrep,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        k_cache_NPKD: Tensor,
        v_cache_NPKD: Tensor,
    ) -> Tensor:
        sizes = (prep.num_heads, prep.num_kv_heads, prep.num_kv_heads)
        q_THD, k_TKD, v_TKD = qkv_TX.unflatten(-1, (-1, prep.head_size)).split(sizes, dim=1)
        cos_sin_T1R = prep.cos_sin_cache[positions_T].unsqueeze(1).double()
        q_THD = rotated(normed_heads(q_THD, prep.q_norm_weight, prep.eps), cos_sin_T1R)
        k_TKD = rotated(normed_heads(k_TKD, prep.k_norm_weight, prep.eps), cos_sin_T1R)
        stored_T = slot_mapping_T >= 0  # -1 is padding
        slots = slot_mapping_T[stored_T]
        block_size = k_cache_NPKD.shape[1]
        places = slots // block_size, slots % block_size
        k_cache_NPKD[places] = k_TKD[stored_T].to(k_cache_NPKD.dtype)
        v_cache_NPKD[places] = v_TKD[stored_T].to(v_cache_NPKD.dtype)
        return q_THD.to(qkv_TX.dtype).contiguous()


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in float64."""
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias


def normalised(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def normed_heads(x_THD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """Heads in float64, normed where there is a weight."""
    x_THD = x_THD.double()
    return x_THD if weight_D is None else normalised(x_THD, eps) * weight_D


def rotated(x_THD: Tensor, cos_sin_T1R: Tensor) -> Tensor:
    """The first R dimensions of each head, one half against the other; the rest as it is."""
    cos, sin = cos_sin_T1R.chunk(2, dim=-1)
    half = cos.shape[-1]
    low, high, rest = x_THD.tensor_split((half, 2 * half), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
