"""The logits processors of a worker, made from what rank 0 resolved."""

from __future__ import annotations

from typing import cast

import torch

from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.logits_processor import LogitsContext
from nanovllm_core.interfaces.specs import LogitsProcessorSpec
from nanovllm_core.registry.checks import describe
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.worker.processors import LoadedProcessor, RowProcessors


def make_processors(setup: WorkerSetup, device: torch.device, vocab_size: int) -> RowProcessors:
    """The logits processors of this worker, in the order of the configuration."""
    if not setup.logits_processors:
        return RowProcessors({})
    context = LogitsContext(
        device=device,
        vocab_size=vocab_size,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.config.limits.max_num_seqs,
        tokenizer=setup.tokenizer,
    )
    plugins = get_plugin_manager(disable=setup.config.plugins.disable)
    loaded = {}
    for one in setup.logits_processors:
        spec = cast(LogitsProcessorSpec, plugins.spec(one.kind, one.name))
        loaded[one.name] = LoadedProcessor(
            describe(one), spec.arguments, make_plugin(one, context), checks=setup.config.debug
        )
    return RowProcessors(loaded)
