"""Sampling one token per row, in plain torch: the definition that the Triton kernels must match.

Temperature 0 takes the largest logit. Above 0, argmax(logit / temperature + g) with independent
Gumbel noise g is a sample of softmax(logit / temperature) (the Gumbel-max trick: Maddison, Tarlow
and Minka, "A* Sampling", 2014). The noise is a pure function of (seed, output index, vocabulary
id), so a request's tokens do not depend on its neighbours, on its place in the batch, or on how
the work is split. Equal scores take the lowest id. A NaN logit counts as -inf; a row with nothing
above -inf gives id 0.

The generator mixes (seed, output index) into two 32-bit keys and hashes each vocabulary id with
them. The hash is lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018, public domain)
with the second key entering between its two multiplications.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWBIAS_1 = 0x7FEB352D
LOWBIAS_2 = 0x846CA68B
# Fractional bits of the golden ratio and of sqrt(2): they only make the two keys differ.
KEY_1 = 0x9E3779B9
KEY_2 = 0x6A09E667
NO_ID = 0x7FFFFFFF
"""Above every id."""


def sample_tokens(
    logits_BV: Tensor,
    rows_B: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    output_index_B: Tensor,
    out_B: Tensor,
) -> None:
    """Choose a token id per batch entry into `out_B` (int32).

    `logits_BV` in the model's dtype. `rows_B` int32: the row of the per-row tables that an entry
    is, or -1 for padding, which gets -1. `temperature_R` float32 (0 is greedy), `seed_R` int64.
    `output_index_B` int32: how many tokens the entry has already given.
    """
    inputs = (logits_BV, rows_B, temperature_R, seed_R, output_index_B)
    pairs_B2 = best_pairs(*inputs, 0, logits_BV.shape[1])
    out_B.copy_(torch.where(rows_B < 0, -1, pairs_B2[:, 1]))


def best_pairs(
    logits_BX: Tensor,
    rows_B: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    output_index_B: Tensor,
    first_id: int,
    num_ids: int,
) -> Tensor:
    """The best score of some ids, by its bits, and the lowest id that has it: int32 [B, 2].

    The first `num_ids` columns are the ids from `first_id` on; the others are padding. Of the pairs
    of several such parts `choose_pair` gives the token of the whole.
    """
    rows = rows_B.clamp(min=0)
    temperature_B1 = temperature_R[rows].unsqueeze(1)
    greedy_B1 = temperature_B1 == 0
    column_X = torch.arange(logits_BX.shape[1], device=logits_BX.device, dtype=torch.int32)
    ids_X = column_X + first_id
    logits = logits_BX.float()
    scores = torch.where(logits.isnan() | (column_X >= num_ids), -torch.inf, logits)
    if not greedy_B1.all():
        # A reciprocal, not a division per element: the kernel does the same, so both round alike.
        scores *= torch.where(greedy_B1, 1.0, 1.0 / temperature_B1)
        noise = gumbel_noise(seed_R[rows], output_index_B, logits.shape[1], first_id)
        scores += noise.masked_fill_(greedy_B1, 0.0)
    best_B = scores.amax(dim=1)
    # The lowest of the best ids, written out as the definition; torch.argmax promises the same.
    ids_BX = ids_X.expand_as(scores).masked_fill(scores != best_B.unsqueeze(1), NO_ID)
    return torch.stack([best_B.view(torch.int32), ids_BX.amin(dim=1)], dim=1)


def choose_pair(pairs_BP: Tensor, rows_B: Tensor, out_B: Tensor) -> None:
    """The id of each entry's best pair into `out_B`, of equal scores the lowest; -1 for padding.

    `pairs_BP`: those of each part of the vocabulary, side by side.
    """
    scores, ids = pairs_BP[:, 0::2].contiguous().view(torch.float32), pairs_BP[:, 1::2]
    best_ids = ids.masked_fill(scores != scores.amax(dim=1, keepdim=True), NO_ID).amin(dim=1)
    out_B.copy_(torch.where(rows_B < 0, -1, best_ids))


def gumbel_noise(seed_B: Tensor, output_index_B: Tensor, num_ids: int, first_id: int = 0) -> Tensor:
    """Gumbel noise [B, num_ids] float32 of the ids from `first_id` on.

    Seeds are int64 [B], output indices int32 [B].
    """
    bits_BV = random_bits(seed_B, output_index_B, num_ids, first_id)
    # t = min(u, 1 - u) for a uniform u in (0, 1): resolved to 2^-33 at both ends, never 0 or 1.
    signed = bits_BV.float() * 2.0**-32 + 2.0**-33
    t = signed.abs()
    exponential = -torch.where(signed < 0, torch.log(t), torch.log1p(-t))
    return -torch.log(exponential)


def random_bits(seed_B: Tensor, output_index_B: Tensor, num_ids: int, first_id: int = 0) -> Tensor:
    """32 random bits per vocabulary id, from `first_id` on, as int32 [B, num_ids]."""
    halves = seed_B.contiguous().view(torch.int32)
    low, high = halves[0::2], halves[1::2]
    index = output_index_B.to(torch.int32)
    key_1 = _mix(_mix(_mix(low ^ _signed(KEY_1)) ^ high) ^ index).unsqueeze(1)
    key_2 = _mix(_mix(_mix(low ^ _signed(KEY_2)) ^ high) ^ index).unsqueeze(1)
    ids_V = torch.arange(num_ids, device=seed_B.device, dtype=torch.int32) + first_id
    return _mix(ids_V ^ key_1, key_2)


def _mix(x: Tensor, key: Tensor | int = 0) -> Tensor:
    """lowbias32 on int32 tensors, whose multiplication wraps as unsigned multiplication does."""
    x = (x ^ _shift_right(x, 16)) * LOWBIAS_1
    x = (x ^ _shift_right(x, 15) ^ key) * _signed(LOWBIAS_2)
    return x ^ _shift_right(x, 16)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's own copies the sign bit down."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(constant: int) -> int:
    """The int32 with the same bits as a uint32 constant."""
    return constant - 2**32 if constant >= 2**31 else constant
