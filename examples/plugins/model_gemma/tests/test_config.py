"""How config.json is read: published settings, the old form of ropes, a text model in another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanovllm_core.api import ArchitectureError
from nanovllm_example_model_gemma.config import FULL, SLIDING, read_gemma2, read_gemma3
from nanovllm_example_model_gemma.model import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
)
from nanovllm_kit.model_weights import assert_same_logits
from nanovllm_kit.reference_model import ReferenceCheckpoint, load_model, run_model

GEMMA_2_2B: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA_3_1B: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
GEMMA_3_4B: dict[str, Any] = {
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "pad_token_id": 0,
}
IDS = torch.arange(24) * 7 % 131


def test_the_layers_of_gemma_2_2b() -> None:
    """Every second one sees 4,096 tokens; config.json does not say which, as on the Hub."""
    shape = Gemma2ForCausalLM.shape(GEMMA_2_2B)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (26, 8, 4)
    assert (shape.head_size, shape.max_position, shape.tied_embeddings) == (256, 8192, True)
    windows = [one.sliding_window for one in shape.attention_shapes]
    assert windows == [4096, None] * 13
    assert {one.soft_cap for one in shape.attention_shapes} == {50.0}


def test_the_layers_of_gemma_3_1b() -> None:
    """Every sixth sees everything, and turns by another theta."""
    shape = Gemma3ForCausalLM.shape(GEMMA_3_1B)
    assert Counter(one.sliding_window for one in shape.attention_shapes) == {512: 22, None: 4}
    assert shape.attention_shapes[5].sliding_window is None
    ropes = read_gemma3(GEMMA_3_1B).ropes
    assert (ropes[SLIDING].theta, ropes[FULL].theta) == (10_000.0, 1_000_000.0)


def test_the_text_model_of_gemma_3_4b() -> None:
    """Its text_config leaves out what transformers knows of the class."""
    shape = Gemma3ForConditionalGeneration.shape(GEMMA_3_4B)
    theirs = transformers.Gemma3TextConfig(**GEMMA_3_4B["text_config"])
    for ours, key in {
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_size": "head_dim",
        "vocab_size": "vocab_size",
        "max_position": "max_position_embeddings",
        "tied_embeddings": "tie_word_embeddings",
    }.items():
        assert getattr(shape, ours) == getattr(theirs, key), key
    slides = [one.sliding_window == 1024 for one in shape.attention_shapes]
    assert slides == [kind == SLIDING for kind in (theirs.layer_types or ())]


@pytest.mark.parametrize(
    ("read", "config_class"),
    [(read_gemma2, transformers.Gemma2Config), (read_gemma3, transformers.Gemma3TextConfig)],
    ids=["Gemma 2", "Gemma 3"],
)
def test_settings_that_are_left_out_are_those_of_transformers(read: Any, config_class: Any) -> None:
    """All but the sizes without which there is no model."""
    sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    sizes += ["num_attention_heads", "max_position_embeddings"]
    ours, theirs = read({key: SMALL[key] for key in sizes}), config_class()
    for key in ("num_key_value_heads", "head_dim", "query_pre_attn_scalar", "rms_norm_eps"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert ours.scores_cap == theirs.attn_logit_softcapping
    assert ours.logits_cap == theirs.final_logit_softcapping
    longer = read({**SMALL, "max_position_embeddings": 9999, "sliding_window": 4096})
    assert longer.sliding_window == theirs.sliding_window
    assert list(longer.layer_types) == theirs.layer_types[: len(longer.layer_types)]


@pytest.mark.parametrize(
    "scaling", [None, {"factor": 2.5, "rope_type": "linear"}], ids=["plain", "stretched"]
)
def test_ropes_in_the_old_form_mean_the_same(scaling: Any, tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` of the full layers, `rope_local_base_freq` of the others."""
    old = {"rope_theta": 700.0, "rope_local_base_freq": 90.0, "rope_scaling": scaling}
    settings = {**SMALL, **old}
    reference = ReferenceCheckpoint.save(tmp_path, transformers.Gemma3ForCausalLM, settings)
    config = {k: v for k, v in reference.config.items() if k != "rope_parameters"} | old
    model = load_model(Gemma3ForCausalLM, tmp_path, config)
    assert_same_logits(run_model(model, IDS), reference.logits(IDS))


def test_ropes_of_no_kind_of_layer_are_named() -> None:
    """transformers ignores them, and takes its defaults."""
    with pytest.raises(ArchitectureError, match="rope_theta, rope_type for neither"):
        read_gemma3({**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})


def test_a_quantised_checkpoint_is_refused() -> None:
    """By the name of its method."""
    with pytest.raises(ArchitectureError, match="fp8"):
        read_gemma2({**SMALL, "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ArchitectureError, match="gptq"):
        Gemma3ForConditionalGeneration.shape(
            {**GEMMA_3_4B, "quantization_config": {"quant_method": "gptq"}}
        )


def test_a_model_with_eyes_is_its_text_model(tmp_path: Path) -> None:
    """The vision model's weights are in the checkpoint, and are not asked for."""
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    settings = {"text_config": SMALL, "vision_config": vision, "mm_tokens_per_image": 4}
    reference = ReferenceCheckpoint.save(
        tmp_path, transformers.Gemma3ForConditionalGeneration, settings
    )
    assert any(name.startswith("vision_tower.") for name in reference.tensors())
    model = load_model(Gemma3ForConditionalGeneration, tmp_path, reference.config)
    assert_same_logits(run_model(model, IDS), reference.logits(IDS))
