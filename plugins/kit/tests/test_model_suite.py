"""The models' suite catches what shows in some layers or settings only, and asks nothing unfair."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import Phi3ForCausalLM, SmolLM3ForCausalLM

from nanovllm_core.api import ModelShape
from nanovllm_core.layers import DecoderConfig, DecoderForCausalLM, refuse_unless
from nanovllm_kit.model import ModelConformance
from nanovllm_kit.model_draws import each_rope
from nanovllm_kit.model_settings import ROPE_KINDS, WatchedConfig
from nanovllm_kit.reference_model import ReferenceCheckpoint

SUITE = ModelConformance()
IDS = torch.arange(24) * 7 % 131


class Forgetful(DecoderForCausalLM):
    """SmolLM3, but for its layers without a rope: every fourth."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        refuse_unless(config, attention_bias=False, mlp_bias=False, use_sliding_window=False)
        return DecoderConfig.from_config(config)


class Careful(Forgetful):
    """The same, and says what it cannot."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        refuse_unless(config, no_rope_layers=1)
        return super().read_config(config)


def test_a_model_that_is_wrong_from_the_fourth_layer_on_is_caught(tmp_path: Path) -> None:
    """The first three layers of SmolLM3 have a rope, the fourth has none."""
    with pytest.raises(AssertionError, match="relative norm error"):
        SUITE.test_logits_equal_those_of_transformers(
            Forgetful, SmolLM3ForCausalLM, {}, IDS, tmp_path
        )


def test_a_setting_that_is_never_read_is_named(tmp_path: Path) -> None:
    """Whatever it is called; one that is refused has been read."""
    every_layer = {"no_rope_layers": [1] * 5}
    reference = SUITE.save(SmolLM3ForCausalLM, tmp_path, every_layer)
    with pytest.raises(AssertionError, match=r"no_rope_layer_interval, no_rope_layers: .*refuse"):
        SUITE.test_no_setting_of_the_reference_is_overlooked(Forgetful, reference)
    with pytest.raises(AssertionError, match=r"knows no_rope_layer_interval: "):
        SUITE.test_no_setting_of_the_reference_is_overlooked(Careful, reference)


def test_a_setting_that_changes_nothing_may_be_overlooked(tmp_path: Path) -> None:
    """The interval only says which layers `no_rope_layers` has by default."""

    class Suite(ModelConformance):
        harmless = frozenset({"no_rope_layer_interval"})

    reference = SUITE.save(SmolLM3ForCausalLM, tmp_path, {"no_rope_layers": [1] * 5})
    Suite().test_no_setting_of_the_reference_is_overlooked(Careful, reference)


def test_what_was_read_of_a_configuration_is_known() -> None:
    """A copy, in which nothing more is seen, is noticed."""
    config = WatchedConfig(a=1, b=2, c=3)
    assert (config["a"], config.get("x"), "b" in config) == (1, None, True)
    assert (config.read, config.copied) == ({"a", "x", "b"}, False)
    for copied in (dict, copy.deepcopy, lambda c: {**c}, lambda c: c | {}, lambda c: c.copy()):
        config = WatchedConfig(a=1, b=2)
        assert copied(config) == {"a": 1, "b": 2}
        assert config.copied


def test_what_transformers_refuses_is_not_asked(tmp_path: Path) -> None:
    """Phi3's configuration knows no rope but its own."""
    with pytest.raises(pytest.skip.Exception, match=r"transformers refuses: .*\['longrope'\]"):
        SUITE.test_a_kind_of_rope_is_honoured_or_refused(
            Forgetful, Phi3ForCausalLM, ROPE_KINDS["linear"], IDS, Random(0), tmp_path
        )


def test_a_vocabulary_smaller_than_the_usual_padding_token_will_do(tmp_path: Path) -> None:
    """Phi3 pads with token 32000 unless it is told not to."""
    reference = SUITE.save(Phi3ForCausalLM, tmp_path, {})
    assert reference.logits(IDS).isfinite().all()


def test_the_settings_of_the_suite_stay_as_they_are(tmp_path: Path) -> None:
    """Phi3's configuration writes into the dict that it is given, which the next model gets too."""
    yarn = copy.deepcopy(ROPE_KINDS["yarn"])
    with pytest.raises(KeyError):
        ReferenceCheckpoint.save(
            tmp_path, Phi3ForCausalLM, {**SUITE.tiny_config, "rope_parameters": ROPE_KINDS["yarn"]}
        )
    assert ROPE_KINDS["yarn"] == yarn


class OneLayerElsewhere(Forgetful):
    """`shape` says that the fourth layer slides, and it was built as all others."""

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        shape = super().shape(config)
        layers = list(shape.attention_shapes)
        layers[3] = replace(layers[3], sliding_window=5)
        return replace(shape, attention_layers=tuple(layers))


def test_a_layer_that_is_not_as_the_shape_states_it_is_caught(tmp_path: Path) -> None:
    """Its blocks would be freed while it still reads them."""
    reference = SUITE.save(SmolLM3ForCausalLM, tmp_path, {"no_rope_layers": [1] * 5})
    SUITE.test_the_built_model_has_the_shape(Forgetful, reference)
    with pytest.raises(AssertionError):
        SUITE.test_the_built_model_has_the_shape(OneLayerElsewhere, reference)


def test_ropes_by_kind_of_layer_are_drawn_for_each() -> None:
    """As Gemma 3 has them; one rope for all stays one."""
    thetas = iter((7.0, 8.0, 9.0))

    def drawn(rope: Mapping[str, Any]) -> dict[str, Any]:
        return {**rope, "rope_theta": next(thetas)}

    nested = {"full_attention": {"factor": 2.0}, "sliding_attention": {"rope_theta": 1.0}}
    assert each_rope(nested, drawn) == {
        "full_attention": {"factor": 2.0, "rope_theta": 7.0},
        "sliding_attention": {"rope_theta": 8.0},
    }
    assert each_rope({"rope_theta": 1.0}, drawn) == {"rope_theta": 9.0}
