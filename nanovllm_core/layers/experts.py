"""Mixtures of experts: a router, and the stacked weights of many small MLPs.

Every rank holds a part of the columns of every expert, as of a dense MLP, so that all ranks have
equal work wherever tokens go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanovllm_core.interfaces.kernels import Routing
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.matrix import Piece, Pieces, make_split_parameter
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.module import Layer, make_parameter
from nanovllm_core.layers.norm import RMSNorm

_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"


def expert_modules(num_experts: int) -> Mapping[str, tuple[str, str]]:
    """The `packed_modules` of a model with an `Experts`: "17.gate_proj" is a part of "gate_up"."""
    holders = {_GATE: "gate_up", _UP: "gate_up", _DOWN: "down"}
    return {
        f"{expert}.{module}": (holder, f"{expert}.{module}")
        for expert in range(num_experts)
        for module, holder in holders.items()
    }


class Router(Layer):
    """Hidden states -> each token's experts, whole on every rank. `weight` [N, E].

    With `bias` it has `e_score_correction_bias` [N], float32 in every model, which is added to the
    scores while experts are chosen.
    """

    dummy_std = 0.05  # spreads tokens over the experts

    def __init__(
        self,
        context: LayerContext,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(context)
        self.num_experts, self.routing = num_experts, routing
        exact, size = replace(context, dtype=torch.float32), (num_experts,)
        # A random bias would send all tokens to the same experts.
        self.e_score_correction_bias = make_parameter(exact, size, dummy_std=0.0) if bias else None
        rows: Pieces = {None: Piece(num_experts, 0, num_experts)}
        self.matrix = context.make_matrix(self, rows, Piece(hidden_size, 0, hidden_size))

    def finalize(self) -> None:
        self.matrix.finalize()

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Normed hidden states [T, E] -> weights [T, C] float32 and ids [T, C] int32."""
        exact_TN = None
        if self.routing.exact_logits:
            exact_TN = x_TE.new_empty((len(x_TE), self.num_experts), dtype=torch.float32)
        logits_TN = self.matrix.linear(x_TE, out_TX=exact_TN)
        return self.context.kernels.route(logits_TN, self.routing, self.e_score_correction_bias)


class _Stack(Layer):
    """`weight` [N · out, in]: one matrix below the other; `tensor` [N, out, in] is its view."""

    def __init__(self, context: LayerContext, rows: Pieces, columns: Piece, num: int) -> None:
        super().__init__(context)
        self.weight = make_split_parameter(context, rows, columns)
        self.tensor = self.weight.view(num, -1, columns.size)


class Experts(Layer):
    """The gated MLPs of a mixture. Checkpoints name their weights "17.gate_proj.weight"."""

    def __init__(
        self, context: LayerContext, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> None:
        super().__init__(context)
        self.num_experts = num_experts
        size = context.share(intermediate_size, "intermediate size of an expert")
        part = Piece(size, context.tp.rank * size, intermediate_size)
        whole = Piece(hidden_size, 0, hidden_size)
        gate_up: Pieces = {
            f"{expert}.{module}": part for expert in range(num_experts) for module in (_GATE, _UP)
        }
        down: Pieces = {f"{expert}.{_DOWN}": whole for expert in range(num_experts)}
        self.gate_up = _Stack(context, gate_up, whole, num_experts)
        self.down = _Stack(context, down, part, num_experts)

    def forward(self, x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor) -> Tensor:
        """Normed hidden states, and the weights and ids of each token's experts -> [T, E].

        With several ranks it is this rank's part of the sum.
        """
        return self.context.kernels.experts(
            x_TE, weights_TC, ids_TC, self.gate_up.tensor, self.down.tensor
        )


class SparseMLP(nn.Module):
    """A mixture in the place of a dense MLP: every token goes through a few experts.

    `shared_size`: the intermediate size of `shared_experts`, one MLP that all tokens go through
    too; None for none. `bias`: of the `Router`.
    """

    def __init__(
        self,
        context: LayerContext,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        routing: Routing,
        *,
        bias: bool = False,
        shared_size: int | None = None,
    ) -> None:
        super().__init__()
        self.tp = context.tp
        self.gate = Router(context, hidden_size, num_experts, routing, bias=bias)
        self.experts = Experts(context, num_experts, hidden_size, intermediate_size)
        self.shared_experts = (
            None if shared_size is None else GatedMLP(context, hidden_size, shared_size)
        )

    def forward(self, residual_TE: Tensor, norm: RMSNorm) -> Tensor:
        """residual + the mixture of norm(residual). The residual is overwritten."""
        x_TE = norm(residual_TE)
        y_TE = self.experts(x_TE, *self.gate(x_TE))
        if (shared := self.shared_experts) is not None:
            hidden_TF = shared.gate_up_proj.matrix.norm_gate_up(residual_TE, norm.factors, norm.eps)
            y_TE = shared.down_proj.matrix.linear_add(hidden_TF, y_TE)
        return self.tp.all_reduce_add(y_TE, residual_TE)
