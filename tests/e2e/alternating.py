"""A tiny model whose layers alternate between a sliding window and the whole context.

It is the core's decoder with norms of q and k: the weights of `tests.e2e.tiny` fit it. `windows` in
config.json are those of the layers, in turn; `soft_caps` likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nanovllm_kit.alternating_model import AlternatingForCausalLM
from nanovllm_kit.reference_model import load_model, run_model

NAME = "AlternatingForCausalLM"
PLUGIN = f'''
from nanovllm_core.api import ModelSpec, hookimpl

@hookimpl
def nanovllm_models():
    impl = "nanovllm_kit.alternating_model:{NAME}"
    return [ModelSpec(name="{NAME}", impl=impl, summary="Windows in turn.", contract=2)]
'''


def install_alternating(install: Callable[..., None]) -> None:
    """Install the plugin by the fixture `install`."""
    groups = {"nanovllm.models": {NAME: "alternating_plugin"}}
    install("alternating", groups, {"alternating_plugin": PLUGIN})


def choices(
    folder: Path, config: Mapping[str, Any], prompt: Sequence[int], answer: Sequence[int]
) -> list[int]:
    """What the model chooses after the prompt and each id of the answer but the last.

    From the whole sequence at once, under dense masks, without blocks or batches.
    """
    model = load_model(AlternatingForCausalLM, folder, config)
    logits = run_model(model, torch.tensor([*prompt, *answer[:-1]]))
    return [int(choice) for choice in logits[len(prompt) - 1 :].argmax(-1)]
