"""Qwen3 dense (arXiv:2505.09388): nanovllm's decoder with an RMS norm of each head of q and k.

What config.json leaves out has the value that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_core.layers import (
    DecoderConfig,
    DecoderForCausalLM,
    positive_int,
    refuse_unless,
    true_or_false,
)

_HEADS = {"num_key_value_heads": 32, "head_dim": 128}
"""What is meant where config.json leaves them out."""
_WINDOW, _FIRST_SLIDING_LAYER = 4096, 28
"""What `use_sliding_window: true` means without `sliding_window` and `max_window_layers`."""


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The base is the whole model; what is Qwen3's own is how config.json is read."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Windows are refused: Qwen3 has them, if at all, in some of its layers."""
        refuse_unless(config, layer_types="full_attention")
        if _slides(config):
            refuse_unless(config, use_sliding_window=False)
        bias = true_or_false(config, "attention_bias")
        return DecoderConfig.from_config(
            {**_HEADS, **config}, qkv_bias=bias, output_bias=bias, qk_norm=True
        )


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether a layer has a window: those from `max_window_layers` on, without `layer_types`."""
    window = config.get("sliding_window", _WINDOW) if config.get("layer_types") is None else None
    if not true_or_false(config, "use_sliding_window") or window is None:
        return False
    first = config.get("max_window_layers", _FIRST_SLIDING_LAYER)
    first = positive_int({"max_window_layers": first}, "max_window_layers") if first else 0
    return first < positive_int(config, "num_hidden_layers")
