"""The attention layer hands its description and its inputs to the runtime it was bound to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm_core.errors import InconsistentStateError
from nanovllm_core.interfaces.kernels import QKPrep
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import Attention, AttentionRuntime, LayerContext, SingleRank
from nanovllm_kit.dense_attention import DenseRuntime
from nanovllm_kit.numerics import assert_close_report

CPU = torch.device("cpu")


def make_layer(*, sliding_window: int | None = None, soft_cap: float | None = None) -> Attention:
    no_rotation = torch.cat((torch.ones(16, 4), torch.zeros(16, 4)), dim=-1)
    prep = QKPrep(num_heads=2, num_kv_heads=1, head_size=8, cos_sin_cache=no_rotation)
    context = LayerContext(CPU, torch.float32, SingleRank(), TorchKernels())
    return Attention(context, prep, scale=0.5, sliding_window=sliding_window, soft_cap=soft_cap)


class RecordingRuntime(AttentionRuntime):
    def __init__(self) -> None:
        self.calls: list[tuple[Attention, Tensor, Tensor]] = []

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        self.calls.append((layer, qkv_TX, positions_T))
        return qkv_TX[:, :16]


def test_a_bound_layer_passes_itself_and_its_inputs() -> None:
    """The runtime finds scale, prep and the layer's index there."""
    layer, runtime = make_layer(), RecordingRuntime()
    layer.bind(runtime, 3)
    qkv_TX, positions_T = torch.zeros(2, 32), torch.arange(2)
    out = layer(qkv_TX, positions_T)
    assert out.shape == (2, 16)
    assert layer.layer_index == 3
    [(seen, seen_qkv, seen_positions)] = runtime.calls
    assert seen is layer
    assert seen_qkv is qkv_TX
    assert seen_positions is positions_T


def test_a_layer_that_was_never_bound_says_so() -> None:
    """Instead of failing on None."""
    with pytest.raises(InconsistentStateError, match="bind"):
        make_layer()(torch.zeros(1, 32), torch.zeros(1))


@pytest.mark.parametrize("window", [1, 3, 100])
def test_the_dense_runtime_masks_a_sliding_window(window: int) -> None:
    """A query sees its own key and the window - 1 before it."""
    qkv_TX = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    layer = make_layer(sliding_window=window)
    DenseRuntime(layer, 16)
    actual = layer(qkv_TX, torch.arange(6)).view(6, 2, 8)
    q, k, v = qkv_TX[:, :16].view(6, 2, 8), qkv_TX[:, 16:24], qkv_TX[:, 24:]
    for t in range(6):
        seen = slice(max(0, t - window + 1), t + 1)
        weights = (q[t] @ k[seen].T * 0.5).softmax(-1)
        assert_close_report(actual[t], weights @ v[seen], rel_norm=1e-5)


def test_the_dense_runtime_caps_scores_softly() -> None:
    """Scores become cap · tanh(score / cap)."""
    qkv_TX = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)) * 3
    layer = make_layer(soft_cap=2.0)
    DenseRuntime(layer, 16)
    actual = layer(qkv_TX, torch.arange(4)).view(4, 2, 8)[-1]
    scores = qkv_TX[-1, :16].view(2, 8) @ qkv_TX[:, 16:24].T * 0.5
    expected = (2.0 * (scores / 2.0).tanh()).softmax(-1) @ qkv_TX[:, 24:]
    assert_close_report(actual, expected, rel_norm=1e-5)
