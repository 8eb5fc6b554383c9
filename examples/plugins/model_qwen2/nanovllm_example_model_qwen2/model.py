"""Qwen2 dense (arXiv:2407.10671): nanovllm's decoder with biases on q, k and v.

Its own are the rules of its sliding windows. What config.json leaves out has the value that
transformers gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_core.api import ArchitectureError
from nanovllm_core.layers import DecoderConfig, DecoderForCausalLM, list_of, true_or_false

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WINDOW, _FIRST_SLIDING_LAYER = 4096, 28
"""What `use_sliding_window: true` means without `sliding_window` and `max_window_layers`."""

_KV_HEADS = 32
"""What a config.json without `num_key_value_heads` means; null means one for each head."""


class Qwen2ForCausalLM(DecoderForCausalLM):
    """One window for all layers, or none; a mix of windows and full attention is refused."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        slides = true_or_false(config, "use_sliding_window")
        window = config.get("sliding_window", _WINDOW) if slides else None
        # Layers of different kinds are judged here: they are alike if the window hides nothing.
        settings = DecoderConfig.from_config(
            {"num_key_value_heads": _KV_HEADS, **config, "layer_types": None},
            qkv_bias=True,
            sliding_window=window,
        )
        kinds = _layer_kinds(config, settings)
        if window is not None and settings.sliding_window is None and kinds <= {_FULL, _SLIDING}:
            return settings
        if kinds == {_FULL}:
            return replace(settings, sliding_window=None)
        if kinds == {_SLIDING} and window is not None:
            return settings
        raise ArchitectureError(
            f"layers attend differently (layer_types {sorted(kinds)}, sliding_window {window}); "
            "all must have the same window or none: set use_sliding_window to false in "
            "config.json, and layer_types to null, to attend to the whole context"
        )


def _layer_kinds(config: Mapping[str, Any], settings: DecoderConfig) -> set[str]:
    """Which kinds of layers there are: what `layer_types` says, where config.json has it.

    Else the layers from `max_window_layers` on slide, if there is a window.
    """
    if config.get("layer_types") is not None:
        return set(list_of(config, "layer_types", str))
    slides = settings.sliding_window is not None
    first = config.get("max_window_layers", _FIRST_SLIDING_LAYER)
    layers = range(settings.num_hidden_layers)
    return {_SLIDING if slides and layer >= first else _FULL for layer in layers}
