"""The parameters of a row as the captured tail reads them: columns of `kernels.tail_parameters`.

The tables hold them for each row; only an admission changes them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.interfaces.plan import MAX_DEVICE_STOP_IDS, RowSampling
from nanovllm_core.kernels import tail_parameters as columns

_NO_TOP_K = 2**31 - 1
# Rounding may bring a sum of probabilities to 1 before the last id: 1 means no limit.
_NO_TOP_P = 2.0


def is_captured(sampling: RowSampling) -> bool:
    """True where the captured tail does all that the row asks for, or it asks for nothing."""
    return (
        not sampling.logits_processors
        and not sampling.constrained
        and len(sampling.logit_bias) <= columns.MAX_BIASES
        and (sampling.logprobs or 0) <= columns.MAX_TOP
        and not (sampling.forbids_stop_ids and len(sampling.stop_token_ids) > MAX_DEVICE_STOP_IDS)
    )


def pack_parameters(sampling: RowSampling) -> NDArray[np.int32]:
    """The row's columns, int32 [NUM_COLUMNS]."""
    packed = np.zeros(columns.NUM_COLUMNS, np.int32)
    floats = packed.view(np.float32)
    packed[columns.FLAGS] = (
        columns.CUT * sampling.is_cut
        | columns.PENALISED * sampling.is_penalised
        | columns.BIASED * bool(sampling.logit_bias)
        | columns.FORBIDS * sampling.forbids_stop_ids
    )
    packed[columns.TOP_K] = sampling.top_k if sampling.top_k > 0 else _NO_TOP_K
    floats[columns.TOP_P] = sampling.top_p if sampling.top_p < 1.0 else _NO_TOP_P
    floats[columns.LOG_MIN_P] = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    floats[columns.REPETITION] = sampling.repetition_penalty
    floats[columns.PRESENCE] = sampling.presence_penalty
    floats[columns.FREQUENCY] = sampling.frequency_penalty
    packed[columns.NUM_TOP] = -1 if sampling.logprobs is None else sampling.logprobs
    packed[columns.NUM_BIASES] = len(sampling.logit_bias)
    packed[columns.COUNTED] = -1
    return packed


def pack_biases(sampling: RowSampling) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The ids that have a bias, and the biases by their bits; as many as the tables hold."""
    biases = sampling.logit_bias[: columns.MAX_BIASES]
    ids = np.array([token for token, _ in biases], np.int32)
    return ids, np.array([bias for _, bias in biases], np.float32).view(np.int32)
