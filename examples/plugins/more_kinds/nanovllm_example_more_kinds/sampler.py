"""Inverse transform sampling: one uniform number per token, looked up in the cumulative weights.

The core's sampler draws a number for every id of the vocabulary; this one draws a single number per
token (Devroye, Non-Uniform Random Variate Generation, 1986, III.2). Its weights are whole numbers:
their sum is exact, so it does not depend on the order in which a device adds them up, and an id of
weight 0 is never found. An id below 2^-41 of the likeliest one's probability has weight 0.

Shape suffixes: B batch entries, V vocabulary, R rows of the tables, 1 a column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm_core.api import Sampler

WEIGHT_OF_LIKELIEST = 2.0**40
"""Sums of 2^22 such weights still fit in 63 bits."""


class InverseCdfSampler(Sampler):
    """See `nanovllm_core.api.Sampler` for the contract."""

    def sample(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        row_B = rows_B.clamp(min=0)  # -1 is padding
        temperature_B1 = temperature_R[row_B].unsqueeze(1).double()
        sums_BV = weights(logits_BV, temperature_B1).cumsum(dim=1)
        totals_B1 = sums_BV[:, -1:]
        uniform_B1 = uniform(seed_R[row_B], output_index_B).unsqueeze(1)
        # In greedy rows the first id with any weight: the lowest of the likeliest.
        places_B1 = (uniform_B1 * totals_B1 * (temperature_B1 > 0)).long()
        # A sum above 2^53 may have been rounded up; in a row without any weight this gives id 0.
        places_B1 = places_B1.minimum(totals_B1 - 1)
        ids_B = torch.searchsorted(sums_BV, places_B1, right=True).squeeze(1)
        out_B.copy_(ids_B.where(rows_B >= 0, -1))


def weights(logits_BV: Tensor, temperature_B1: Tensor) -> Tensor:
    """Whole numbers [B, V] int64 in proportion to softmax(logits / temperature).

    At temperature 0 the likeliest ids alone have any. A NaN counts as -inf.
    """
    highest = torch.finfo(torch.float64).max
    scores_BV = logits_BV.double().nan_to_num(nan=-torch.inf, posinf=highest, neginf=-torch.inf)
    # A row of -inf alone has no peak: any finite number keeps its weights at 0.
    below_BV = scores_BV - scores_BV.amax(dim=1, keepdim=True).clamp(min=-highest)
    greedy_B1 = temperature_B1 == 0
    below_BV /= temperature_B1.masked_fill(greedy_B1, 1.0)
    below_BV = torch.where(greedy_B1 & (below_BV < 0), -torch.inf, below_BV)
    return (below_BV.exp() * WEIGHT_OF_LIKELIEST).round().long()


def uniform(seed_B: Tensor, output_index_B: Tensor) -> Tensor:
    """Numbers [B] float64 of 53 bits in [0, 1) that depend on their own seed and index alone."""
    bits_B = mix(mix(seed_B) + output_index_B)
    return ((bits_B >> 11) & (2**53 - 1)).double() * 2.0**-53


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): each bit changes half of all.

    int64 in and out; the masks make its shifts those of unsigned numbers.
    """
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & (2**33 - 1))
