"""A format of weights is a class: it runs a model that knows nothing of it, loaded as any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    DecoderConfig,
    DecoderForCausalLM,
    Layer,
    LayerContext,
    Piece,
    Pieces,
    PlainMatrix,
    SingleRank,
    TensorParallel,
    WeightMatrix,
    finalize_layers,
    make_split_parameter,
)
from nanovllm_core.worker import load_weights
from nanovllm_kit.numerics import assert_close_report
from nanovllm_kit.ranks import run_ranks
from nanovllm_kit.reference_model import ReferenceCheckpoint, run_model

transformers = pytest.importorskip("transformers")
STEP = 1 / 64
SETTINGS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Biased(DecoderForCausalLM):
    """The core's decoder as Qwen2 has it."""

    @classmethod
    def read_config(cls, config: Any) -> DecoderConfig:
        return DecoderConfig.from_config(config, qkv_bias=True)


class EightBits(WeightMatrix):
    """Multiples of STEP in 8 bits; what was loaded is let go once it is packed."""

    def __init__(self, layer: Layer, outputs: Pieces, inputs: Piece) -> None:
        super().__init__(layer, outputs, inputs)
        self.loaded = make_split_parameter(layer.context, outputs, inputs)
        layer.weight = self.loaded
        self.codes: Tensor | None = None

    def finalize(self) -> None:
        assert self.codes is None, "packed twice"
        self.codes = (self.loaded / STEP).round().clamp(-128, 127).to(torch.int8)
        self.loaded.data = torch.empty(0)

    def embed(self, ids_T: Tensor) -> Tensor:
        assert self.codes is not None
        return self.codes[ids_T] * STEP

    def linear(
        self, x_TE: Tensor, bias_X: Tensor | None = None, out_TX: Tensor | None = None
    ) -> Tensor:
        assert self.codes is not None
        return self.kernels.linear(x_TE, self.codes * STEP, bias_X, out_TX)


def load(folder: Path, config: Any, context: LayerContext) -> Biased:
    """A model with a folder's weights, as the worker loads it."""
    with torch.inference_mode():
        model = Biased(NoOptions(), config, context)
        load_weights(model, folder, tied=model.shape(config).tied_embeddings)
        finalize_layers(model)
    return model


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_of_another_format_equals_one_of_its_rounded_weights(
    size: int, tied: bool, tmp_path: Path
) -> None:
    """Embedding, every product and the head, whole and split; no loaded weight stays."""
    settings = SETTINGS | {"tie_word_embeddings": tied}
    reference = ReferenceCheckpoint.save(tmp_path, transformers.Qwen2ForCausalLM, settings)
    ids_T = torch.arange(1, 12)

    def on_rank(tp: TensorParallel) -> tuple[Tensor, list[str]]:
        context = LayerContext(torch.device("cpu"), torch.float32, tp, TorchKernels())
        model = load(tmp_path, reference.config, replace(context, make_matrix=EightBits))
        kept = [name for name, one in model.named_parameters() if one.dim() > 1]
        return run_model(model, ids_T), kept

    results = run_ranks(size, on_rank)
    rounded = {
        name: ((one / STEP).round().clamp(-128, 127) * STEP if one.dim() > 1 else one)
        for name, one in reference.tensors().items()
    }
    reference.rewrite(rounded)
    plain = LayerContext(torch.device("cpu"), torch.float32, SingleRank(), TorchKernels())
    expected = run_model(load(tmp_path, reference.config, plain), ids_T)
    for logits, kept in results:
        assert not kept
        assert_close_report(logits, expected, rel_norm=1e-5)


def test_a_plain_matrix_is_one_tensor_of_the_model_s_dtype() -> None:
    """Which is the layer's parameter, and is found, filled and counted as such."""
    context = LayerContext(torch.device("cpu"), torch.bfloat16, SingleRank(), TorchKernels())
    layer = Layer(context)
    matrix = PlainMatrix(layer, {"a": Piece(2, 0, 2), "b": Piece(3, 3, 4)}, Piece(4, 4, 8))
    [(name, parameter)] = layer.named_parameters()
    assert (name, parameter.shape, parameter.dtype) == ("weight", (5, 4), torch.bfloat16)
    assert matrix.tensor is parameter
    assert matrix.tensor.shard_shapes == {"a": (2, 8), "b": (4, 8)}
    tensor = torch.arange(32.0).view(4, 8)
    matrix.tensor.weight_loader(matrix.tensor, tensor[:2], "a")
    matrix.tensor.weight_loader(matrix.tensor, tensor, "b")
    expected = torch.cat((tensor[:2, 4:], tensor[3:, 4:], torch.zeros(2, 4)))
    assert torch.equal(matrix.tensor, expected.bfloat16())
