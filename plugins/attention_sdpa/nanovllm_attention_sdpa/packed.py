"""Attention of packed sequences of different lengths, for the prompts of latent attention.

Shape suffixes as in `nanovllm_core.interfaces.attention`; Q and L of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from nanovllm_attention_sdpa.dense import Rules, attend
from nanovllm_attention_sdpa.kernels import SdpaKernel
from nanovllm_core.api import InconsistentStateError, PackedMetadata


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """What is the same for every packed call of an engine."""

    kernel: SdpaKernel
    scale: float

    def plan(self, metadata: PackedMetadata) -> None:
        """Leave the slices of each sequence's queries and keys in the metadata."""
        bounds = torch.stack((metadata.query_start_loc, metadata.key_start_loc)).tolist()
        queries, keys = ([slice(*ends) for ends in pairwise(starts)] for starts in bounds)
        metadata.plan = list(zip(queries, keys, strict=True))

    def run(
        self,
        q_THD: Tensor,
        k_LHD: Tensor,
        v_LHV: Tensor,
        metadata: PackedMetadata,
        out_THV: Tensor,
        lse_HT: Tensor | None,
    ) -> None:
        """See `AttentionBackend.run_packed`. InconsistentStateError without a plan."""
        if metadata.plan is None:
            raise InconsistentStateError("run_packed got metadata without a plan_packed for it")
        rules = Rules(self.scale, (-1, 0 if metadata.causal else -1))
        writes_scores = self.kernel.writes_scores(max(q_THD.shape[-1], v_LHV.shape[-1]))
        for queries, keys in metadata.plan:
            q_QHD, k, v = q_THD[queries], k_LHD[keys], v_LHV[keys]
            is_square = metadata.causal and len(q_QHD) == len(k) > 0
            if is_square and lse_HT is None and not writes_scores:
                out_THV[queries] = self._causal(q_QHD, k, v)
                continue
            out_THV[queries], lse_HQ = attend(q_QHD, k, v, rules, None)
            if lse_HT is not None:
                lse_HT[:, queries] = lse_HQ

    def _causal(self, q_QHD: Tensor, k_QHD: Tensor, v_QHV: Tensor) -> Tensor:
        """A prompt from its first token on, by torch's fused kernels, which have one head size."""
        value_size = v_QHV.shape[-1]
        size = max(q_QHD.shape[-1], value_size)
        q, k, v = (_pad_to(size, x).transpose(0, 1).unsqueeze(0) for x in (q_QHD, k_QHD, v_QHV))
        out_1HQX = self.kernel.causal(q, k, v, self.scale)
        return out_1HQX[0].transpose(0, 1)[..., :value_size]


def _pad_to(size: int, x: Tensor) -> Tensor:
    """Zeros behind the last dimension; the tensor itself where it has that size, not a copy."""
    missing = size - x.shape[-1]
    return pad(x, (0, missing)) if missing else x
