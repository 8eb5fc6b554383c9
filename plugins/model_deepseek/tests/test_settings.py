"""Settings are read from config.json as transformers reads them; what is wrong is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2RotaryEmbedding,
    DeepseekV2TopkRouter,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from nanovllm_core.api import ArchitectureError, LatentHeads
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import GatedMLP, SparseMLP, build_cos_sin_cache
from nanovllm_kit.layers import layer_context
from nanovllm_model_deepseek.model import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from nanovllm_model_deepseek.settings import read_latent, read_v2_mixture, read_v3_mixture

V2_LITE: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "benchmarks/configs/deepseek-v2-lite/config.json").read_text()
)
V3: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}


def test_the_shapes_of_v2_lite_and_v3() -> None:
    """A token has one row of 576 numbers in each layer, whatever the number of heads."""
    heads = LatentHeads(latent_size=512, key_size=192, value_size=128)
    for model, config in ((DeepseekV2ForCausalLM, V2_LITE), (DeepseekV3ForCausalLM, V3)):
        shape = model.shape(config)
        assert (shape.num_kv_heads, shape.head_size) == (1, 576)
        assert shape.num_heads == config["num_attention_heads"]
        assert shape.max_position == 163840
        assert len(set(shape.attention_shapes)) == 1
        assert shape.attention_shapes[0].latent == heads
        assert len(shape.attention_shapes) == config["num_hidden_layers"]


def test_yarn_of_v2_lite_rotates_and_scales_as_published() -> None:
    """cos and sin of transformers; mscale 0.707 is in the scores alone, as its square."""
    settings = DeepseekV2ForCausalLM.read_config(V2_LITE)
    latent = read_latent(V2_LITE, settings.rope)
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert mscale == pytest.approx(1.2608, abs=1e-4)
    assert latent.scale == pytest.approx(mscale**2 / math.sqrt(192), rel=1e-12)
    assert latent.scale == pytest.approx(0.114721, abs=1e-6)
    positions = torch.tensor([[0, 1, 77, 4095, 4096, 163839]])
    rotary = DeepseekV2RotaryEmbedding(transformers.DeepseekV2Config(**V2_LITE))
    expected = torch.view_as_real(rotary(torch.zeros(1), positions))[0]
    cos, sin = build_cos_sin_cache(settings.rope, torch.device("cpu"))[positions[0]].chunk(2, -1)
    torch.testing.assert_close(torch.stack((cos, sin), dim=-1), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("scaling", [None, {"mscale_all_dim": 0}, {"mscale": 0.7}], ids=str)
def test_without_mscale_all_dim_scores_are_scaled_by_the_key_size_alone(scaling: Any) -> None:
    """As with a rope that stretches nothing."""
    stretched = scaling and {"type": "yarn", "factor": 4, **scaling}
    config = {**V2_LITE, "rope_scaling": stretched}
    latent = read_latent(config, DeepseekV2ForCausalLM.read_config(config).rope)
    assert latent.scale == 1 / math.sqrt(192)


def routers(draws: Random) -> tuple[nn.Module, Any]:
    """A router of transformers with drawn settings and weights, and our rule of its config.json."""
    groups, size = draws.choice([(1, 40), (2, 7), (4, 8), (8, 32), (5, 3)])
    top_groups = draws.randint(1, groups)
    config: dict[str, Any] = {
        "hidden_size": 16,
        "n_routed_experts": groups * size,
        "num_experts_per_tok": draws.randint(1, min(8, top_groups * size)),
        "n_group": groups,
        "topk_group": top_groups,
        "routed_scaling_factor": draws.uniform(0.5, 16.0),
    }
    if draws.random() < 0.5:
        config["topk_method"] = draws.choice(["greedy", "group_limited_greedy"])
        router: nn.Module = DeepseekV2TopkRouter(
            transformers.DeepseekV2Config(**config, num_attention_heads=1)
        )
        return router, read_v2_mixture(config).routing
    config["norm_topk_prob"] = draws.random() < 0.5
    router = DeepseekV3TopkRouter(transformers.DeepseekV3Config(**config))
    return router, read_v3_mixture(config).routing


@pytest.mark.parametrize("seed", range(40))
@torch.no_grad()
def test_tokens_choose_the_experts_that_transformers_chooses(seed: int) -> None:
    """With its weights, for drawn numbers of experts and groups, biases and scales."""
    draws, _ = Random(seed), torch.manual_seed(seed)
    router, routing = routers(draws)
    router.weight.normal_()
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.normal_(0.0, draws.choice([0.01, 1.0]))
    x_TE = torch.randn(50, 16) * draws.choice([0.1, 1.0, 30.0])
    logits_TN, expected_TC, expected_ids_TC = router(x_TE)
    weights_TC, ids_TC = TorchKernels().route(logits_TN, routing, bias)
    by_expert = torch.zeros_like(logits_TN).scatter(1, ids_TC.long(), weights_TC)
    expected = torch.zeros_like(logits_TN).scatter(1, expected_ids_TC, expected_TC)
    torch.testing.assert_close(by_expert, expected, rtol=1e-5, atol=1e-7)


def layers_of(model_class: Any, **settings: Any) -> list[type]:
    """The class of the MLP of each layer of a small model."""
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "moe_intermediate_size": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 1,
    }
    config = {**V2_LITE, **small, **settings}
    context = layer_context(torch.device("cpu"), torch.bfloat16)
    decoder = model_class.read_config(config)
    return [type(model_class.make_mlp(config, decoder, context, layer)) for layer in range(7)]


def test_first_layers_are_dense_and_then_every_so_many_are_mixtures() -> None:
    """By first_k_dense_replace and moe_layer_freq, as in DeepSeek's own code."""
    dense, mixture = GatedMLP, SparseMLP
    assert layers_of(DeepseekV2ForCausalLM) == [dense] + [mixture] * 6
    step = layers_of(DeepseekV2ForCausalLM, first_k_dense_replace=3, moe_layer_freq=2)
    assert step == [dense, dense, dense, dense, mixture, dense, mixture]
    assert layers_of(DeepseekV2ForCausalLM, first_k_dense_replace=0) == [mixture] * 7


