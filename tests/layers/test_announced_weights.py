"""A kernel set is told which weight is read behind each mixture: the next layer's first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanovllm_core.api import FetchingKernels, KernelSet, NoOptions, Routing
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    DecoderConfig,
    DecoderForCausalLM,
    LatentAttention,
    LatentConfig,
    LayerContext,
    PlainMatrix,
    SingleRank,
    SparseMLP,
    WeightMatrix,
)

CONFIG: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8,
}  # fmt: skip
DENSE_LAYER = 1
LATENT = LatentConfig(
    hidden_size=16, num_attention_heads=2, q_lora_rank=None, kv_lora_rank=8,
    qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=4, rms_norm_eps=1e-6, scale=1.0,
)  # fmt: skip


class Mixtures(DecoderForCausalLM):
    """A dense layer among mixtures."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_config(config)

    @classmethod
    def make_mlp(
        cls, config: Mapping[str, Any], settings: DecoderConfig, context: LayerContext, layer: int
    ) -> nn.Module:
        if layer == DENSE_LAYER:
            return super().make_mlp(config, settings, context, layer)
        return SparseMLP(context, settings.hidden_size, 8, 4, Routing(top_k=2))


class LatentMixtures(Mixtures):
    @classmethod
    def make_attention(
        cls, config: Mapping[str, Any], settings: DecoderConfig, context: LayerContext,
        cos_sin_cache: Tensor,
    ) -> nn.Module:  # fmt: skip
        return LatentAttention(context, LATENT, cos_sin_cache)


class UnknownAttention(nn.Module):
    """Says nothing of its products."""


class UnknownMixtures(Mixtures):
    @classmethod
    def make_attention(cls, *_: object) -> nn.Module:
        return UnknownAttention()


class Silent(PlainMatrix):
    """A format that does not say how it is read."""

    streamed = None  # type: ignore[assignment]


class FetchingSet(TorchKernels, FetchingKernels):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: list[tuple[int, int]] = []

    def announce_weight(self, gate_up_N2FE: Tensor, weight_XE: Tensor) -> None:
        self.announced.append((gate_up_N2FE.data_ptr(), weight_XE.data_ptr()))


def build(
    model: type[Mixtures], kernels: KernelSet, matrix: type[WeightMatrix] = PlainMatrix
) -> Any:
    context = LayerContext(torch.device("cpu"), torch.float32, SingleRank(), kernels, matrix)
    return model(NoOptions(), CONFIG, context)


@pytest.mark.parametrize(
    ("model", "product"), [(Mixtures, "qkv_proj"), (LatentMixtures, "qkv_a_proj")]
)
def test_behind_a_mixture_comes_the_first_product_of_the_next_layer(
    model: type[Mixtures], product: str
) -> None:
    """Behind the last layer comes a norm of its own; a dense layer has no time to fetch."""
    kernels = FetchingSet()
    layers = build(model, kernels).model.layers
    assert kernels.announced == [
        (
            layers[index].mlp.experts.gate_up.tensor.data_ptr(),
            getattr(layers[index + 1].self_attn, product).weight.data_ptr(),
        )
        for index in range(3)
        if index != DENSE_LAYER
    ]


@pytest.mark.parametrize(
    ("model", "matrix"),
    [(UnknownMixtures, PlainMatrix), (Mixtures, Silent)],
    ids=["an attention of another make", "a format that does not say"],
)
def test_of_a_product_that_is_not_known_nothing_is_told(
    model: type[Mixtures], matrix: type[WeightMatrix]
) -> None:
    kernels = FetchingSet()
    build(model, kernels, matrix)
    assert kernels.announced == []


def test_a_set_that_fetches_nothing_is_told_nothing() -> None:
    """The model is built all the same."""
    assert not isinstance(TorchKernels(), FetchingKernels)
    assert len(build(Mixtures, TorchKernels()).model.layers) == 4
