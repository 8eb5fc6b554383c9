"""Sampling parameters applied to logits: pure functions over some rows of a float32 batch.

S rows of a batch, N of them that need the operation (`which_N`, int64 positions among the S), K
pairs of a row and an id, V vocabulary, L ids at most. An operation takes the logits, the rows'
facts, the positions of the rows that it changes, and a value or more for each of them. It changes
`logits_SV` in place, touches only these rows, and never waits for the device. Forbidden ids get
-inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.errors import ModelOutputError

BYTES_PER_LOGIT = 16
"""An upper bound of what a row holds at once, per vocabulary id: its copy, its probabilities."""
BYTES_PER_CHANGED_LOGIT = 48
"""The same while penalties, `min_p` or a processor work on the row."""
BYTES_PER_SORTED_LOGIT = 96
"""The same while the row is sorted."""
MAX_SORTED_ROWS = 8
"""On CUDA a sort of this many rows is as fast as the kernel, which gives each row a processor."""
MAX_SHOWN = 8
"""So many wrong rows are named in an error."""
BYTES_PER_KNOWN_ID = 32
"""The same per row and entry of the token table."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The facts of the S rows of a step whose logits change.

    `token_ids` are those of every row of the tables: `num_known` of them are known, the first
    `num_prompt` from the prompt. `output_index` is the number of tokens already given.
    """

    rows: Tensor  # [S] int64, in the tables
    temperature: Tensor  # [S] float32
    output_index: Tensor  # [S]
    num_prompt: Tensor  # [S]
    num_known: Tensor  # [S]
    token_ids: Tensor  # [R, L] int32


def add_bias(
    logits_SV: Tensor, step: StepRows, which_K: Tensor, token_ids_K: Tensor, bias_K: Tensor
) -> None:
    """Add to K (row, id) pairs, all of them different. A forbidden id stays forbidden."""
    values = logits_SV[which_K, token_ids_K] + bias_K
    logits_SV.index_put_((which_K, token_ids_K), values)


def check_logits(largest_B: Tensor, rows_B: Tensor, step: int) -> None:
    """Raise ModelOutputError for logits that no model may give; waits for the device.

    With NaN or +inf a sampler takes the same id for ever. -inf forbids an id, but never all of a
    row. `largest_B` are the largest logits, NaN where one is. `rows_B` are the entries' rows in the
    tables, -1 for padding, which may hold anything; `step` is the step's number.
    """
    live = rows_B >= 0
    rows = rows_B[live].tolist()
    largest = largest_B[live].tolist()
    wrong = {row: one for row, one in zip(rows, largest, strict=True) if not math.isfinite(one)}
    if wrong:
        shown = ", ".join(f"row {row}: {one}" for row, one in [*wrong.items()][:MAX_SHOWN])
        raise ModelOutputError(
            f"step {step}: the largest logit of {len(wrong)} of {len(rows)} rows is not finite "
            f"({shown}); run `nanovllm plugins test` on the model and the attention backend, or "
            "choose another backend, kernel set or dtype",
            rows=tuple(wrong),
        )


def penalise(
    logits_SV: Tensor,
    step: StepRows,
    which_N: Tensor,
    repetition_N: Tensor,
    presence_N: Tensor,
    frequency_N: Tensor,
) -> None:
    """Make ids that came before less likely.

    Repetition (Keskar et al., "CTRL", 2019) divides positive and multiplies negative logits of ids
    in the prompt or the output. Then each id loses `frequency` for every time, and `presence` once,
    that it is in the output.
    """
    vocab_size = logits_SV.shape[1]
    token_ids_NL = step.token_ids[step.rows[which_N]]
    num_prompt_N, num_known_N = step.num_prompt[which_N], step.num_known[which_N]
    outputs = count_ids(token_ids_NL, num_prompt_N, num_known_N, vocab_size)
    seen = count_ids(token_ids_NL, torch.zeros_like(num_known_N), num_known_N, vocab_size) > 0
    logits = logits_SV[which_N]
    factor = repetition_N[:, None].expand_as(logits)
    factor = torch.where(logits > 0, factor.reciprocal(), factor)
    logits = torch.where(seen, logits * factor, logits)
    logits -= frequency_N[:, None] * outputs
    logits -= presence_N[:, None] * (outputs > 0)
    logits_SV.index_copy_(0, which_N, logits)


def count_ids(token_ids_NL: Tensor, start_N: Tensor, end_N: Tensor, vocab_size: int) -> Tensor:
    """How often each id is at positions `start` to `end - 1` of its row: int32 [N, vocab_size]."""
    position_L = torch.arange(token_ids_NL.shape[1], device=token_ids_NL.device)
    counted = (position_L >= start_N[:, None]) & (position_L < end_N[:, None])
    ids = torch.where(counted, token_ids_NL, 0).long()
    counts = torch.zeros(len(ids), vocab_size, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(1, ids, counted.int())


def forbid_stop_ids(
    logits_SV: Tensor, step: StepRows, which_K: Tensor, stop_ids_K: Tensor, min_tokens_K: Tensor
) -> None:
    """Forbid K (row, stop id) pairs while the row has given fewer than `min_tokens` tokens."""
    too_early = step.output_index[which_K] < min_tokens_K
    values = torch.where(too_early, -torch.inf, logits_SV[which_K, stop_ids_K])
    logits_SV.index_put_((which_K, stop_ids_K), values)


def cut_min_p(logits_SV: Tensor, step: StepRows, which_N: Tensor, log_min_p_N: Tensor) -> None:
    """Forbid ids whose probability, at the row's temperature, is below `min_p` of the largest."""
    logits = logits_SV[which_N]
    tempered = logits / step.temperature[which_N][:, None]
    floor = tempered.amax(dim=1, keepdim=True) + log_min_p_N[:, None]
    logits_SV.index_copy_(0, which_N, logits.masked_fill_(tempered < floor, -torch.inf))


def cut_top_k_top_p(
    logits_SV: Tensor, step: StepRows, which_N: Tensor, top_k_N: Tensor, top_p_N: Tensor
) -> None:
    """Keep the `top_k` likeliest ids, and of these the fewest that hold `top_p` of the probability.

    By a kernel on CUDA where there are many, else by sorting; `kernels.truncation_reference` has
    the facts.
    """
    if logits_SV.is_cuda and len(which_N) > MAX_SORTED_ROWS:
        from nanovllm_core.kernels.truncation_triton import cut_top_k_top_p as cut
    else:
        from nanovllm_core.kernels.truncation_reference import cut_top_k_top_p as cut
    cut(logits_SV, which_N, top_k_N, top_p_N, step.temperature[which_N])
