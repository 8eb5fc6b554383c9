"""Every kernel in plain torch: what runs on a CPU, and what the Triton kernels must equal."""

from __future__ import annotations

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.nn.functional import embedding, silu

from nanovllm_core.interfaces.kernels import KernelSet, LatentPrep, QKPrep, Routing
from nanovllm_core.kernels import experts_reference


class TorchKernels(KernelSet):
    """The reference kernel set; see `KernelSet` for what each operation promises.

    A set of one's own may derive from it and replace some operations: `norm_linear` and
    `norm_gate_up` are made of the others.
    """

    name = "torch"

    def __init__(
        self, options: BaseModel | None = None, device: torch.device | None = None
    ) -> None:
        """Every set is made with these arguments. On a CPU, mixtures may read ids on the host."""
        on_cpu = device is not None and device.type == "cpu"
        reference = experts_reference
        self._experts = reference.experts_of_their_tokens if on_cpu else reference.experts

    def embed(self, ids_T: Tensor, weight_VE: Tensor) -> Tensor:
        return embedding(ids_T, weight_VE)

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        # In the weight's dtype: a float32 weight multiplies what is not rounded yet.
        return _normalised(x_TE.float(), eps).to(weight_E.dtype).mul_(weight_E).to(x_TE.dtype)

    def silu_and_mul(self, gate_up_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
        return silu(gate_TF).mul_(up_TF).to(gate_up_T2F.dtype)

    def linear(
        self,
        x_TE: Tensor,
        weight_XE: Tensor,
        bias_X: Tensor | None = None,
        out_TX: Tensor | None = None,
    ) -> Tensor:
        if out_TX is not None and out_TX.dtype != x_TE.dtype:
            return _exact_product(x_TE, weight_XE, out_TX)
        if bias_X is None:
            return torch.mm(x_TE, weight_XE.t(), out=out_TX)
        return torch.addmm(bias_X, x_TE, weight_XE.t(), out=out_TX)

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
        residual_TE.addmm_(x_TF, weight_EF.t())
        return residual_TE if bias_E is None else residual_TE.add_(bias_E)

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
        v_TKD = heads_THD[:, num_heads + num_kv_heads :]
        qk_THD = _normed_heads(heads_THD[:, : num_heads + num_kv_heads].float(), prep)
        qk_THD = _rotated(qk_THD, prep.cos_sin_cache.index_select(0, positions_T))
        qk_THD = qk_THD.to(qkv_TX.dtype)
        _store(slot_mapping_T, (qk_THD[:, num_heads:], k_cache_NPKD), (v_TKD, v_cache_NPKD))
        return qk_THD[:, :num_heads].contiguous()

    def prepare_latent(
        self,
        q_THD: Tensor,
        rows_TR: Tensor,
        prep: LatentPrep,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        cache_NPR: Tensor,
    ) -> Tensor:
        cos_sin_TX = prep.cos_sin_cache.index_select(0, positions_T)
        latent_TL, key_TX = rows_TR.tensor_split((len(prep.norm_weight),), dim=-1)
        latent_TL = self.rms_norm(latent_TL, prep.norm_weight, prep.eps)
        key_TX = _rotated_pairs(key_TX.unsqueeze(1), cos_sin_TX).squeeze(1)
        row_T1R = torch.cat((latent_TL, key_TX), dim=-1).unsqueeze(1)
        _store(slot_mapping_T, (row_T1R, cache_NPR.unsqueeze(2)))
        nope_THN, rotated_THX = q_THD.tensor_split((q_THD.shape[-1] - key_TX.shape[-1],), dim=-1)
        return torch.cat((nope_THN, _rotated_pairs(rotated_THX, cos_sin_TX)), dim=-1)

    def linear_per_head(self, x_THX: Tensor, weight_HOI: Tensor) -> Tensor:
        num_outputs, num_inputs = weight_HOI.shape[1:]
        x_THI, rest = x_THX.tensor_split((num_inputs,), dim=-1)
        out = x_THX.new_empty((*x_THX.shape[:2], num_outputs + rest.shape[-1]))
        out_THO, appended = out.tensor_split((num_outputs,), dim=-1)
        torch.bmm(x_THI.transpose(0, 1), weight_HOI.transpose(1, 2), out=out_THO.transpose(0, 1))
        appended.copy_(rest)
        return out

    def route(
        self, logits_TN: Tensor, routing: Routing, bias_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return experts_reference.route(logits_TN, routing, bias_N)

    def experts(
        self,
        x_TE: Tensor,
        weights_TC: Tensor,
        ids_TC: Tensor,
        gate_up_N2FE: Tensor,
        down_NEF: Tensor,
        num_shared: int = 0,
        residual_TE: Tensor | None = None,
    ) -> Tensor:
        sum_TE = self._experts(x_TE, weights_TC, ids_TC, gate_up_N2FE, down_NEF)
        return sum_TE.to(x_TE.dtype) if residual_TE is None else residual_TE.add_(sum_TE)


def _store(slot_mapping_T: Tensor, *tokens_and_caches: tuple[Tensor, Tensor]) -> None:
    """Store tokens [T, K, D] in their slots of caches [N, P, K, D]."""
    # On a CPU rows are rarely padded, and looking costs less than storing with care.
    unpadded = slot_mapping_T.device.type == "cpu" and bool((slot_mapping_T >= 0).all())
    for x_TKD, cache_NPKD in tokens_and_caches:
        if unpadded:
            cache_NPKD[_blocks(slot_mapping_T, cache_NPKD)] = x_TKD.to(cache_NPKD.dtype)
        else:
            store_unless_padded(x_TKD, slot_mapping_T, cache_NPKD)


def store_unless_padded(x_TKD: Tensor, slot_mapping_T: Tensor, cache_NPKD: Tensor) -> None:
    """Store each token in its slot, those of slot -1 nowhere; the host never waits to know which.

    A padded token stores the first stored token once more, so that no slot has two writers that
    disagree. Where all are padded, slot 0 is written back as it was.
    """
    stored_T = slot_mapping_T >= 0
    tokens_T = torch.arange(len(stored_T), device=stored_T.device)
    tokens_T = torch.where(stored_T, tokens_T, stored_T.int().argmax())
    blocks_T, offsets_T = _blocks(slot_mapping_T[tokens_T].clamp_(min=0), cache_NPKD)
    new_TKD = x_TKD[tokens_T].to(cache_NPKD.dtype)
    any_stored = stored_T[tokens_T].view(-1, 1, 1)
    cache_NPKD[blocks_T, offsets_T] = new_TKD.where(any_stored, cache_NPKD[blocks_T, offsets_T])


def _blocks(slots_T: Tensor, cache_NPKD: Tensor) -> tuple[Tensor, Tensor]:
    """The block of each slot, and its place in the block."""
    block_size = cache_NPKD.shape[1]
    return slots_T // block_size, slots_T % block_size


def _exact_product(x_TE: Tensor, weight_XE: Tensor, out_TX: Tensor) -> Tensor:
    """x W^T in the dtype of `out_TX`, float32. Only CUDA has products of half precision for it."""
    if x_TE.is_cuda:
        return torch.mm(x_TE, weight_XE.t(), out_dtype=out_TX.dtype, out=out_TX)
    return torch.mm(x_TE.to(out_TX.dtype), weight_XE.t().to(out_TX.dtype), out=out_TX)


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _normed_heads(x_THD: Tensor, prep: QKPrep) -> Tensor:
    """The heads of q, then those of k, in float32; x is left as it is."""
    y_THD = _normalised(x_THD, prep.eps)
    q, k = slice(0, prep.num_heads), slice(prep.num_heads, None)
    for heads, weight_D in ((q, prep.q_norm_weight), (k, prep.k_norm_weight)):
        if weight_D is None:
            y_THD[:, heads] = x_THD[:, heads]
        else:
            y_THD[:, heads] *= weight_D
    return y_THD


def _rotated(x_THD: Tensor, cos_sin_TR: Tensor) -> Tensor:
    """Turn the first R dimensions of each head, those of one half against those of the other."""
    cos, sin = cos_sin_TR.unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    low, high, rest = x_THD.tensor_split((half, 2 * half), dim=-1)
    out_THD = torch.empty_like(x_THD)
    out_low, out_high, out_rest = out_THD.tensor_split((half, 2 * half), dim=-1)
    torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out_high).addcmul_(low, sin)
    out_rest.copy_(rest)
    return out_THD


def _rotated_pairs(x_THX: Tensor, cos_sin_TX: Tensor) -> Tensor:
    """Turn the numbers 2i and 2i + 1 of each head against one another, in float32; a new tensor."""
    cos, sin = cos_sin_TX.unsqueeze(1).chunk(2, dim=-1)
    even, odd = x_THX.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return pairs.flatten(-2).to(x_THX.dtype)
