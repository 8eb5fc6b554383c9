"""Sampling parameters are checked when they are made, and say what would be right."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from nanovllm_core.errors import InvalidSamplingError
from nanovllm_core.interfaces.sampling_params import MAX_SEED, MAX_STOPS, NEUTRAL, SamplingParams


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
        pytest.param("temperature", 10**400, "1e+10", id="beyond every float"),
        ("top_k", -2, f"from -1 to {MAX_SEED}"),
        ("top_k", 2.0, "whole number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.1, "at most 1"),
        ("min_p", -0.1, "at least 0 and at most 1"),
        ("min_p", 1.5, "at most 1"),
        ("repetition_penalty", 0, "at least 1e-10"),
        ("repetition_penalty", 1e39, "at most 1e+10"),  # infinite in float32
        ("presence_penalty", 2.5, "at least -2 and at most 2"),
        ("frequency_penalty", -2.5, "at least -2 and at most 2"),
        ("max_tokens", 0, f"from 1 to {MAX_SEED}"),
        ("min_tokens", -1, "from 0 to 64"),
        ("min_tokens", 65, "from 0 to 64"),
        ("seed", -1, f"from 0 to {MAX_SEED}"),
        ("seed", 2**63, f"from 0 to {MAX_SEED}"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", True, "from 0 to 20"),
        ("n", 0, "from 1 to 4096"),
        ("n", 10**9, "from 1 to 4096"),
        ("priority", 1.5, f"from {-MAX_SEED} to {MAX_SEED} (0 is"),
        ("priority", True, "a whole number from"),
        ("ignore_eos", 1, "True or False"),
        ("stop", 3, "a string or a list"),
        ("stop", [""], "at least one character"),
        ("stop", [5], "at least one character"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("stop_token_ids", [-1], f"from 0 to {MAX_SEED}"),
        ("stop_token_ids", [1.0], "whole number"),
        ("logit_bias", [5], "must map token ids to numbers"),
        ("logit_bias", {-1: 1.0}, f"from 0 to {MAX_SEED}"),
        ("logit_bias", {"five": 1.0}, "whole number"),
        ("logit_bias", {"9" * 5000: 1.0}, "whole number"),
        ("logit_bias", {True: 1.0}, "whole number"),
        ("logit_bias", {5: 100.5}, "at least -100 and at most 100"),
        ("logit_bias", {5: math.nan}, "finite"),
        ("logit_bias", {5: "1"}, "finite"),
        ("logit_bias", {5: 1.0, "5": 2.0}, "twice"),
        pytest.param("logit_bias", dict.fromkeys(range(1025), 1.0), "1024", id="too many ids"),
    ],
)
def test_a_value_out_of_its_range_is_refused(name: str, value: object, limit: str) -> None:
    """The message names the parameter, the value and the limit."""
    with pytest.raises(InvalidSamplingError, match=f"{name}.*{re.escape(limit)}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "hint"), [("max_token", "did you mean max_tokens?"), ("zzz", "it has temperature, ")]
)
def test_an_unknown_keyword_is_named_with_one_that_is_like_it(name: str, hint: str) -> None:
    """An error of ours, which tells what there is; the signature stays that of the fields."""
    with pytest.raises(InvalidSamplingError, match=f"has no field '{name}'.*{re.escape(hint)}"):
        SamplingParams(**{name: 5})  # type: ignore[arg-type]
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert [*inspect.signature(SamplingParams).parameters] == names


def test_none_in_any_field_is_as_if_it_were_left_out() -> None:
    """Clients of OpenAI's API pass what they do not state so; max_tokens alone has its own None."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    params = SamplingParams(**dict.fromkeys(names))  # type: ignore[arg-type]
    assert params == dataclasses.replace(SamplingParams(), max_tokens=None)
    assert (params.stop_strings, params.stop_ids, params.n) == ((), (), 1)


def test_what_is_not_stated_comes_from_the_defaults_and_else_is_neutral() -> None:
    """A stated value counts even where it is the neutral one; a copy states no more than it did."""
    defaults = {"temperature": 0.6, "top_k": 20}
    assert SamplingParams().choice({}) == NEUTRAL
    assert SamplingParams().choice(defaults) == {**NEUTRAL, **defaults}
    stated = dataclasses.replace(SamplingParams(top_k=0, top_p=0.9), max_tokens=7)
    assert stated.choice(defaults) == {**NEUTRAL, "temperature": 0.6, "top_k": 0, "top_p": 0.9}


def test_a_logit_bias_is_copied_with_whole_ids_and_floats() -> None:
    """JSON has texts for ids."""
    given = {"50256": -100, np.int64(3): 1}
    params = SamplingParams(logit_bias=given)  # type: ignore[arg-type]
    given.clear()
    assert params.logit_bias == {50256: -100.0, 3: 1.0}
    assert {type(key) for key in params.logit_bias} == {int}


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
     "frequency_penalty", "max_tokens", "min_tokens", "seed", "logprobs", "n", "priority",
     "ignore_eos", "stop", "stop_token_ids", "logits_processors"],
)  # fmt: skip
@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), [10**5000], Fraction(10**5000, 7), [["x" * 10**6]], 2**63 * 1.5],
    ids=["large", "negative", "list", "fraction", "text", "float"],
)
def test_a_huge_value_is_refused_in_a_short_message(name: str, value: object) -> None:
    """Python itself writes no whole number of more than 4,300 digits."""
    with pytest.raises(InvalidSamplingError, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "priority"])
def test_a_whole_number_has_64_bits(name: str) -> None:
    assert getattr(SamplingParams(**{name: MAX_SEED}), name) == MAX_SEED
    with pytest.raises(InvalidSamplingError, match=f"{name} is {2**63}; .* to {MAX_SEED} "):
        SamplingParams(**{name: 2**63})


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


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32, np.int64, np.uint64])
def test_whole_numbers_of_numpy_become_python_numbers(kind: type[np.integer]) -> None:
    """They wrap around where they are added to, and an int64 takes no mask of 64 bits."""
    names = ("top_k", "max_tokens", "min_tokens", "seed", "logprobs", "n", "priority")
    params = SamplingParams(**dict.fromkeys(names, kind(7)))
    assert {name: type(getattr(params, name)) for name in names} == dict.fromkeys(names, int)


@pytest.mark.parametrize("kind", [np.float16, np.float32, Fraction, int])
def test_numbers_of_any_kind_become_floats(kind: type) -> None:
    """Whoever reads them need not know what they were made from."""
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    params = SamplingParams(**dict.fromkeys(names, kind(1)))
    assert {name: type(getattr(params, name)) for name in names} == dict.fromkeys(names, float)


def test_stops_are_kept_as_tuples() -> None:
    """One string is a list of one; lists given stay the caller's to change."""
    ids = [4, 5]
    params = SamplingParams(stop="end", stop_token_ids=ids)
    ids.append(6)
    assert params.stop_strings == ("end",)
    assert params.stop_ids == (4, 5)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert hash(params) == hash(SamplingParams(stop=("end",), stop_token_ids=(4, 5)))


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_a_list_of_stops_is_bounded_and_is_no_bytes(name: str) -> None:
    """What never ends is refused, not waited for; bytes would be read as ids."""
    item: Any = "x" if name == "stop" else 7
    assert SamplingParams(**{name: [item] * MAX_STOPS})
    with pytest.raises(InvalidSamplingError, match=rf"{name} has more than {MAX_STOPS} entries"):
        SamplingParams(**{name: itertools.repeat(item)})
    with pytest.raises(InvalidSamplingError, match=f"{name} is b'ab'"):
        SamplingParams(**{name: b"ab"})
