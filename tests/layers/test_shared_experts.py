"""Mixtures with experts that all tokens go through, in the stacks of the others or beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from nanovllm_core.api import Routing
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    GatedMLP,
    LayerContext,
    RMSNorm,
    SingleRank,
    SparseMLP,
    TensorParallel,
)
from nanovllm_core.layers.module import ModelParameter, finalize_layers
from nanovllm_kit.numerics import assert_close_report
from nanovllm_kit.ranks import SimulatedRank, run_ranks

CPU = torch.device("cpu")
TOKENS, HIDDEN, INTERMEDIATE, NUM_EXPERTS, CHOSEN = 5, 12, 8, 6, 2
WIDTHS = [8, 24, 4, 20]
"""One and three experts; half of one, and two and a half."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(
    tp: TensorParallel, shared_size: int | None, kernels: TorchKernels | None = None
) -> tuple[SparseMLP, RMSNorm, dict[tuple[str, object], Tensor]]:
    """A mixture and its norm with random weights, and what the checkpoint has of them."""
    context = LayerContext(CPU, torch.float32, tp, kernels or TorchKernels())
    mixture = SparseMLP(
        context,
        HIDDEN,
        INTERMEDIATE,
        NUM_EXPERTS,
        Routing(top_k=CHOSEN, scale=3.0),
        shared_size=shared_size,
    )
    norm, tensors = RMSNorm(context, HIDDEN, 1e-6), {}
    for name, parameter in [*mixture.named_parameters(), ("norm", norm.weight)]:
        assert isinstance(parameter, ModelParameter)
        parameter.fill_(float("nan"))  # whatever is not loaded spoils the result
        for shard, shape in parameter.shard_shapes.items():
            tensors[name, shard] = random(*shape, seed=len(tensors)) / shape[-1] ** 0.5
            parameter.weight_loader(parameter, tensors[name, shard], shard)
    finalize_layers(mixture)
    return mixture, norm, tensors


def mlp(x_TE: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x_TE @ gate.T) * (x_TE @ up.T)) @ down.T


@pytest.mark.parametrize("shared_size", WIDTHS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shared_experts_are_added_whatever_their_width(size: int, shared_size: int) -> None:
    """Once, unscaled, on one rank and on several, from the tensors of one MLP."""
    x_TE = random(TOKENS, HIDDEN, seed=99)

    def on_rank(tp: TensorParallel) -> tuple[Tensor, dict[tuple[str, object], Tensor]]:
        mixture, norm, tensors = build(tp, shared_size)
        assert isinstance(mixture.shared_experts, GatedMLP) == bool(shared_size % INTERMEDIATE)
        return mixture(x_TE.clone(), norm), tensors

    results = run_ranks(size, on_rank)
    of = results[0][1]
    normed = x_TE / (x_TE.square().mean(-1, keepdim=True) + 1e-6).sqrt() * of["norm", None]
    gate_up, down = "shared_experts.gate_up_proj.weight", "shared_experts.down_proj.weight"
    expected = x_TE + mlp(normed, of[gate_up, 0], of[gate_up, 1], of[down, None])
    scores = (normed @ of["gate.weight", None].T).softmax(-1)
    for token, ids in enumerate(scores.topk(CHOSEN).indices.tolist()):
        for expert in ids:
            gate, up = (of["experts.gate_up.weight", f"{expert}.{m}_proj"] for m in ("gate", "up"))
            y_TE = mlp(normed, gate, up, of["experts.down.weight", f"{expert}.down_proj"])
            expected[token] += 3.0 * scores[token, expert] * y_TE[token]
    for result, _ in results:
        assert_close_report(result, expected, rel_norm=2e-6)


def test_shared_experts_in_the_stacks_take_no_kernel_of_their_own() -> None:
    """With three of them a mixture makes the calls that it makes with none, and no more weights
    are held than the checkpoint has."""

    class Noting(TorchKernels):
        """Which operations are called."""

        def __getattribute__(self, name: str) -> object:
            value = super().__getattribute__(name)
            if not name.startswith("_"):
                calls.append(name)
            return value

    calls: list[str] = []
    x_TE, of_none = random(TOKENS, HIDDEN), ["rms_norm", "linear", "route", "experts"]
    for shared_size in (None, 3 * INTERMEDIATE):
        mixture, norm, tensors = build(SingleRank(), shared_size, Noting())
        calls.clear()
        mixture(x_TE.clone(), norm)
        assert calls == of_none
        held = sum(parameter.numel() for parameter in mixture.parameters())
        assert held == sum(x.numel() for (name, _), x in tensors.items() if name != "norm")


@pytest.mark.parametrize("shared_size", [16, 12])
def test_the_ranks_parts_are_summed_and_added_in_one_operation(
    monkeypatch: pytest.MonkeyPatch, shared_size: int
) -> None:
    """Those of the shared experts among them: a group may have one kernel for sum and residual."""
    x_TE, added = random(TOKENS, HIDDEN), []
    real = SimulatedRank.all_reduce_add

    def seen(rank: SimulatedRank, x: Tensor, residual: Tensor) -> Tensor:
        added.append(rank.rank)
        return real(rank, x, residual)

    monkeypatch.setattr(SimulatedRank, "all_reduce_add", seen)

    def on_rank(tp: TensorParallel) -> Tensor:
        mixture, norm, _ = build(tp, shared_size)
        return mixture(x_TE.clone(), norm)

    run_ranks(2, on_rank)
    assert sorted(added) == [0, 1]
