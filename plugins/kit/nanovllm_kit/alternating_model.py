"""A model whose layers keep different parts of the context: each has the next of `windows`.

`windows` of config.json are sliding windows in tokens, or null for the whole context; the layers
take them in turn. `soft_caps` likewise. Otherwise it is the core's decoder, with norms of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any

from pydantic import BaseModel

from nanovllm_core.interfaces.model import AttentionShape, ModelShape
from nanovllm_core.layers import Attention, DecoderConfig, DecoderForCausalLM, LayerContext


class AlternatingForCausalLM(DecoderForCausalLM):
    """Its cache groups are those of its windows and soft caps."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_config(config, qk_norm=True)

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        shape = super().shape(config)
        bends = zip(cycle(config["windows"]), cycle(config.get("soft_caps", [None])), strict=False)
        layers = tuple(
            AttentionShape(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_size=shape.head_size,
                sliding_window=window,
                soft_cap=soft_cap,
            )
            for _, (window, soft_cap) in zip(range(shape.num_layers), bends, strict=False)
        )
        return replace(shape, attention_layers=layers)

    def __init__(
        self, options: BaseModel, config: Mapping[str, Any], context: LayerContext
    ) -> None:
        super().__init__(options, config, context)
        layers = (module for module in self.modules() if isinstance(module, Attention))
        for layer, stated in zip(layers, self.shape(config).attention_shapes, strict=True):
            layer.sliding_window, layer.soft_cap = stated.sliding_window, stated.soft_cap