@pytest.mark.parametrize("number", [None, 0, 1, 3])
def test_shared_experts_are_one_mlp_of_their_common_width(number: int | None) -> None:
    """None and 0: there is no such MLP."""
    mixture = read_v2_mixture({**V2_LITE, "n_shared_experts": number})
    assert mixture.shared_size == (1408 * number if number else None)


def test_settings_that_are_absent_have_the_values_of_transformers() -> None:
    """Of attention and of the mixtures, for both architectures."""
    needed = {"num_attention_heads": 4, "hidden_size": 64, "num_experts_per_tok": 2}
    v2, v3 = transformers.DeepseekV2Config(), transformers.DeepseekV3Config()
    rope = DeepseekV2ForCausalLM.read_config(V2_LITE).rope
    latent = read_latent(needed, rope)
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        assert getattr(latent, name) == getattr(v2, name) == getattr(v3, name)
    for mixture, config in ((read_v2_mixture(needed), v2), (read_v3_mixture({}), v3)):
        assert mixture.num_experts == config.n_routed_experts
        assert mixture.expert_size == config.moe_intermediate_size
        assert mixture.shared_size == config.n_shared_experts * config.moe_intermediate_size
        assert mixture.first == config.first_k_dense_replace
        assert mixture.routing.scale == config.routed_scaling_factor
        assert mixture.routing.renormalize is config.norm_topk_prob
    routing = read_v3_mixture({}).routing
    assert (routing.num_groups, routing.top_groups) == (v3.n_group, v3.topk_group)
    assert routing.top_k == v3.num_experts_per_tok


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "topk_method 'noaux_tc' is not supported for DeepSeek-V2": (
        DeepseekV2ForCausalLM,
        {"topk_method": "noaux_tc"},
    ),
    "quantization_config must be a mapping": (
        DeepseekV3ForCausalLM,
        {"quantization_config": "fp8"},
    ),
    "norm_topk_prob True is not supported": (DeepseekV2ForCausalLM, {"norm_topk_prob": True}),
    "scoring_func 'softmax' is not supported": (DeepseekV3ForCausalLM, {"scoring_func": "softmax"}),
    "n_group \\(7\\) must divide n_routed_experts \\(256\\)": (
        DeepseekV3ForCausalLM,
        {"n_group": 7},
    ),
    "topk_group \\(9\\) must not be more": (DeepseekV3ForCausalLM, {"topk_group": 9}),
    "n_group \\(256\\) leaves 1 of n_routed_experts": (DeepseekV3ForCausalLM, {"n_group": 256}),
    "num_experts_per_tok \\(129\\) is more than the 128 experts": (
        DeepseekV3ForCausalLM,
        {"num_experts_per_tok": 129},
    ),
    "first_k_dense_replace must be 0 or a positive integer, not -1": (
        DeepseekV3ForCausalLM,
        {"first_k_dense_replace": -1},
    ),
    "num_key_value_heads 16 is not supported, only 128": (
        DeepseekV3ForCausalLM,
        {"num_key_value_heads": 16},
    ),
    "norm_topk_prob must be true or false, not 'no'": (
        DeepseekV3ForCausalLM,
        {"norm_topk_prob": "no"},
    ),
    "num_nextn_predict_layers is 1000000000, and at most 1000": (
        DeepseekV3ForCausalLM,
        {"num_nextn_predict_layers": 10**9},
    ),
    "quantised \\(awq\\)": (
        DeepseekV3ForCausalLM,
        {"quantization_config": {"quant_method": "awq"}},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_setting_that_is_wrong_or_unsupported_is_named(message: str) -> None:
    """With its value, before a weight is read."""
    model_class, changes = WRONG[message]
    config = V2_LITE if model_class is DeepseekV2ForCausalLM else V3
    with pytest.raises(ArchitectureError, match=message):
        model_class.shape({**config, **changes})
