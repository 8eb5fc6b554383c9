"""Which operations a mixture calls for norm, router, choice and experts, and that they agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.api import MixtureKernels, Routing, RoutingKernels
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    Experts,
    Layer,
    LayerContext,
    Piece,
    Pieces,
    PlainMatrix,
    RMSNorm,
    Router,
    SingleRank,
    SparseMLP,
    TensorParallel,
    WeightMatrix,
    finalize_layers,
    make_split_parameter,
)
from nanovllm_core.worker import init_dummy_weights
from nanovllm_kit.ranks import run_ranks

CPU = torch.device("cpu")
TOKENS, HIDDEN, INTERMEDIATE, NUM_EXPERTS = 5, 12, 8, 6
MOST = 8
ROUTINGS = {
    "rounded": Routing(top_k=2, renormalize=True),
    "exact": Routing(top_k=3, scoring="sigmoid", exact_logits=True, scale=2.5),
}


class Fused(TorchKernels, RoutingKernels):
    """Has the operation for up to MOST rows, and notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        self.calls.append("rms_norm")
        return super().rms_norm(x_TE, weight_E, eps)

    def norm_route(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, weight_NE: Tensor, routing: Routing,
        bias_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
        self.calls.append("norm_route")
        if len(x_TE) > MOST:
            return None
        normed_TE = super().rms_norm(x_TE, norm_weight_E, eps)
        exact_TN = x_TE.new_empty((len(x_TE), len(weight_NE)), dtype=torch.float32)
        logits_TN = self.linear(normed_TE, weight_NE, None, exact_TN)
        if not routing.exact_logits:
            logits_TN = logits_TN.to(x_TE.dtype)
        return (*self.route(logits_TN, routing, bias_N), normed_TE)


class AtOnce(Fused, MixtureKernels):
    """Has the whole mixture too, for up to MOST rows. Notes whether a residual was given."""

    def __init__(self) -> None:
        super().__init__()
        self.has_residual: list[bool] = []

    def experts(
        self, x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor,
        down_NEF: Tensor, num_shared: int = 0, residual_TE: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self.calls.append("experts")
        inputs = (x_TE, weights_TC, ids_TC, gate_up_N2FE, down_NEF)
        return super().experts(*inputs, num_shared, residual_TE)

    def norm_experts(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, weight_NE: Tensor, routing: Routing,
        bias_N: Tensor | None, gate_up_N2FE: Tensor, down_NEF: Tensor,
        residual_TE: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        self.calls.append("norm_experts")
        self.has_residual.append(residual_TE is not None)
        routed = Fused().norm_route(x_TE, norm_weight_E, eps, weight_NE, routing, bias_N)
        if routed is None:
            return None
        weights_TC, ids_TC, normed_TE = routed
        inputs = (normed_TE, weights_TC, ids_TC, gate_up_N2FE, down_NEF)
        return super().experts(*inputs, routing.num_shared, residual_TE)


class Halved(WeightMatrix):
    """A format that knows nothing of routers: it stores 2 W."""

    def __init__(self, layer: Layer, outputs: Pieces, inputs: Piece) -> None:
        super().__init__(layer, outputs, inputs)
        layer.weight = self.twice = make_split_parameter(layer.context, outputs, inputs)
        self.twice.dummy_std = layer.dummy_std

    def finalize(self) -> None:
        self.twice.mul_(2)

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.twice[ids_T] / 2

    def linear(
        self, x_TE: Tensor, bias_X: Tensor | None = None, out_TX: Tensor | None = None
    ) -> Tensor:
        return self.kernels.linear(x_TE, self.twice / 2, bias_X, out_TX)


def run(
    kernels: TorchKernels, rule: str, tokens: int, *,
    tp: TensorParallel | None = None, matrix: type[WeightMatrix] = PlainMatrix,
    shared_size: int | None = None,
    router: type[Router] = Router, experts: type[Experts] = Experts,
) -> Tensor:  # fmt: skip
    """What a mixture with dummy weights adds to the same residual."""
    context = LayerContext(CPU, torch.float32, tp or SingleRank(), kernels, matrix)
    with torch.inference_mode():
        mixture = SparseMLP(
            context, HIDDEN, INTERMEDIATE, NUM_EXPERTS, ROUTINGS[rule],
            bias=rule == "exact", shared_size=shared_size,
        )  # fmt: skip
        mixture.gate.__class__, mixture.experts.__class__ = router, experts
        norm = RMSNorm(context, HIDDEN, 1e-6)
        for seed, module in enumerate((mixture, norm)):
            init_dummy_weights(module, seed)
            finalize_layers(module)
        if (bias_N := mixture.gate.e_score_correction_bias) is not None:
            bias_N.copy_(torch.arange(NUM_EXPERTS) / 8)  # dummy weights leave it 0
        x_TE = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
        return mixture(x_TE.clone(), norm) - x_TE


@pytest.mark.parametrize("rule", ROUTINGS)
def test_a_set_that_norms_and_chooses_at_once_is_asked_to(rule: str) -> None:
    """In the place of three operations; where it declines, the three follow."""
    for tokens, calls in ((MOST, ["norm_route"]), (MOST + 1, ["norm_route", "rms_norm"])):
        kernels = Fused()
        assert torch.equal(run(kernels, rule, tokens), run(TorchKernels(), rule, tokens))
        assert kernels.calls == calls


@pytest.mark.parametrize("rule", ROUTINGS)
def test_a_format_of_weights_that_does_not_fuse_calls_the_three(rule: str) -> None:
    """Its products are its own."""
    kernels = Fused()
    actual = run(kernels, rule, TOKENS, matrix=Halved)
    assert torch.equal(actual, run(TorchKernels(), rule, TOKENS))
    assert kernels.calls == ["rms_norm"]


def test_every_rank_chooses_at_once() -> None:
    """Routers are whole on every rank."""
    sets = [Fused(), Fused()]
    run_ranks(2, lambda tp: run(sets[tp.rank], "rounded", TOKENS, tp=tp))
    assert [one.calls for one in sets] == [["norm_route"], ["norm_route"]]


@pytest.mark.parametrize("rule", ROUTINGS)
def test_a_set_that_computes_a_mixture_at_once_is_asked_first(rule: str) -> None:
    """In the place of all others; where it declines, they follow."""
    apart = ["norm_experts", "norm_route", "rms_norm", "experts"]
    for tokens, calls in ((MOST, ["norm_experts"]), (MOST + 1, apart)):
        kernels = AtOnce()
        assert torch.equal(run(kernels, rule, tokens), run(TorchKernels(), rule, tokens))
        assert kernels.calls == calls
        assert kernels.has_residual == [True]


@pytest.mark.parametrize(
    ("shared_size", "has_residual"), [(2 * INTERMEDIATE, True), (INTERMEDIATE + 4, False)]
)
def test_shared_experts_of_their_own_size_are_added_to_the_mixture(
    shared_size: int, has_residual: bool
) -> None:
    """They norm the residual too, which is not overwritten before. Others are in the mixture."""
    kernels = AtOnce()
    actual = run(kernels, "rounded", TOKENS, shared_size=shared_size)
    assert torch.equal(actual, run(TorchKernels(), "rounded", TOKENS, shared_size=shared_size))
    assert "experts" not in kernels.calls
    assert kernels.has_residual == [has_residual]


def test_every_rank_computes_its_part_of_a_mixture_at_once() -> None:
    """Without the residual, which is added once, to the sum over all ranks."""
    sets = [AtOnce(), AtOnce()]
    actual = run_ranks(2, lambda tp: run(sets[tp.rank], "exact", TOKENS, tp=tp))
    expected = run_ranks(2, lambda tp: run(TorchKernels(), "exact", TOKENS, tp=tp))
    for one in range(2):
        assert sets[one].calls == ["norm_experts"]
        assert sets[one].has_residual == [False]
        assert torch.equal(actual[one], actual[0])
        assert torch.equal(actual[one], expected[one])


class OwnRouter(Router):
    """Chooses in a way of its own."""

    def forward(self, x_TE: Tensor, norm: RMSNorm | None = None) -> tuple[Tensor, ...]:
        weights_TC, *others = super().forward(x_TE, norm)
        return (2 * weights_TC, *others)


class OwnExperts(Experts):
    """Runs in a way of its own."""

    def forward(
        self, x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, residual_TE: Tensor | None = None
    ) -> Tensor:
        return super().forward(x_TE, 2 * weights_TC, ids_TC, residual_TE)


@pytest.mark.parametrize("own", [{"router": OwnRouter}, {"experts": OwnExperts}], ids=str)
def test_a_layer_with_a_way_of_its_own_is_not_passed_over(own: dict[str, Any]) -> None:
    """A set that computes a mixture at once is not asked."""
    kernels = AtOnce()
    actual = run(kernels, "exact", TOKENS, **own)
    torch.testing.assert_close(actual, 2 * run(TorchKernels(), "exact", TOKENS))
    assert "norm_experts" not in kernels.calls


def test_a_format_of_weights_that_does_not_fuse_asks_no_mixture_at_once() -> None:
    """The set would read a router's weights that are not there."""
    kernels = AtOnce()
    actual = run(kernels, "rounded", TOKENS, matrix=Halved)
    assert torch.equal(actual, run(TorchKernels(), "rounded", TOKENS))
    assert kernels.calls == ["rms_norm", "experts"]
