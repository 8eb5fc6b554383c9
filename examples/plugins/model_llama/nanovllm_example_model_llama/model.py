"""Llama (arXiv:2302.13971, 2407.21783) and Mistral (arXiv:2310.06825).

Both are nanovllm's decoder. They differ in three settings: only Llama may have biases, of attention
and MLP, only Mistral a sliding window. What config.json leaves out has the value that transformers
gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_core.layers import (
    DecoderConfig,
    DecoderForCausalLM,
    list_of,
    refuse_unless,
    true_or_false,
)

_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
"""What a Mistral config.json without them means; null means a KV head for each head, no window."""


class LlamaForCausalLM(DecoderForCausalLM):
    """`attention_bias` puts a bias on q, k, v and the output alike."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        refuse_unless(config, layer_types="full_attention")
        bias = true_or_false(config, "attention_bias")
        return DecoderConfig.from_config(
            config, qkv_bias=bias, output_bias=bias, mlp_bias=true_or_false(config, "mlp_bias")
        )


class MistralForCausalLM(LlamaForCausalLM):
    """Llama without biases, and with a sliding window where config.json has one.

    `layer_types`, where it is there, says whether the layers have it: the model is then what
    transformers calls Ministral.
    """

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        config = {**_MISTRAL, **config}
        window, kinds = config["sliding_window"], set(list_of(config, "layer_types", str))
        slides = kinds <= {"sliding_attention"}
        if not slides or window is None:
            refuse_unless(config, layer_types="full_attention")
        return DecoderConfig.from_config(config, sliding_window=window if slides else None)
