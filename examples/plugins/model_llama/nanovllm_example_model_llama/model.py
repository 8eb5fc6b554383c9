"""Llama (arXiv:2302.13971, 2407.21783) and Mistral (arXiv:2310.06825).

Both are nanovllm's decoder. They differ in three settings: only Llama may have biases, of attention
and MLP, only Mistral a sliding window. What config.json leaves out has the value that transformers
gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_core.api import DecoderConfig, DecoderForCausalLM, LayerContext

_MISTRAL_WINDOW = 4096
"""What a Mistral config.json without `sliding_window` means; null means no window."""


class LlamaForCausalLM(DecoderForCausalLM):
    """`attention_bias` puts a bias on q, k, v and the output alike."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        bias = bool(config.get("attention_bias"))
        return DecoderConfig.from_config(
            config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias"))
        )

    def __init__(self, config: Mapping[str, Any], context: LayerContext) -> None:
        super().__init__(config, context)
        # Llama 1 and 2 were saved with the rotary frequencies, which follow from the settings.
        self.ignored_weights = [
            f"model.layers.{index}.self_attn.rotary_emb.inv_freq"
            for index in range(len(self.model.layers))
        ]


class MistralForCausalLM(LlamaForCausalLM):
    """Llama without biases, and with a sliding window where config.json has one."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        window = config.get("sliding_window", _MISTRAL_WINDOW)
        return DecoderConfig.from_config(config, sliding_window=window)
