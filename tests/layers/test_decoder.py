"""The decoder that the core has: it is what transformers computes, and refuses what it is not."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.activations import ACT2FN

from nanovllm_core import api, layers
from nanovllm_core.api import (
    ArchitectureError,
    ModelShape,
    NormingKernels,
    PluginLoadError,
)
from nanovllm_core.layers import (
    DecoderConfig,
    DecoderForCausalLM,
    RopeConfig,
    decoder,
    refuse_unless,
    true_or_false,
)
from nanovllm_kit.model_weights import assert_same_logits
from nanovllm_kit.reference_model import ReferenceCheckpoint, build_model, load_model, run_model

CONFIG: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")


def test_settings_are_read_under_their_names() -> None:
    assert DecoderConfig.from_config(CONFIG) == DecoderConfig(
        **{name: CONFIG[name] for name in SIZES},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        rms_norm_eps=1e-2,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=5000.0, rotary_size=24, max_position=64),
    )


def test_what_is_absent_or_null_has_its_usual_value() -> None:
    """As many KV heads as heads, which fill the hidden size; epsilon 1e-6; a head of its own."""
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings")
    absent = {key: value for key, value in CONFIG.items() if key not in optional}
    null = dict.fromkeys((*optional, "hidden_act", "layer_types", "quantization_config"))
    for config in (absent, {**absent, **null}):
        settings = DecoderConfig.from_config(config)
        assert (settings.num_key_value_heads, settings.head_dim) == (4, 16)
        assert (settings.rms_norm_eps, settings.tie_word_embeddings) == (1e-6, False)


@pytest.mark.parametrize("name", ["silu", "swish"])
def test_an_activation_may_have_either_of_its_names(name: str) -> None:
    """transformers knows SiLU by both."""
    x = torch.linspace(-4, 4, 9)
    torch.testing.assert_close(ACT2FN[name](x), torch.nn.functional.silu(x))
    assert DecoderConfig.from_config({**CONFIG, "hidden_act": name})


def test_the_shape_is_that_of_the_settings() -> None:
    settings = DecoderConfig.from_config(CONFIG, sliding_window=5)
    assert settings.shape() == ModelShape(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_size=24,
        vocab_size=131,
        max_position=64,
        tied_embeddings=True,
        sliding_window=5,
    )


WRONG: dict[str, dict[str, Any]] = {
    **{f"{name} must be a positive integer, not None; check": {name: None} for name in SIZES},
    "num_attention_heads must be a positive integer, not 0": {"num_attention_heads": 0},
    "num_key_value_heads must be a positive integer, not True": {"num_key_value_heads": True},
    "head_dim must be a positive integer, not '24'": {"head_dim": "24"},
    r"heads \(4\) must be divisible by num_key_value_heads \(3\).*; check": {
        "num_key_value_heads": 3
    },
    "hidden_act 'gelu' is not supported, only 'silu'; use another": {"hidden_act": "gelu"},
    "layer_types mix full_attention, sliding_attention.*; use another": {
        "layer_types": ["full_attention", "sliding_attention"]
    },
    r"quantised \(fp8\).*; use the one in bfloat16": {
        "quantization_config": {"quant_method": "fp8"}
    },
    "max_position_embeddings must be a positive integer, not None": {
        "max_position_embeddings": None
    },
    "only 12 of a head's 24 dim.*remove the setting": {"partial_rotary_factor": 0.5},
    "only 6 of a head's 24 dim.*remove the setting": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}
    },
    "is_causal False is not supported, only True": {"is_causal": False},
    "rms_norm_eps must be a positive number, not -1": {"rms_norm_eps": -1},
    "rms_norm_eps must be a positive number, not nan": {"rms_norm_eps": float("nan")},
    "rope_theta must be a positive number, not 0": {"rope_theta": 0},
    "rope_type 'dynamic' is not supported": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_no_decoder_here_computes_is_refused(message: str) -> None:
    """With the setting, its value and what to do."""
    with pytest.raises(ArchitectureError, match=message):
        DecoderConfig.from_config({**CONFIG, **WRONG[message]})


def test_an_architecture_may_say_that_part_of_a_head_rotates() -> None:
    """The others ignore `partial_rotary_factor` in transformers, so it is refused for them."""
    config = {**CONFIG, "partial_rotary_factor": 0.5}
    assert DecoderConfig.from_config(config, partial_rotary=True).rope.rotary_size == 12


@pytest.mark.parametrize(("window", "kept"), [(None, None), (63, 63), (64, None), (4096, None)])
def test_a_window_that_hides_nothing_is_none(window: int | None, kept: int | None) -> None:
    """The longest context has 64 tokens; a backend without windows can then serve."""
    assert DecoderConfig.from_config(CONFIG, sliding_window=window).sliding_window == kept


@pytest.mark.parametrize("window", [0, -1, True, "9"])
def test_a_window_without_a_length_is_refused(window: Any) -> None:
    with pytest.raises(ArchitectureError, match="sliding_window must be a positive integer"):
        DecoderConfig.from_config(CONFIG, sliding_window=window)


def test_a_setting_of_the_value_that_is_served_may_also_be_absent_or_null() -> None:
    for config in ({}, {"mlp_bias": None, "layer_types": None}, {"mlp_bias": False}):
        refuse_unless(config, mlp_bias=False, layer_types="full", sliding_window=None)
    refuse_unless({"layer_types": ["full", "full"]}, layer_types="full")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mlp_bias": True}, "config.json: mlp_bias True is not supported, only False; use ano"),
        ({"sliding_window": 5}, "sliding_window 5 is not supported, only None"),
        ({"layer_types": ["full", "slides"]}, "layer_types 'slides' is not supported, only 'full'"),
    ],
)
def test_a_setting_of_another_value_is_refused(config: dict[str, Any], message: str) -> None:
    """Of a list, the entry that is not served is named."""
    with pytest.raises(ArchitectureError, match=message):
        refuse_unless(config, mlp_bias=False, sliding_window=None, layer_types="full")


def test_a_switch_is_true_or_false() -> None:
    """Absent it has its default, and null is false. The text "false" would be true."""
    for value, expected in ((True, True), (False, False), (None, False), (1, True), (0, False)):
        assert true_or_false({"a": value}, "a", default=True) is expected
    assert true_or_false({}, "a", default=True) is True
    assert true_or_false({}, "a") is False
    for wrong in ("false", 2, [], {}):
        with pytest.raises(ArchitectureError, match="a must be true or false, not"):
            true_or_false({"a": wrong}, "a")


DIFFERENCES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "none": ("LlamaForCausalLM", {}, {}),
    "biases of attention": (
        "LlamaForCausalLM",
        {"attention_bias": True},
        {"qkv_bias": True, "output_bias": True},
    ),
    "biases of q, k and v": ("Qwen2ForCausalLM", {"head_dim": 16}, {"qkv_bias": True}),
    "biases of the MLP": ("LlamaForCausalLM", {"mlp_bias": True}, {"mlp_bias": True}),
    "norms of q and k": ("Qwen3ForCausalLM", {}, {"qk_norm": True}),
    "a window": ("MistralForCausalLM", {"sliding_window": 5}, {"sliding_window": 5}),
    "a head of its own": ("LlamaForCausalLM", {"tie_word_embeddings": False}, {}),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_decoder_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """In every way in which architectures differ: the same weights, the same logits."""
    architecture, changes, answers = DIFFERENCES[name]

    class Model(DecoderForCausalLM):
        @classmethod
        def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
            return DecoderConfig.from_config(config, **answers)

    reference_class = getattr(transformers, architecture)
    reference = ReferenceCheckpoint.save(tmp_path, reference_class, {**CONFIG, **changes})
    ids = torch.arange(24) * 7 % CONFIG["vocab_size"]
    logits = run_model(load_model(Model, tmp_path, reference.config), ids)
    assert_same_logits(logits, reference.logits(ids))


def test_a_pass_asks_no_kernel_set_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers asked as they were made: a protocol's check takes longer than a small product."""

    class Model(DecoderForCausalLM):
        @classmethod
        def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
            return DecoderConfig.from_config(config)

    def ask(protocol: type, instance: object) -> bool:
        asked.append(protocol)
        return check(protocol, instance)

    asked: list[type] = []
    protocols = type(NormingKernels)
    check = protocols.__instancecheck__
    monkeypatch.setattr(protocols, "__instancecheck__", ask)
    model = build_model(Model, CONFIG, dtype=torch.float32)
    assert NormingKernels in asked
    asked.clear()
    run_model(model, torch.arange(5))
    assert not asked


def test_a_model_that_does_not_read_its_settings_is_told_to() -> None:
    class Model(DecoderForCausalLM):
        pass

    with pytest.raises(NotImplementedError, match="Model must define read_config"):
        Model.shape(CONFIG)


def test_settings_that_are_not_given_back_are_told_of() -> None:
    """The plugin is at fault then, and not the checkpoint."""

    class Model(DecoderForCausalLM):
        @classmethod
        def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
            DecoderConfig.from_config(config)
            return None  # type: ignore[return-value]

    with pytest.raises(PluginLoadError, match=r"Model.read_config\(\) returned a NoneType"):
        Model.shape(CONFIG)


def test_a_copy_of_the_decoder_needs_only_public_names() -> None:
    """A model of another make starts from one, in another package."""
    tree = ast.parse(inspect.getsource(decoder))
    names = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanovllm_core")
        for name in node.names
    }
    assert "Attention" in names
    assert names <= {*vars(api), *vars(layers)}
