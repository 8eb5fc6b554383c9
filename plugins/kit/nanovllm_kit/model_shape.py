"""The part of the models' suite about config.json: what `shape()` reads there, and refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.interfaces.model import UNREADABLE_ERRORS, ModelShape
from nanovllm_core.layers import AttentionLayer
from nanovllm_kit.model_settings import REQUIRED, UNSUPPORTED, Settings, WatchedConfig
from nanovllm_kit.model_small import SmallModel, known_settings
from nanovllm_kit.model_weights import assert_same_logits
from nanovllm_kit.reference_model import (
    ReferenceCheckpoint,
    build_model,
    load_model,
    run_model,
)


class ShapeChecks(SmallModel):
    """Inherited by `ModelConformance`, which has the fixtures."""

    def test_the_shape_agrees_with_the_configuration(
        self, model_class: Any, reference: ReferenceCheckpoint
    ) -> None:
        """What the KV cache and the row tables are sized by."""
        expected = reference.model.config
        heads = expected.num_attention_heads
        shape: ModelShape = model_class.shape(reference.config)
        assert shape.num_layers == expected.num_hidden_layers
        assert shape.hidden_size == expected.hidden_size
        assert shape.num_heads == heads
        if rank := getattr(expected, "kv_lora_rank", None):  # one row of a token for all heads
            num_kv_heads, head_size = 1, rank + expected.qk_rope_head_dim
        else:
            num_kv_heads = getattr(expected, "num_key_value_heads", heads)
            head_size = getattr(expected, "head_dim", None) or expected.hidden_size // heads
        assert (shape.num_kv_heads, shape.head_size) == (num_kv_heads, head_size)
        assert shape.vocab_size == expected.vocab_size
        assert shape.max_position >= expected.max_position_embeddings
        assert shape.tied_embeddings is bool(expected.tie_word_embeddings)

    def test_the_built_model_has_the_shape(
        self, model_class: Any, reference: ReferenceCheckpoint
    ) -> None:
        """As many attention layers, each of the heads, window and soft cap that `shape()` says."""
        shape: ModelShape = model_class.shape(reference.config)
        model = build_model(model_class, reference.config)
        layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
        assert [layer.shape for layer in layers] == list(shape.attention_shapes)

    def test_the_last_position_of_the_shape_can_be_computed(
        self, model_class: Any, reference: ReferenceCheckpoint
    ) -> None:
        """A prompt of exactly the longest context: right at every position, the last one too."""
        model = load_model(model_class, reference.folder, reference.config)
        shape: ModelShape = model_class.shape(reference.config)
        ids = torch.arange(shape.max_position) * 7 % shape.vocab_size
        assert_same_logits(run_model(model, ids), reference.logits(ids))

    def test_the_configuration_is_only_read(
        self, model_class: Any, reference: ReferenceCheckpoint
    ) -> None:
        """Neither `shape()` nor the constructor changes the dict that they are given."""
        before = copy.deepcopy(reference.config)
        model_class.shape(reference.config)
        build_model(model_class, reference.config)
        assert reference.config == before

    def test_a_setting_that_cannot_be_served_is_refused(
        self,
        model_class: Any,
        reference_class: Any,
        reference: ReferenceCheckpoint,
        wrong: Settings,
    ) -> None:
        """By `shape()`, with an ArchitectureError, before anything is loaded."""
        known = known_settings(reference_class) | {"quantization_config"}
        if wrong in UNSUPPORTED.values() and not wrong.keys() & known:
            pytest.skip(f"{reference_class.__name__} has no {', '.join(wrong)}")
        with pytest.raises(ArchitectureError):
            model_class.shape({**reference.config, **wrong})

    def test_a_value_that_no_size_has_is_an_error(
        self,
        model_class: Any,
        reference_class: Any,
        reference: ReferenceCheckpoint,
        unreadable: Settings,
    ) -> None:
        """Of `shape()`: an ArchitectureError, or one of the errors that the core explains."""
        changes = {_own_name(reference_class, key): value for key, value in unreadable.items()}
        with pytest.raises((ArchitectureError, *UNREADABLE_ERRORS)):
            model_class.shape({**reference.config, **changes})

    @pytest.mark.parametrize("key", REQUIRED)
    def test_a_setting_that_is_left_out_is_named_or_has_the_default_of_transformers(
        self, model_class: Any, reference_class: Any, reference: ReferenceCheckpoint, key: str
    ) -> None:
        """By the error of `shape()`: an ArchitectureError, or a KeyError, which the core explains.

        A size that is guessed gives a model that writes nonsense.
        """
        name = _own_name(reference_class, key)
        config = {other: value for other, value in reference.config.items() if other != name}
        try:
            shape: ModelShape = model_class.shape(config)
        except (ArchitectureError, *UNREADABLE_ERRORS) as error:
            if name not in str(error):
                raise AssertionError(
                    f"config.json has no {name}, and the error does not say so: "
                    f"{type(error).__name__}: {error}; read it with positive_int"
                ) from error
            return
        default = getattr(reference_class.config_class(), key)
        taken = getattr(shape, REQUIRED[key])
        assert taken == default, f"without {name} shape() takes {taken}, transformers {default}"

    def test_the_model_is_the_same_without_settings_that_have_their_default(
        self,
        model_class: Any,
        reference_class: Any,
        reference: ReferenceCheckpoint,
        ids: Tensor,
        tmp_path: Path,
    ) -> None:
        """Published checkpoints leave out what transformers knows. A model may insist on a setting,
        by an error, and must not take another value for it. Numbers and switches are tried here,
        all with transformers' defaults, but for sizes."""
        config = WatchedConfig(reference.config)
        model_class.shape(config)
        build_model(model_class, config)
        defaults = type(reference.model.config)().to_dict()
        tried = sorted(
            k for k in config.read & defaults.keys() if type(defaults[k]) in (bool, float)
        )
        usual = self.save(reference_class, tmp_path, {name: defaults[name] for name in tried})
        shape, expected_TV = model_class.shape(usual.config), usual.logits(ids)
        for name in tried:
            left = {other: value for other, value in usual.config.items() if other != name}
            try:
                mine = model_class.shape(left)
            except (ArchitectureError, *UNREADABLE_ERRORS):
                continue
            without = f"without {name}, which is {defaults[name]} then"
            assert mine == shape, f"{without}, the shape is another"
            actual_TV = run_model(load_model(model_class, usual.folder, left), ids)
            try:
                assert_same_logits(actual_TV, expected_TV)
            except AssertionError as error:
                raise AssertionError(f"{without}: {error}") from None


def _own_name(reference_class: Any, key: str) -> str:
    """What an architecture's config.json calls a setting: GPT-2's `hidden_size` is `n_embd`."""
    return str(reference_class.config_class.attribute_map.get(key, key))
