"""Mixtures of experts: a router, and the stacked weights of many small MLPs.

Every rank holds a part of the columns of every expert, as of a dense MLP, so that all ranks have
equal work wherever tokens go.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from nanovllm_core.interfaces.kernels import Routing
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.matrix import Piece, Pieces, make_split_parameter
from nanovllm_core.layers.module import Layer
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
    """Hidden states -> each token's experts, whole on every rank. `weight` [N, E]."""

    def __init__(
        self, context: LayerContext, hidden_size: int, num_experts: int, routing: Routing
    ) -> None:
        super().__init__(context)
        self.routing = routing
        rows: Pieces = {None: Piece(num_experts, 0, num_experts)}
        self.matrix = context.make_matrix(self, rows, Piece(hidden_size, 0, hidden_size))

    def finalize(self) -> None:
        self.matrix.finalize()

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Normed hidden states [T, E] -> weights [T, C] float32 and ids [T, C] int32."""
        return self.context.kernels.route(self.matrix.linear(x_TE), self.routing)


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
        """Normed hidden states, and the weights and ids of each token's experts -> [T, E]."""
        y_TE = self.context.kernels.experts(
            x_TE, weights_TC, ids_TC, self.gate_up.tensor, self.down.tensor
        )
        return self.context.tp.all_reduce(y_TE)


class SparseMLP(nn.Module):
    """A mixture in the place of a dense MLP: every token goes through a few experts."""

    def __init__(
        self,
        context: LayerContext,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        routing: Routing,
    ) -> None:
        super().__init__()
        self.gate = Router(context, hidden_size, num_experts, routing)
        self.experts = Experts(context, num_experts, hidden_size, intermediate_size)

    def forward(self, residual_TE: Tensor, norm: RMSNorm) -> Tensor:
        """residual + the mixture of norm(residual). The residual is overwritten."""
        x_TE = norm(residual_TE)
        weights_TC, ids_TC = self.gate(x_TE)
        return residual_TE.add_(self.experts(x_TE, weights_TC, ids_TC))
