"""A whole model has the same logits with a kernel set that norms the sums of its products."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    DecoderConfig,
    DecoderForCausalLM,
    LayerContext,
    RowParallelLinear,
    SingleRank,
)
from nanovllm_kit.reference_model import ReferenceCheckpoint, load_model, run_model

CONFIG: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}


class Llama(DecoderForCausalLM):
    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        qkv, mlp = bool(config["attention_bias"]), bool(config["mlp_bias"])
        return DecoderConfig.from_config(config, qkv_bias=qkv, output_bias=qkv, mlp_bias=mlp)


class NormingSet(TorchKernels):
    """Notes its calls, and declines those of fewer rows."""

    def __init__(self, least_rows: int) -> None:
        super().__init__()
        self.least_rows, self.biased = least_rows, list[bool]()

    def linear_add_norm(
        self, x_TF: Tensor, weight_EF: Tensor, residual_TE: Tensor, norm_weight_E: Tensor,
        eps: float, bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        self.biased.append(bias_E is not None)
        if len(x_TF) < self.least_rows:
            return None
        total_TE = self.linear_add(x_TF, weight_EF, residual_TE, bias_E)
        return total_TE, self.rms_norm(total_TE, norm_weight_E, eps)


@pytest.mark.parametrize("biases", [{}, BIASES], ids=["plain", "biased"])
@pytest.mark.parametrize("least_rows", [0, 5, 100], ids=["all", "some", "none"])
def test_a_model_has_the_same_logits_where_its_set_norms_the_sums(
    least_rows: int, biases: dict[str, bool], tmp_path: Path
) -> None:
    """Twice in each of three layers and in each chunk, with their biases: where the set does it for
    all rows, for the longer chunk alone, and for none."""
    reference = ReferenceCheckpoint.save(
        tmp_path, transformers.LlamaForCausalLM, {**CONFIG, **biases}
    )
    kernels, ids = NormingSet(least_rows), torch.arange(12) * 7 % CONFIG["vocab_size"]
    fused = run_model(
        load_model(Llama, tmp_path, reference.config, kernels=kernels), ids, chunks=[8, 4]
    )
    apart = run_model(load_model(Llama, tmp_path, reference.config), ids, chunks=[8, 4])
    assert torch.equal(fused, apart)
    assert kernels.biased == [bool(biases)] * (2 * 3 * 2)


def test_a_layer_without_an_announced_norm_calls_the_product_alone() -> None:
    """Its sum may have another reader."""
    kernels = NormingSet(0)
    layer = RowParallelLinear(
        LayerContext(torch.device("cpu"), torch.float32, SingleRank(), kernels), 4, 3
    )
    layer.weight.fill_(1.0)
    assert torch.equal(layer.add_to(torch.ones(2, 4), torch.ones(2, 3)), torch.full((2, 3), 5.0))
    assert kernels.biased == []
