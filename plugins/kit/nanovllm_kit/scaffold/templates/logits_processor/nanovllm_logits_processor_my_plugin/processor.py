"""Lower the logits of the ids among a row's last tokens, prompt and answer alike.

Everything is computed on the device: the host may not have seen the last tokens yet. Shape
suffixes: S rows that asked, V vocabulary, L tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from nanovllm_core.api import LogitsContext, LogitsProcessor, LogitsRequest
from torch import Tensor

from nanovllm_logits_processor_my_plugin.plugin import EngineOptions, RequestArguments


class MyPluginProcessor(LogitsProcessor):
    """One instance serves all requests of an engine."""

    def __init__(self, options: EngineOptions, context: LogitsContext) -> None:
        super().__init__(options, context)
        self._per_occurrence = options.per_occurrence

    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        """Called once per step for the rows that asked; changes their logits in place."""
        for logits_V, request in zip(logits_SV, requests, strict=True):
            asked = cast(RequestArguments, request.arguments)
            counts_V = self._counts(request, asked.window, logits_V.shape[0])
            if not self._per_occurrence:
                counts_V.clamp_(max=1.0)
            logits_V.sub_(counts_V, alpha=asked.penalty)

    def _counts(self, request: LogitsRequest, window: int, vocab_size: int) -> Tensor:
        """How often each id stands in the window, float32 [V]; nothing waits for the device."""
        ids_L = request.token_ids
        positions_L = torch.arange(ids_L.shape[0], device=ids_L.device)
        known_L = positions_L < request.num_known
        recent_L = known_L & (positions_L >= request.num_known - window)
        # Entries after the known ids are not valid ids; do not index with them.
        ids_L = torch.where(recent_L, ids_L, 0).long()
        counts_V = torch.zeros(vocab_size, device=ids_L.device)
        return counts_V.index_add_(0, ids_L, recent_L.float())
