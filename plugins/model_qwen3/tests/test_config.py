"""Settings are read from config.json; what is not supported is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
import transformers

from nanovllm_core.api import ArchitectureError, ModelShape
from nanovllm_model_qwen3.model import Qwen3ForCausalLM

CONFIG: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}


def test_the_shape_of_qwen3_0_6b() -> None:
    """As its config.json says."""
    assert Qwen3ForCausalLM.shape(CONFIG) == ModelShape(
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        vocab_size=151936,
        max_position=40960,
        tied_embeddings=True,
    )


def test_head_settings_that_are_absent_have_the_values_of_transformers() -> None:
    """They do not follow from the others."""
    config = {k: v for k, v in CONFIG.items() if k not in ("head_dim", "num_key_value_heads")}
    config["num_attention_heads"] = 64
    shape, expected = Qwen3ForCausalLM.shape(config), transformers.Qwen3Config(**config)
    assert shape.head_size == expected.head_dim == 128
    assert shape.num_kv_heads == expected.num_key_value_heads == 32
    assert not Qwen3ForCausalLM.shape({**config, "tie_word_embeddings": False}).tied_embeddings


def test_null_means_a_kv_head_for_each_head() -> None:
    """As in transformers."""
    config = {**CONFIG, "num_key_value_heads": None}
    expected = transformers.Qwen3Config(**config).num_key_value_heads
    assert Qwen3ForCausalLM.shape(config).num_kv_heads == expected == 16


def test_yarn_lengthens_the_context() -> None:
    """As the model card of Qwen3 describes it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert Qwen3ForCausalLM.shape({**CONFIG, "rope_scaling": yarn}).max_position == 131072


REFUSED: dict[str, dict[str, Any]] = {
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "use_sliding_window True": {"use_sliding_window": True, "max_window_layers": 27},
    "use_sliding_window True is not": {"use_sliding_window": True, "max_window_layers": 0},
    "use_sliding_window must be true or false": {"use_sliding_window": "yes"},
    "max_window_layers must be a positive integer, not '28'": {
        "use_sliding_window": True,
        "max_window_layers": "28",
    },
    "layer_types.*sliding_attention": {"layer_types": ["full_attention", "sliding_attention"]},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "quantised \\(fp8\\)": {"quantization_config": {"quant_method": "fp8"}},
    "hidden_size must be a positive integer, not None": {"hidden_size": None},
    "num_hidden_layers must be a positive integer, not 0": {"num_hidden_layers": 0},
    "vocab_size must be a positive integer, not '9'": {"vocab_size": "9"},
    "num_attention_heads \\(16\\).*num_key_value_heads \\(3\\)": {"num_key_value_heads": 3},
    "max_position_embeddings": {"max_position_embeddings": None},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "is_causal False": {"is_causal": False},
    "layer_types must be a list of str, not 'full_attention'": {"layer_types": "full_attention"},
    "quantization_config must be a mapping of settings, not 'fp8'": {"quantization_config": "fp8"},
    "rope_scaling must be a mapping of settings, not \\['yarn'\\]": {"rope_scaling": ["yarn"]},
    "rope_parameters must be a mapping of settings, not 'linear'": {"rope_parameters": "linear"},
    "rope_type \\['yarn'\\] is not supported": {"rope_scaling": {"rope_type": ["yarn"]}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_setting_that_is_wrong_or_unsupported_is_named(message: str) -> None:
    """With its value."""
    with pytest.raises(ArchitectureError, match=message):
        Qwen3ForCausalLM.shape({**CONFIG, **REFUSED[message]})


def test_settings_that_say_full_attention_are_fine() -> None:
    """As transformers 5 writes them."""
    settings = {"use_sliding_window": False, "layer_types": ["full_attention"] * 28}
    assert Qwen3ForCausalLM.shape({**CONFIG, **settings}).num_layers == 28


@pytest.mark.parametrize(
    "settings",
    [
        {"max_window_layers": 28},
        {"max_window_layers": 70, "sliding_window": 5},
        {"max_window_layers": 0, "sliding_window": None},
        {"max_window_layers": 0, "layer_types": ["full_attention"] * 28},
        {},
    ],
    ids=str,
)
def test_a_window_that_no_layer_has_is_no_window(settings: dict[str, Any]) -> None:
    """As in transformers: all layers are in front of those that slide."""
    config = {**CONFIG, "use_sliding_window": True, **settings}
    assert "sliding_attention" not in (transformers.Qwen3Config(**config).layer_types or ())
    assert Qwen3ForCausalLM.shape(config) == Qwen3ForCausalLM.shape(CONFIG)


def test_the_entry_point_gives_the_spec_without_importing_torch() -> None:
    """A listing of plugins stays quick; the spec names the class that serves."""
    [point] = entry_points(group="nanovllm.models", name="Qwen3ForCausalLM")
    program = (
        f"import json, sys, {point.value} as plugin\n"
        "[spec] = plugin.nanovllm_models()\n"
        "print(json.dumps([spec.name, spec.impl, 'torch' in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    impl = f"{Qwen3ForCausalLM.__module__}:{Qwen3ForCausalLM.__name__}"
    assert json.loads(result.stdout) == ["Qwen3ForCausalLM", impl, False]
