"""The model: nanovllm's decoder, and what of config.json this architecture means by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_core.layers import DecoderConfig, DecoderForCausalLM, refuse_unless


class MyPluginForCausalLM(DecoderForCausalLM):
    """Grouped-query attention, rotary positions, gated SiLU MLP, RMS norms; no biases, no window.

    `from_config` has a keyword for each setting of the decoder: qkv_bias, output_bias, mlp_bias,
    qk_norm, sliding_window. Where the checkpoint has its projections under other names, or several
    in one tensor, say so in `packed_modules`. To change another part, copy
    `nanovllm_core/layers/decoder.py` into this package, import its names from `nanovllm_core.api`
    and `nanovllm_core.layers`, change the class that differs, and inherit from the copy.
    """

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Refuse settings that this model does not support."""
        refuse_unless(config, attention_bias=False, mlp_bias=False, sliding_window=None)
        return DecoderConfig.from_config(config)
