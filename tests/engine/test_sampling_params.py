"""Sampling parameters are checked when they are made, and say what would be right."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from nanovllm_core.errors import InvalidSamplingError
from nanovllm_core.sampling_params import MAX_SEED, SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", True, "finite"),
        ("temperature", "hot", "finite"),
        ("temperature", 1e-40, "1e-10"),  # its reciprocal is infinite in float32
        ("temperature", 1e39, "1e+10"),  # infinite itself
        ("top_k", -2, "at least -1"),
        ("top_k", 2.0, "whole number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.1, "at most 1"),
        ("min_p", -0.1, "at least 0 and at most 1"),
        ("min_p", 1.5, "at most 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", 2.5, "at least -2 and at most 2"),
        ("frequency_penalty", -2.5, "at least -2 and at most 2"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "from 0 to 64"),
        ("min_tokens", 65, "from 0 to 64"),
        ("seed", -1, f"from 0 to {MAX_SEED}"),
        ("seed", 2**63, f"from 0 to {MAX_SEED}"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", True, "from 0 to 20"),
        ("n", 0, "from 1 to 4096"),
        ("n", 10**9, "from 1 to 4096"),
        ("priority", 1.5, "a whole number (0 is"),
        ("priority", True, "a whole number (0 is"),
        ("ignore_eos", 1, "True or False"),
        ("stop", 3, "a string or a list"),
        ("stop", [""], "at least one character"),
        ("stop", [5], "at least one character"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", [1.0], "whole number"),
    ],
)
def test_a_value_out_of_its_range_is_refused(name: str, value: object, limit: str) -> None:
    """The message names the parameter, the value and the limit."""
    with pytest.raises(InvalidSamplingError, match=f"{name}.*{re.escape(limit)}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_values_at_their_limits_are_taken() -> None:
    """Switched off, at the edge, or a numpy number: all fine."""
    params = SamplingParams(
        temperature=0,
        top_k=-1,
        top_p=1,
        min_p=1,
        presence_penalty=-2,
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        min_tokens=5,
        seed=MAX_SEED,
        logprobs=0,
    )
    assert params.max_tokens == 5
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None


def test_stops_are_kept_as_tuples() -> None:
    """One string is a list of one; lists given stay the caller's to change."""
    ids = [4, 5]
    params = SamplingParams(stop="end", stop_token_ids=ids)
    ids.append(6)
    assert params.stop_strings == ("end",)
    assert params.stop_ids == (4, 5)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert hash(params) == hash(SamplingParams(stop=("end",), stop_token_ids=(4, 5)))
