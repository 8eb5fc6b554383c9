"""A tiny model whose layers alternate between a sliding window and the whole context.

It is the core's decoder with norms of q and k: the weights of `tests.e2e.tiny` fit it. `windows` in
config.json are those of the layers, in turn; `soft_caps` likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from nanovllm_core.api import AttentionShape, ModelShape
from nanovllm_core.layers import Attention, DecoderConfig, DecoderForCausalLM, LayerContext
from nanovllm_kit.reference_model import load_model, run_model

NAME = "AlternatingForCausalLM"
PLUGIN = f'''
from nanovllm_core.api import ModelSpec, hookimpl

@hookimpl
def nanovllm_models():
    impl = "{__name__}:{NAME}"
    return [ModelSpec(name="{NAME}", impl=impl, summary="Windows in turn.", contract=2)]
'''


def install_alternating(install: Callable[..., None]) -> None:
    """Install the plugin by the fixture `install`."""
    groups = {"nanovllm.models": {NAME: "alternating_plugin"}}
    install("alternating", groups, {"alternating_plugin": PLUGIN})


class AlternatingForCausalLM(DecoderForCausalLM):
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


def choices(
    folder: Path, config: Mapping[str, Any], prompt: Sequence[int], answer: Sequence[int]
) -> list[int]:
    """What the model chooses after the prompt and each id of the answer but the last.

    From the whole sequence at once, under dense masks, without blocks or batches.
    """
    model = load_model(AlternatingForCausalLM, folder, config)
    logits = run_model(model, torch.tensor([*prompt, *answer[:-1]]))
    return [int(choice) for choice in logits[len(prompt) - 1 :].argmax(-1)]
