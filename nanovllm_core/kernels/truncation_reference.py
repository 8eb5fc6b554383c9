"""top_k and top_p in plain torch: the definition that the Triton kernel must match."""

from __future__ import annotations

import torch
from torch import Tensor


def cut_top_k_top_p(
    logits_SV: Tensor, which_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, temperature_N: Tensor
) -> None:
    """Keep the `top_k` likeliest ids, and of these the fewest that hold `top_p` of the probability.

    Exactly k ids stay: of equal logits the lower id is the likelier. The first always stays, since
    `top_p` is above 0. A `top_k` that switches the cut off is V or more, such a `top_p` above 1.

    `logits_SV` float32 with no NaN, contiguous, changed in place: -inf for what is cut. `which_N`
    int64, the rows to cut; `top_k_N` int64, `top_p_N` and `temperature_N` float32, above 0.
    """
    logits = logits_SV[which_N]
    ranked, ids = logits.sort(dim=1, descending=True, stable=True)
    rank_V = torch.arange(logits.shape[1], device=logits.device)
    beyond_k = rank_V >= top_k_N[:, None]
    # In float64, so that the sum over a large vocabulary does not depend on how it was split.
    tempered = (ranked / temperature_N[:, None]).masked_fill_(beyond_k, -torch.inf)
    probabilities = tempered.softmax(dim=1, dtype=torch.float64)
    before = probabilities.cumsum(dim=1) - probabilities
    cut_ranked = beyond_k | (before >= top_p_N[:, None])
    cut_ranked[:, 0] = False  # a top_p too small for float32 still keeps the most likely id
    cut = torch.zeros_like(cut_ranked).scatter_(1, ids, cut_ranked)
    logits_SV.index_copy_(0, which_N, logits.masked_fill_(cut, -torch.inf))
