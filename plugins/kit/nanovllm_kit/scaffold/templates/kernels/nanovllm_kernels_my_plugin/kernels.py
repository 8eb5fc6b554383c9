"""The operations that layers are built on, one torch operation after another.

Each says what its contract asks; put your kernel in the place of one after the other, and the tests
tell whether it still computes the same. A set for GPUs states `devices={"cuda"}` and must not wait
for the device: decode steps are captured in CUDA graphs.

Shape suffixes: T tokens, E hidden size, F intermediate size, H query heads, K KV heads, D head
size, X outputs (in attention: packed q, k, v), V vocabulary, N blocks, P tokens per block.
"""

from __future__ import annotations

import torch
from nanovllm_core.api import QKPrep
from nanovllm_core.kernels import TorchKernels
from torch import Tensor
from torch.nn.functional import silu

from nanovllm_kernels_my_plugin.plugin import MyPluginOptions


class MyPluginKernels(TorchKernels):
    """See `nanovllm_core.api.KernelSet` for what each operation promises.

    The two operations of mixtures, `route` and `experts`, are those of the base class.
    """

    name = "my_plugin"

    def __init__(self, options: MyPluginOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._compute: torch.dtype = getattr(torch, options.compute)

    def embed(self, ids_T: Tensor, weight_VE: Tensor) -> Tensor:
        return weight_VE[ids_T]

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Rounded before the weight and after it, as transformers does; a float32 weight once."""
        return (self._normed(x_TE, eps).to(weight_E.dtype) * weight_E).to(x_TE.dtype)

    def silu_and_mul(self, gate_up_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.to(self._compute).chunk(2, dim=-1)
        return (silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)

    def linear(
        self,
        x_TE: Tensor,
        weight_XE: Tensor,
        bias_X: Tensor | None = None,
        out_TX: Tensor | None = None,
    ) -> Tensor:
        """Rounded once, after the bias."""
        y_TX = self._product(x_TE, weight_XE, bias_X)
        return y_TX.to(x_TE.dtype) if out_TX is None else out_TX.copy_(y_TX)

    def norm_linear(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        weight_XE: Tensor,
        bias_X: Tensor | None = None,
    ) -> Tensor:
        return self.linear(self.rms_norm(x_TE, norm_weight_E, eps), weight_XE, bias_X)

    def norm_gate_up(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        weight_2FE: Tensor,
        bias_2F: Tensor | None = None,
    ) -> Tensor:
        return self.silu_and_mul(self.norm_linear(x_TE, norm_weight_E, eps, weight_2FE, bias_2F))

    def linear_add(
        self,
        x_TF: Tensor,
        weight_EF: Tensor,
        residual_TE: Tensor,
        bias_E: Tensor | None = None,
    ) -> Tensor:
        """Rounded once, after the addition. The residual's memory is used for the result."""
        return residual_TE.copy_(self._product(x_TF, weight_EF, bias_E) + residual_TE)

    def prepare_qkv(
        self,
        qkv_TX: Tensor,
        prep: QKPrep,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        k_cache_NPKD: Tensor,
        v_cache_NPKD: Tensor,
    ) -> Tensor:
        """Norm and rotate q and k, store k and v in their blocks, return q."""
        heads_THD = qkv_TX.reshape(qkv_TX.shape[0], -1, prep.head_size)
        first_k, first_v = prep.num_heads, prep.num_heads + prep.num_kv_heads
        q_THD, k_TKD = heads_THD[:, :first_k], heads_THD[:, first_k:first_v]
        v_TKD = heads_THD[:, first_v:]
        cos_sin_TR = prep.cos_sin_cache[positions_T]
        q_THD = self._prepared(q_THD, prep.q_norm_weight, prep.eps, cos_sin_TR)
        k_TKD = self._prepared(k_TKD, prep.k_norm_weight, prep.eps, cos_sin_TR)
        stored_T = slot_mapping_T >= 0  # -1: nothing of this token is stored
        block_size = k_cache_NPKD.shape[1]
        blocks_T = slot_mapping_T[stored_T] // block_size
        offsets_T = slot_mapping_T[stored_T] % block_size
        k_cache_NPKD[blocks_T, offsets_T] = k_TKD[stored_T].to(k_cache_NPKD.dtype)
        v_cache_NPKD[blocks_T, offsets_T] = v_TKD[stored_T].to(v_cache_NPKD.dtype)
        return q_THD.contiguous()

    def _product(self, x_TE: Tensor, weight_XE: Tensor, bias_X: Tensor | None) -> Tensor:
        y_TX = x_TE.to(self._compute) @ weight_XE.to(self._compute).t()
        return y_TX if bias_X is None else y_TX + bias_X

    def _normed(self, x: Tensor, eps: float) -> Tensor:
        x = x.to(self._compute)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)

    def _prepared(
        self, x_THD: Tensor, weight_D: Tensor | None, eps: float, cos_sin_TR: Tensor
    ) -> Tensor:
        """Each head normed where there is a weight, then rotated, and rounded once."""
        y_THD = x_THD.to(self._compute)
        if weight_D is not None:
            y_THD = self._normed(x_THD, eps) * weight_D.to(self._compute)
        cos, sin = cos_sin_TR.to(self._compute).unsqueeze(1).chunk(2, dim=-1)
        half = cos.shape[-1]
        low, high, rest = y_THD.tensor_split((half, 2 * half), dim=-1)
        turned = (low * cos - high * sin, high * cos + low * sin, rest)
        return torch.cat(turned, dim=-1).to(x_THD.dtype)
