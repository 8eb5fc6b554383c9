"""Settings are read from config.json; what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from nanovllm_core.api import ArchitectureError, ModelShape
from nanovllm_core.layers import SparseMLP
from nanovllm_kit.layers import layer_context
from nanovllm_model_qwen3_moe.model import Qwen3MoeForCausalLM

CONFIG: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
}


def test_the_shape_of_qwen3_30b_a3b() -> None:
    """As its config.json says; experts are no matter of the cache."""
    assert Qwen3MoeForCausalLM.shape(CONFIG) == ModelShape(
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_size=128,
        vocab_size=151936,
        max_position=40960,
    )


def sparse_mlp(**settings: Any) -> SparseMLP:
    """The first layer's, of narrow tokens."""
    config = {**CONFIG, "hidden_size": 8, **settings}
    context = layer_context(torch.device("cpu"), torch.bfloat16)
    settings_read = Qwen3MoeForCausalLM.read_config(config)
    mlp = Qwen3MoeForCausalLM.make_mlp(config, settings_read, context, 0)
    assert isinstance(mlp, SparseMLP)
    return mlp


def test_settings_of_experts_that_are_absent_have_the_values_of_transformers() -> None:
    """Their number, how many a token chooses, their width, and weights as they are."""
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    left_out = {name: None for name in names}
    mlp, expected = sparse_mlp(**left_out), transformers.Qwen3MoeConfig()
    num_experts, gate_up, _ = mlp.experts.gate_up.tensor.shape
    assert num_experts == expected.num_local_experts
    assert gate_up == 2 * expected.moe_intermediate_size
    assert mlp.gate.routing.top_k == expected.num_experts_per_tok
    assert mlp.gate.routing.renormalize is expected.norm_topk_prob is False


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_names(name: str) -> None:
    """That of published checkpoints, and that of transformers 5."""
    config = {key: value for key, value in CONFIG.items() if key != "num_experts"}
    config |= {"num_local_experts": None, name: 16}
    assert Qwen3MoeForCausalLM.num_experts(config) == 16


REFUSED: dict[str, dict[str, Any]] = {
    "use_sliding_window": {"use_sliding_window": True},
    "quantised \\(fp8\\)": {"quantization_config": {"quant_method": "fp8"}},
    "num_experts_per_tok \\(129\\) is more than num_experts \\(128\\)": {
        "num_experts_per_tok": 129
    },
    "num_experts_per_tok must be a positive integer, not 0": {"num_experts_per_tok": 0},
    "moe_intermediate_size must be a positive integer, not '9'": {"moe_intermediate_size": "9"},
    "decoder_sparse_step must be a positive integer, not 0": {"decoder_sparse_step": 0},
    "mlp_only_layers must be a list of int, not '1'": {
        "mlp_only_layers": "1",
        "decoder_sparse_step": 2,
    },
    "mlp_only_layers must be a list of int, not \\['1'\\]": {"mlp_only_layers": ["1"]},
    "norm_topk_prob must be true or false, not 'false'": {"norm_topk_prob": "false"},
    "attention_bias must be true or false, not \\[\\]": {"attention_bias": []},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_setting_that_is_wrong_or_unsupported_is_named(message: str) -> None:
    """With its value, before a weight is read."""
    with pytest.raises(ArchitectureError, match=message):
        Qwen3MoeForCausalLM.shape({**CONFIG, **REFUSED[message]})
