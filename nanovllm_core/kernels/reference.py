"""Every kernel in plain torch: what runs on a CPU, and what the Triton kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from nanovllm_core.kernels.base import QKPrep


class TorchKernels:
    """The reference kernel set; see `KernelSet` for what each operation promises."""

    name = "torch"

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        return weight_E * _normalised(x_TE.float(), eps).to(x_TE.dtype)

    def silu_and_mul(self, gate_up_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
        return (silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)

    def linear(self, x_TE: Tensor, weight_XE: Tensor, out_TX: Tensor | None = None) -> Tensor:
        return torch.mm(x_TE, weight_XE.t(), out=out_TX)

    def norm_linear(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, weight_XE: Tensor
    ) -> Tensor:
        return linear(self.rms_norm(x_TE, norm_weight_E, eps), weight_XE)

    def norm_gate_up(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, weight_2FE: Tensor
    ) -> Tensor:
        return self.silu_and_mul(self.norm_linear(x_TE, norm_weight_E, eps, weight_2FE))

    def linear_add(self, x_TF: Tensor, weight_EF: Tensor, residual_TE: Tensor) -> Tensor:
        return residual_TE.addmm_(x_TF, weight_EF.t())

    def prepare_qkv(
        self,
        qkv_TX: Tensor,
        prep: QKPrep,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        k_cache_NPKD: Tensor,
        v_cache_NPKD: Tensor,
    ) -> Tensor:
        num_heads, num_kv_heads = prep.num_heads, prep.num_kv_heads
        heads_THD = qkv_TX.view(-1, num_heads + 2 * num_kv_heads, prep.head_size)
        q_THD = heads_THD[:, :num_heads]
        k_TKD = heads_THD[:, num_heads : num_heads + num_kv_heads]
        v_TKD = heads_THD[:, num_heads + num_kv_heads :]
        cos_sin_T1R = prep.cos_sin_cache[positions_T.long()].unsqueeze(1)
        q_THD = _norm_and_rotate(q_THD, prep.q_norm_weight, prep.eps, cos_sin_T1R)
        k_TKD = _norm_and_rotate(k_TKD, prep.k_norm_weight, prep.eps, cos_sin_T1R)

        block_size = k_cache_NPKD.shape[1]
        stored_T = slot_mapping_T >= 0
        slots = slot_mapping_T[stored_T].long()
        pages, offsets = slots // block_size, slots % block_size
        k_cache_NPKD[pages, offsets] = k_TKD[stored_T].to(k_cache_NPKD.dtype)
        v_cache_NPKD[pages, offsets] = v_TKD[stored_T].to(v_cache_NPKD.dtype)
        return q_THD.contiguous()


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _norm_and_rotate(
    x_THD: Tensor, weight_D: Tensor | None, eps: float, cos_sin_T1R: Tensor
) -> Tensor:
    y_THD = x_THD.float()
    if weight_D is not None:
        y_THD = _normalised(y_THD, eps) * weight_D.float()
    cos, sin = cos_sin_T1R.chunk(2, dim=-1)
    half = cos.shape[-1]
    low, high, rest = y_THD[..., :half], y_THD[..., half : 2 * half], y_THD[..., 2 * half :]
    rotated = (low * cos - high * sin, high * cos + low * sin, rest)
    return torch.cat(rotated, dim=-1).to(x_THD.dtype)
