"""Log-probabilities come from the device as packed numbers, and are read as plain data."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings

from nanovllm_core.interfaces.plan import TokenLogprobs
from nanovllm_core.worker.results import LogprobTensors

floats = st.floats(max_value=0.0, allow_nan=False, width=32)
pairs = st.lists(st.tuples(st.integers(0, 2**31 - 1), floats), max_size=4)
rows = st.lists(st.tuples(floats, pairs), min_size=1, max_size=6)


def packed(
    asked: Sequence[tuple[float, Sequence[tuple[int, float]]]], columns: int
) -> torch.Tensor:
    """What a device leaves of these, with other numbers behind those that were asked for."""
    numbers = np.full((len(asked), columns), 77, np.int32)
    values = numbers.view(np.float32)
    for row, (token, top) in enumerate(asked):
        values[row, 0] = token
        for rank, (token_id, value) in enumerate(top):
            numbers[row, 1 + 2 * rank], values[row, 2 + 2 * rank] = token_id, value
    return torch.from_numpy(numbers)


@given(asked=rows, data=st.data())
@settings(max_examples=60, deadline=None)
def test_each_entry_gets_as_many_pairs_as_it_asked_for(asked: Any, data: Any) -> None:
    """Entries lie anywhere in the tensor; minus infinity and every id come through."""
    places = data.draw(st.permutations(range(len(asked))))
    of_places = [asked[places.index(place)] for place in range(len(asked))]
    tensors = LogprobTensors(
        entries=[3 * i for i in range(len(asked))],
        num_top=[len(top) for _, top in asked],
        places=places,
        packed=packed(of_places, columns=1 + 2 * 4),
    )
    records = tensors.to_host().to_records()
    assert list(records) == [3 * i for i in range(len(asked))]
    for (token, top), one in zip(asked, records.values(), strict=True):
        assert isinstance(one, TokenLogprobs)
        assert pickle.loads(pickle.dumps(one)) == TokenLogprobs(token, tuple(top))
        assert (one.token_logprob, one.top) == (token, tuple(top))
        assert pickle.loads(pickle.dumps(one)) == one


def test_records_outlive_the_tensor_they_came_from() -> None:
    """The next step writes the same memory again."""
    tensor = packed([(-0.5, [(4, -0.25)])], columns=3)
    (one,) = LogprobTensors([0], [1], [0], tensor).to_host().to_records().values()
    tensor.zero_()
    assert (one.token_logprob, one.top) == (-0.5, ((4, -0.25),))


def test_a_record_is_one_object_to_the_garbage_collector() -> None:
    """A step of many rows makes as many, and most are never read."""
    tensors = LogprobTensors([0], [2], [0], packed([(-0.5, [(1, -1.0), (2, -2.0)])], columns=5))
    (one,) = tensors.to_records().values()
    assert [each for each in gc.get_referents(one) if gc.is_tracked(each)] == [type(one)]
