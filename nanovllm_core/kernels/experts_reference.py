"""Mixtures of experts in plain torch; `KernelSet` says what the operations promise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from nanovllm_core.interfaces.kernels import Routing

TINY = 1e-20
"""Added to the divisor of `Routing.renormalize`."""


def route(logits_TN: Tensor, routing: Routing, bias_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and ids of each token's experts; see `KernelSet.route`."""
    logits_TN = logits_TN.float()
    is_softmax = routing.scoring == "softmax"
    scores_TN = logits_TN.softmax(dim=-1) if is_softmax else logits_TN.sigmoid()
    choice_TN = scores_TN if bias_N is None else scores_TN + bias_N
    if routing.top_groups < routing.num_groups:
        choice_TN = _within_top_groups(choice_TN, routing)
    ids_TC = _largest(choice_TN, routing.top_k)
    weights_TC = scores_TN.gather(1, ids_TC)
    if routing.renormalize:
        weights_TC = weights_TC / (weights_TC.sum(dim=-1, keepdim=True) + TINY)
    weights_TC, ids_TC = weights_TC * routing.scale, ids_TC.int()
    if not (shared := routing.num_shared):
        return weights_TC, ids_TC
    num_routed = logits_TN.shape[1]
    ids_S = torch.arange(num_routed, num_routed + shared, dtype=torch.int32, device=ids_TC.device)
    ids_TC = torch.cat((ids_TC, ids_S.expand(len(ids_TC), -1)), dim=1)
    return pad(weights_TC, (0, shared), value=1.0), ids_TC


def experts(
    x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor, down_NEF: Tensor
) -> Tensor:
    """Every expert computes all tokens, and adds nothing to those whose weight is 0.

    So the host does not wait to know which token chose which. The sums [T, E] are float32.
    """
    sum_TE = torch.zeros_like(x_TE, dtype=torch.float32)
    for expert, (gate_up_2FE, down_EF) in enumerate(zip(gate_up_N2FE, down_NEF, strict=True)):
        weight_T1 = weights_TC.where(ids_TC == expert, 0).sum(dim=-1, keepdim=True)
        sum_TE += (_expert(x_TE, gate_up_2FE, down_EF).float() * weight_T1).where(weight_T1 != 0, 0)
    return sum_TE


def experts_of_their_tokens(
    x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor, down_NEF: Tensor
) -> Tensor:
    """The same, where the host may read ids: every expert computes the tokens that chose it."""
    sum_TE = torch.zeros_like(x_TE, dtype=torch.float32)
    for expert in ids_TC.unique().tolist():
        tokens, places = (ids_TC == expert).nonzero(as_tuple=True)
        y_TE = _expert(x_TE[tokens], gate_up_N2FE[expert], down_NEF[expert])
        sum_TE.index_add_(0, tokens, y_TE.float() * weights_TC[tokens, places].unsqueeze(-1))
    return sum_TE


def _expert(x_TE: Tensor, gate_up_2FE: Tensor, down_EF: Tensor) -> Tensor:
    gate_TF, up_TF = torch.mm(x_TE, gate_up_2FE.t()).float().chunk(2, dim=-1)
    return torch.mm(silu(gate_TF).mul_(up_TF).to(x_TE.dtype), down_EF.t())


def _within_top_groups(choice_TN: Tensor, routing: Routing) -> Tensor:
    """The same, with minus infinity outside of each token's best groups."""
    grouped: Tensor = choice_TN.unflatten(-1, (routing.num_groups, -1))
    if routing.group_score == "max":
        score_TG = grouped.amax(dim=-1)
    else:
        score_TG = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = torch.zeros_like(score_TG, dtype=torch.bool)
    best.scatter_(1, _largest(score_TG, routing.top_groups), True)
    kept_TGN: Tensor = grouped.masked_fill(~best.unsqueeze(-1), -torch.inf)
    return kept_TGN.flatten(-2)


def _largest(x_TN: Tensor, count: int) -> Tensor:
    """The places of the largest numbers, the first of equal ones first."""
    return x_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]
