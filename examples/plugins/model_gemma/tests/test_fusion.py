"""A set that norms, adds and norms at once is asked for it, with the norm that reads the sum."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    Attention,
    AttentionRuntime,
    LayerContext,
    SingleRank,
    finalize_layers,
)
from nanovllm_example_model_gemma.model import Gemma2ForCausalLM, Gemma3ForCausalLM
from nanovllm_kit.fused_kernels import FusedKernels

LAYERS = 3
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "head_dim": 16,
}
CONFIGS = {
    Gemma2ForCausalLM: transformers.Gemma2Config(**SMALL),
    Gemma3ForCausalLM: transformers.Gemma3TextConfig(**SMALL),
}


class NoOptions(BaseModel):
    """What a model without options is made with."""


class OneByOne(TorchKernels):
    """Counts the norms that take a kernel of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        self.calls["rms_norm"] += 1
        return super().rms_norm(x_TE, weight_E, eps)


class AtOnce(OneByOne, FusedKernels):
    """Counts the operations of models such as Gemma, too."""

    def gelu_gate_up(self, *arguments: Any) -> Tensor:
        self.calls["gelu_gate_up"] += 1
        return super().gelu_gate_up(*arguments)

    def norm_add_norm(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.calls["norm_add_norm"] += 1
        return super().norm_add_norm(*arguments)


class FirstHeads(AttentionRuntime):
    """An attention that returns its queries."""

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        return qkv_TX[:, : layer.prep.num_heads * layer.prep.head_size]


def run_model(kind: Any, kernels: OneByOne) -> Tensor:
    """The normed states of four tokens, by random weights that depend on nothing else."""
    context = LayerContext(torch.device("cpu"), torch.float32, SingleRank(), kernels)
    model = kind(NoOptions(), CONFIGS[kind].to_dict(), context)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    finalize_layers(model)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.bind(FirstHeads(), 0)
    states_TE: Tensor = model(torch.tensor([5, 7, 130, 0]), torch.arange(4))
    return states_TE


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_norm_but_the_first_is_there_when_it_is_read(kind: Any) -> None:
    """Two sums a layer are normed for their readers, the last one for the model's own norm."""
    apart, at_once = OneByOne(), AtOnce()
    expected_TE, states_TE = run_model(kind, apart), run_model(kind, at_once)
    assert apart.calls == {"rms_norm": 4 * LAYERS + 1}
    assert at_once.calls == {
        "rms_norm": 1, "norm_add_norm": 2 * LAYERS, "gelu_gate_up": LAYERS
    }  # fmt: skip
    torch.testing.assert_close(states_TE, expected_TE)
