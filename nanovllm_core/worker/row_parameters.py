"""The parameters of a row as the captured tail reads them: see `interfaces.tail`.

The tables hold them for each row; only an admission changes them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.interfaces.plan import MAX_DEVICE_STOP_IDS, RowSampling
from nanovllm_core.interfaces.tail import (
    MAX_ROW_BIASES,
    MAX_ROW_LOGPROBS,
    NUM_ROW_COLUMNS,
    RowColumn,
    RowFlag,
)

_NO_TOP_K = 2**31 - 1
# Rounding may bring a sum of probabilities to 1 before the last id: 1 means no limit.
_NO_TOP_P = 2.0


def is_captured(sampling: RowSampling) -> bool:
    """True where the captured tail does all that the row asks for, or it asks for nothing."""
    return (
        not sampling.logits_processors
        and not sampling.constrained
        and len(sampling.logit_bias) <= MAX_ROW_BIASES
        and (sampling.logprobs or 0) <= MAX_ROW_LOGPROBS
        and not (sampling.forbids_stop_ids and len(sampling.stop_token_ids) > MAX_DEVICE_STOP_IDS)
    )


def pack_parameters(sampling: RowSampling) -> NDArray[np.int32]:
    """The row's columns, int32 [NUM_ROW_COLUMNS]; neutral where it needs the eager tail."""
    packed = np.zeros(NUM_ROW_COLUMNS, np.int32)
    floats = packed.view(np.float32)
    packed[RowColumn.COUNTED] = -1
    packed[RowColumn.NUM_TOP] = -1
    if not is_captured(sampling):
        return packed
    packed[RowColumn.FLAGS] = (
        RowFlag.CUT * sampling.is_cut
        | RowFlag.PENALISED * sampling.is_penalised
        | RowFlag.BIASED * bool(sampling.logit_bias)
        | RowFlag.FORBIDS * sampling.forbids_stop_ids
    )
    packed[RowColumn.TOP_K] = sampling.top_k if sampling.top_k > 0 else _NO_TOP_K
    floats[RowColumn.TOP_P] = sampling.top_p if sampling.top_p < 1.0 else _NO_TOP_P
    floats[RowColumn.LOG_MIN_P] = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    floats[RowColumn.REPETITION] = sampling.repetition_penalty
    floats[RowColumn.PRESENCE] = sampling.presence_penalty
    floats[RowColumn.FREQUENCY] = sampling.frequency_penalty
    if sampling.logprobs is not None:
        packed[RowColumn.NUM_TOP] = sampling.logprobs
    packed[RowColumn.NUM_BIASES] = len(sampling.logit_bias)
    packed[RowColumn.NUM_STOP_IDS] = min(len(sampling.stop_token_ids), MAX_DEVICE_STOP_IDS)
    return packed


def pack_biases(sampling: RowSampling) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The ids that have a bias, increasing, and the biases by their bits; as many as fit."""
    biases = sorted(sampling.logit_bias)[:MAX_ROW_BIASES]
    ids = np.array([token for token, _ in biases], np.int32)
    return ids, np.array([bias for _, bias in biases], np.float32).view(np.int32)
