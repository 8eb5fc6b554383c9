"""A residual that is summed over ranks is normed by the same kernel, where its block was told."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from nanovllm_core.api import NormingKernels, Routing
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    Attention,
    AttentionRuntime,
    DecoderConfig,
    GatedMLP,
    LayerContext,
    NormingParallel,
    RMSNorm,
    SingleRank,
    SparseMLP,
    TensorParallel,
    announce_norm,
)
from nanovllm_core.layers.decoder import Decoder, SelfAttention
from nanovllm_core.layers.module import ModelParameter

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class FirstHeads(AttentionRuntime):
    """An attention that returns its queries."""

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        return qkv_TX[:, : layer.prep.num_heads * layer.prep.head_size]


class OneOfTwo(SingleRank):
    """A rank whose other one adds nothing."""

    def all_reduce_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(x)


class NormingRank(OneOfTwo):
    """One of two ranks, with one kernel for the sum, the residual and the norm from 3 rows on."""

    def all_reduce_add_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        if len(x_TE) < 3:
            return None
        total_TE = self.all_reduce_add(x_TE, residual_TE)
        return total_TE, TorchKernels().rms_norm(total_TE, weight_E, eps)


class CountedNorms(TorchKernels):
    """Counts the norms that take a kernel of their own."""

    num_norms = 0

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        self.num_norms += 1
        return super().rms_norm(x_TE, weight_E, eps)


def run_decoder(rows: int, tp: TensorParallel, kernels: CountedNorms) -> tuple[Tensor, int]:
    """A decoder of a dense MLP and a mixture: its result, and how many norms took a kernel."""
    here = LayerContext(CPU, torch.float32, tp, kernels)
    config = DecoderConfig.from_config(
        {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
         "max_position_embeddings": 64}
    )  # fmt: skip
    mlps = (GatedMLP(here, 8, 12), SparseMLP(here, 8, 12, 4, Routing(top_k=2)))
    attention = partial(SelfAttention, config, here)
    decoder = Decoder(config, here, attention, lambda layer: mlps[layer])
    for seed, parameter in enumerate(decoder.parameters()):
        assert isinstance(parameter, ModelParameter)
        parameter.copy_(random(*parameter.shape, seed=seed))
    for layer in decoder.modules():
        if isinstance(layer, Attention):
            layer.bind(FirstHeads(), 0)
    return decoder(torch.arange(rows), torch.arange(rows)), kernels.num_norms


@pytest.mark.parametrize(("rows", "norms_left"), [(2, 5), (3, 2)])
def test_a_sum_over_ranks_is_normed_where_it_is_summed(rows: int, norms_left: int) -> None:
    """The first norm is left, and the mixture's own."""
    apart, all_norms = run_decoder(rows, OneOfTwo(size=2), CountedNorms())
    fused, num_norms = run_decoder(rows, NormingRank(size=2), CountedNorms())
    assert (all_norms, num_norms) == (5, norms_left)
    assert torch.equal(fused, apart)
    assert isinstance(NormingRank(size=2), NormingParallel)
    assert not isinstance(OneOfTwo(size=2), NormingParallel)


class NormingSet(CountedNorms):
    """A set with one kernel for a product, its residual and the norm, from 3 rows on."""

    def linear_add_norm(
        self, x_TF: Tensor, weight_EF: Tensor, residual_TE: Tensor, norm_weight_E: Tensor,
        eps: float, bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        if len(x_TF) < 3:
            return None
        total_TE = self.linear_add(x_TF, weight_EF, residual_TE, bias_E)
        return total_TE, TorchKernels().rms_norm(total_TE, norm_weight_E, eps)


@pytest.mark.parametrize(("rows", "norms_left"), [(2, 5), (3, 3)])
def test_a_set_norms_the_sums_of_one_rank_where_it_has_a_kernel(rows: int, norms_left: int) -> None:
    """Behind attention and behind the dense MLP. A mixture adds to the residual by itself."""
    apart, all_norms = run_decoder(rows, SingleRank(), CountedNorms())
    fused, num_norms = run_decoder(rows, SingleRank(), NormingSet())
    assert (all_norms, num_norms) == (5, norms_left)
    assert torch.equal(fused, apart)
    assert isinstance(NormingSet(), NormingKernels)
    assert not isinstance(TorchKernels(), NormingKernels)


def test_a_norm_takes_what_was_put_for_this_tensor_once() -> None:
    """For another one it computes, and forgets what was put."""
    norm = RMSNorm(LayerContext(CPU, torch.float32, SingleRank(), TorchKernels()), 8, 1e-6)
    norm.weight.fill_(2.0)
    x_TE, other_TE, normed_TE = random(3, 8), random(3, 8, seed=1), torch.zeros(3, 8)
    computed = norm(x_TE)
    norm.put(x_TE, normed_TE)
    assert norm(x_TE) is normed_TE
    assert torch.equal(norm(x_TE), computed)
    norm.put(x_TE, normed_TE)
    assert not torch.equal(norm(other_TE), normed_TE)
    assert torch.equal(norm(x_TE), computed)


def test_blocks_that_sum_nothing_are_not_told() -> None:
    """Such as a layer of another make."""
    norm = RMSNorm(LayerContext(CPU, torch.float32, SingleRank(), TorchKernels()), 8, 1e-6)
    announce_norm(torch.nn.Linear(8, 8), norm)
