"""Qwen3 dense (arXiv:2505.09388): nanovllm's decoder with an RMS norm of each head of q and k.

What config.json leaves out has the value that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_core.layers import (
    DecoderConfig,
    DecoderForCausalLM,
    refuse_unless,
    true_or_false,
)

_HEADS = {"num_key_value_heads": 32, "head_dim": 128}
"""What is meant where config.json leaves them out."""


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The base is the whole model; what is Qwen3's own is how config.json is read."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Windows are refused: Qwen3 has them, if at all, in some of its layers."""
        refuse_unless(config, use_sliding_window=False, layer_types="full_attention")
        bias = true_or_false(config, "attention_bias")
        return DecoderConfig.from_config(
            {**_HEADS, **config}, qkv_bias=bias, output_bias=bias, qk_norm=True
        )
