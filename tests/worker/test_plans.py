"""Plans, results, the set-up and the worker's answer are data: equal after any journey."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from nanovllm_core.config.sources import load_config
from nanovllm_core.interfaces.plan import (
    Admission,
    ArrayEquality,
    PrefillChunk,
    RowSampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from nanovllm_core.selection.startup import start

from ..e2e.tiny import write_config

numbers = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False)


def arrays(elements: st.SearchStrategy[Any], dtype: Any) -> st.SearchStrategy[Any]:
    return st.lists(elements, max_size=20).map(lambda values: np.array(values, dtype))


indices = arrays(numbers, np.int32)


def block_tables(shape: tuple[int, int]) -> st.SearchStrategy[Any]:
    """Tables of so many groups and blocks; -1 behind a window."""
    size = shape[0] * shape[1]
    entries = st.lists(st.integers(-1, 2**31 - 1), min_size=size, max_size=size)
    return entries.map(lambda values: np.array(values, np.int32).reshape(shape))


samplings = st.builds(
    RowSampling,
    temperature=floats,
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.lists(numbers, max_size=3).map(tuple),
    logits_processors=st.just((("ban", {"words": ["fox"]}),)) | st.just(()),
    logit_bias=st.lists(st.tuples(numbers, floats), max_size=3).map(tuple),
)
admissions = st.builds(
    Admission,
    row=numbers,
    token_ids=indices,
    num_prompt_tokens=numbers,
    num_computed=numbers,
    block_ids=st.tuples(st.integers(1, 3), st.integers(0, 5)).flatmap(block_tables),
    max_length=numbers,
    sampling=samplings,
)
chunks = st.builds(PrefillChunk, row=numbers, start=numbers, length=numbers, samples=st.booleans())
plans = st.builds(
    StepPlan,
    epoch=numbers,
    num_decode=numbers,
    samples_later=st.booleans(),
    decode_rows=st.none() | indices,
    admissions=st.lists(admissions, max_size=3).map(tuple),
    appends=st.none()
    | st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=5).map(
        lambda rows: np.array(rows, np.int32)
    ),
    prefill=st.lists(chunks, max_size=3).map(tuple),
)
logprobs = st.builds(
    TokenLogprobs,
    token_logprob=floats,
    top=st.lists(st.tuples(numbers, floats), max_size=3).map(tuple),
)
results = st.builds(
    StepResult,
    token_ids=indices,
    finished=arrays(st.booleans(), np.bool_),
    logprobs=st.dictionaries(numbers, logprobs, max_size=3),
)
masks = st.builds(TokenMasks, rows=indices, allowed=indices.map(lambda words: words.reshape(1, -1)))
QUICK = settings(max_examples=60, deadline=None)


def received(original: Any) -> Any:
    """What another process would get."""
    return pickle.loads(pickle.dumps(original))


def test_new_blocks_are_all_but_those_of_prefix_hits_and_behind_a_window() -> None:
    """Of admissions those behind the computed tokens, of every group, and what rows append."""
    admission = Admission(
        row=0, token_ids=np.arange(40, dtype=np.int32), num_prompt_tokens=40, num_computed=32,
        block_ids=np.array([[3, 4, 5], [-1, 6, 7]], np.int32), max_length=50,
        sampling=RowSampling(),
    )  # fmt: skip
    plan = StepPlan(
        admissions=(admission,), appends=np.array([[1, 0, 2, 8], [2, 1, 0, 9]], np.int32)
    )
    assert plan.new_blocks(16).tolist() == [8, 9, 5, 7]
    fresh = replace(admission, num_computed=0)
    assert StepPlan(admissions=(fresh,)).new_blocks(16).tolist() == [3, 4, 5, 6, 7]
    assert StepPlan().new_blocks(16).tolist() == []


@given(original=plans | results | masks)
@QUICK
def test_plans_and_results_survive_pickle(original: ArrayEquality) -> None:
    """Every field, with its dtype, in an object of its own."""
    copy = received(original)
    assert copy is not original
    assert copy == original
    for one in fields(original):  # type: ignore[arg-type]
        value, other = getattr(original, one.name), getattr(copy, one.name)
        assert getattr(value, "dtype", None) == getattr(other, "dtype", None)


@given(original=plans, data=st.data())
@QUICK
def test_plans_that_differ_in_any_field_are_not_equal(original: StepPlan, data: Any) -> None:
    other = data.draw(plans)
    name = data.draw(st.sampled_from([one.name for one in fields(StepPlan)]))
    value, changed = getattr(original, name), getattr(other, name)
    same = np.array_equal(value, changed) if isinstance(value, np.ndarray) else value == changed
    if not np.all(same):
        assert replace(original, **{name: changed}) != original


def test_arrays_of_another_dtype_or_shape_are_not_equal() -> None:
    ids = np.array([1, 2], np.int32)
    result = StepResult(ids, np.zeros(2, np.bool_))
    assert result == StepResult(ids.copy(), np.zeros(2, np.bool_))
    assert result != StepResult(ids.astype(np.int64), np.zeros(2, np.bool_))
    assert result != StepResult(ids[:, None], np.zeros(2, np.bool_))
    assert result != StepResult(ids.tolist(), np.zeros(2, np.bool_))  # type: ignore[arg-type]
    assert result != "a result"
    with pytest.raises(TypeError, match="unhashable"):
        hash(result)
    with pytest.raises(FrozenInstanceError):
        result.token_ids = ids  # type: ignore[misc]


def test_the_set_up_and_the_workers_answer_survive_pickle(tmp_path: Path) -> None:
    """The plugins with their parsed options, the configuration, the seconds of the start."""
    attention = {"backend": "sdpa", "options": {"kernel": "math"}}
    changes = {"device": "cpu", "attention": attention, "load_format": "dummy", "max_num_seqs": 2}
    startup = start(load_config(str(write_config(tmp_path)), overrides=changes))
    assert received(startup.setup) == startup.setup
    assert received(startup.setup) != replace(startup.setup, block_size=1)
    info = startup.executor.start(startup.setup)
    startup.executor.close()
    assert received(info) == info
    assert received(info) != replace(info, start_seconds={})
