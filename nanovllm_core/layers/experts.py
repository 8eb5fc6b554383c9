"""Mixtures of experts: a router, and the stacked weights of many small MLPs.

Every rank holds a part of the columns of every expert, as of a dense MLP, so that all ranks have
equal work wherever tokens go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanovllm_core.interfaces.kernels import FetchingKernels, Routing
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.linear import SumOverRanks
from nanovllm_core.layers.matrix import Piece, Pieces, WeightMatrix, make_split_parameter
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.module import Layer, ModelParameter, ShardId, copy_weight, make_parameter
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

    def forward(self, x_TE: Tensor, norm: RMSNorm | None = None) -> tuple[Tensor, ...]:
        """Normed hidden states [T, E] -> weights [T, C] float32 and ids [T, C] int32.

        With a `norm` x is the residual, and the third result is norm(x) [T, E].
        """
        bias_N = self.e_score_correction_bias
        if norm is not None:
            fused = self.matrix.norm_route(x_TE, norm.factors, norm.eps, self.routing, bias_N)
            if fused is not None:
                return fused
            x_TE = norm(x_TE)
        exact_TN = None
        if self.routing.exact_logits:
            exact_TN = x_TE.new_empty((len(x_TE), self.num_experts), dtype=torch.float32)
        logits_TN = self.matrix.linear(x_TE, out_TX=exact_TN)
        routed = self.context.kernels.route(logits_TN, self.routing, bias_N)
        return routed if norm is None else (*routed, x_TE)


class _Stack(Layer):
    """`tensor` [N + S, out, in]: routed experts, then shared ones. `weight` is the routed part."""

    def __init__(
        self, context: LayerContext, rows: Pieces, columns: Piece, num: int, num_shared: int
    ) -> None:
        super().__init__(context)
        outputs = sum(piece.size for piece in rows.values()) // num
        self.tensor = torch.empty(
            (num + num_shared, outputs, columns.size), dtype=context.dtype, device=context.device
        )
        self.weight = make_split_parameter(context, rows, columns, self.tensor[:num].flatten(0, 1))
        whole = sum(piece.full_size for piece in rows.values()) // num
        self.weight.stacked_shape = (num, whole, columns.full_size)


class Experts(Layer):
    """The gated MLPs of a mixture. Checkpoints name their weights "17.gate_proj.weight".

    Or they hold those of all experts in two tensors, "gate_up_proj" and "down_proj" [N, out, in].
    Behind the `num_experts` that a router chooses from lie `num_shared` others: `SharedExperts`.
    """

    def __init__(
        self,
        context: LayerContext,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        num_shared: int = 0,
    ) -> None:
        super().__init__(context)
        self.num_experts, self.num_shared = num_experts, num_shared
        size = context.share(intermediate_size, "intermediate size of an expert")
        self.columns = part = Piece(size, context.tp.rank * size, intermediate_size)
        whole = Piece(hidden_size, 0, hidden_size)
        gate_up: Pieces = {
            f"{expert}.{module}": part for expert in range(num_experts) for module in (_GATE, _UP)
        }
        down: Pieces = {f"{expert}.{_DOWN}": whole for expert in range(num_experts)}
        self.gate_up = _Stack(context, gate_up, whole, num_experts, num_shared)
        self.down = _Stack(context, down, part, num_experts, num_shared)

    def forward(
        self, x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, residual_TE: Tensor | None = None
    ) -> Tensor:
        """Normed hidden states, and the weights and ids of each token's experts -> [T, E].

        With several ranks it is this rank's part of the sum. The residual, if it is given, is in
        the sum, and is overwritten.
        """
        stacks = (self.gate_up.tensor, self.down.tensor)
        return self.context.kernels.experts(
            x_TE, weights_TC, ids_TC, *stacks, self.num_shared, residual_TE
        )


class _SharedStack(Layer):
    """`weight` [S · out, in]: the shared experts of a stack, from one matrix or two of an MLP.

    Each expert has an equal part of the MLP's width, which is dimension `dim` of its matrices:
    rows of gate and up, columns of down. Shards are named as by the layers of a `GatedMLP`.
    """

    def __init__(self, context: LayerContext, stack: Tensor, columns: Piece, dim: int) -> None:
        super().__init__(context)
        num_shared, outputs, inputs = stack.shape
        width = num_shared * columns.full_size
        shards: tuple[ShardId, ...] = (None,) if dim else (0, 1)
        shape = (outputs, width) if dim else (width, inputs)

        def load(parameter: ModelParameter, tensor: Tensor, shard_id: ShardId) -> None:
            experts = parameter.view(stack.shape)
            for expert, whole in zip(experts, tensor.chunk(num_shared, dim), strict=True):
                part = expert.chunk(len(shards))[shards.index(shard_id)]
                copy_weight(part, whole.narrow(dim, columns.source, columns.size))

        data, shapes = stack.flatten(0, 1), dict.fromkeys(shards, shape)
        self.weight = make_parameter(context, tuple(data.shape), load, shapes, data=data)


class SharedExperts(nn.Module):
    """The experts that every token chooses: the last ones of `experts`, loaded as one MLP is."""

    def __init__(self, context: LayerContext, experts: Experts) -> None:
        super().__init__()
        stacks = (experts.gate_up, experts.down)
        gate_up, down = (one.tensor[experts.num_experts :] for one in stacks)
        self.gate_up_proj = _SharedStack(context, gate_up, experts.columns, dim=0)
        self.down_proj = _SharedStack(context, down, experts.columns, dim=1)


class SparseMLP(nn.Module):
    """A mixture in the place of a dense MLP: every token goes through a few experts.

    `shared_size`: the intermediate size of `shared_experts`, one MLP that all tokens go through
    too; None for none. Where it is a multiple of an expert's, the MLP is so many experts behind the
    others, which every token chooses: it takes no kernels of its own. `bias`: of the `Router`.
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
        self.sum = SumOverRanks(context.tp)
        num_shared, rest = divmod(shared_size or 0, intermediate_size)
        num_shared = 0 if rest else num_shared
        routing = replace(routing, num_shared=num_shared)
        self.gate = Router(context, hidden_size, num_experts, routing, bias=bias)
        self.experts = Experts(context, num_experts, hidden_size, intermediate_size, num_shared)
        self.shared_experts: nn.Module | None = None
        if num_shared:
            self.shared_experts = SharedExperts(context, self.experts)
        elif shared_size:
            self.shared_experts = GatedMLP(context, hidden_size, shared_size)

    def announce(self, norm: RMSNorm) -> None:
        """`norm` is the next reader of the sum."""
        self.sum.norm = norm

    def announce_next(self, matrix: WeightMatrix) -> None:
        """The next product is that by `matrix`."""
        kernels, weight = self.experts.context.kernels, matrix.streamed
        if weight is not None and isinstance(kernels, FetchingKernels):
            kernels.announce_weight(self.experts.gate_up.tensor, weight)

    def forward(self, residual_TE: Tensor, norm: RMSNorm) -> Tensor:
        """residual + the mixture of norm(residual). The residual is overwritten."""
        shared = self.shared_experts
        if self.tp.size == 1 and not isinstance(shared, GatedMLP):
            return self._mixture(residual_TE, norm, residual_TE)
        y_TE = self._mixture(residual_TE, norm)
        if isinstance(shared, GatedMLP):
            hidden_TF = shared.gate_up_proj.matrix.norm_gate_up(residual_TE, norm.factors, norm.eps)
            y_TE = shared.down_proj.matrix.linear_add(hidden_TF, y_TE)
        return self.sum.add_to(y_TE, residual_TE)

    def _mixture(self, x_TE: Tensor, norm: RMSNorm, residual_TE: Tensor | None = None) -> Tensor:
        """The experts of norm(x), this rank's part, on the residual if there is one."""
        gate, experts = self.gate, self.experts
        # A subclass's own way to choose, or to run, is not passed over.
        if type(gate).forward is Router.forward and type(experts).forward is Experts.forward:
            fused_TE = gate.matrix.norm_experts(
                x_TE, norm.factors, norm.eps, gate.routing, gate.e_score_correction_bias,
                experts.gate_up.tensor, experts.down.tensor, residual_TE,
            )  # fmt: skip
            if fused_TE is not None:
                return fused_TE
        weights_TC, ids_TC, normed_TE = gate(x_TE, norm)
        return experts(normed_TE, weights_TC, ids_TC, residual_TE)
