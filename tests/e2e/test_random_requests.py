"""Random requests on random settings, against the reference that recomputes everything."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings

from nanovllm_core import LLM, SamplingParams

from .tiny import VOCAB_SIZE, Reference, open_tiny

FEW = settings(
    # The same examples every time: in another batch fp32 sums may flip one near tie in millions.
    derandomize=True,
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Asked:
    """A prompt cut from one text, so that beginnings are shared, and what is asked of it."""

    prompt: tuple[int, ...]
    params: SamplingParams


MAX_TOKENS = 14
TEXT = tuple(int(token) for token in np.random.default_rng(3).integers(0, VOCAB_SIZE, 120))


BIAS = st.sampled_from([-100.0, -1.5, 2.25, 100.0])


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    shared = draw(st.sampled_from([0, 5, 16, 17, 32, 40, 64]))
    own = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20))
    max_tokens = draw(st.integers(1, MAX_TOKENS))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.3])),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12, unique=True)),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5])),
        logit_bias=draw(
            st.none() | st.dictionaries(st.integers(0, VOCAB_SIZE - 1), BIAS, max_size=5)
        ),
    )
    return Asked(TEXT[:shared] + tuple(own), params)


engine_settings = st.fixed_dictionaries(
    {
        "steps_ahead": st.sampled_from([0, 1, 2, 4]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([6, 16, 50, 300]),
        "cache": st.fixed_dictionaries(
            {
                "block_size": st.sampled_from([16, 32]),
                "num_blocks": st.integers(8, 20),
                "prefix_caching": st.booleans(),
            }
        ),
    }
)


def expected(reference: Reference, asked: Asked) -> list[int]:
    """The tokens by the definition of each parameter, one whole recomputation for each."""
    params, ids = asked.params, list(asked.prompt)
    for index in range(params.max_tokens or 0):
        scores = reference.logits(ids)[-1].clone()
        for token_id, bias in (params.logit_bias or {}).items():
            scores[token_id] += bias
        seen = list(set(ids))
        factor = params.repetition_penalty
        scores[seen] = torch.where(scores > 0, scores / factor, scores * factor)[seen]
        scores[list(set(ids[len(asked.prompt) :]))] -= params.presence_penalty
        if index < params.min_tokens:
            scores[list(params.stop_ids)] = -np.inf
        ids.append(reference.choose(scores, params.temperature, params.seed or 0, index))
        if ids[-1] in params.stop_ids:
            break
    return ids[len(asked.prompt) :]


def run(llm: LLM, batch: Sequence[Asked]) -> list[list[int]]:
    outputs = llm.generate([one.prompt for one in batch], [one.params for one in batch])
    for output, one in zip(outputs, batch, strict=True):
        stopped = output.token_ids[-1] in one.params.stop_ids
        assert output.finish_reason == ("stop" if stopped else "length")
    return [output.token_ids for output in outputs]


def encode_everything(llm: LLM) -> None:
    """Plans and results reach worker and engine as copies that went through pickle."""
    executor = llm.engine._executor
    submit, collect = executor.submit, executor.collect

    def encoded(original: Any) -> Any:
        copy = pickle.loads(pickle.dumps(original))
        assert copy == original
        return copy

    executor.submit = lambda plan: submit(encoded(plan))  # type: ignore[method-assign]
    executor.collect = lambda: encoded(collect())  # type: ignore[method-assign]


@given(changes=engine_settings, batches=st.lists(st.lists(requests(), max_size=7), max_size=2))
@FEW
def test_any_requests_on_any_settings_get_the_tokens_of_the_reference(
    tiny: Path, reference: Reference, changes: dict[str, Any], batches: list[list[Asked]]
) -> None:
    """Shared beginnings, chunks, few blocks, depths and every mix of parameters.

    Plans and results go through pickle, as between processes.
    """
    with open_tiny(tiny, max_model_len=120, **changes) as llm:
        encode_everything(llm)
        for batch in batches:
            assert run(llm, batch) == [expected(reference, one) for one in batch]
        assert llm.stats.free_blocks == changes["cache"]["num_blocks"]


@given(
    asked=st.lists(requests(), min_size=2, max_size=5),
    aborts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=3),
    steps_ahead=st.sampled_from([0, 1, 3]),
)
@FEW
def test_streams_that_are_left_at_any_time_change_no_other(
    tiny: Path,
    reference: Reference,
    asked: list[Asked],
    aborts: list[tuple[int, int]],
    steps_ahead: int,
) -> None:
    """Streams taken in turn, some of them closed after a few tokens."""
    leave_after = {place: count for place, count in aborts if place < len(asked)}
    limits: dict[str, Any] = {"max_model_len": 120, "cache": {"num_blocks": 9}}
    with open_tiny(tiny, steps_ahead=steps_ahead, **limits) as llm:
        streams = {i: llm.stream(one.prompt, one.params) for i, one in enumerate(asked)}
        tokens: dict[int, list[int]] = {i: [] for i in streams}
        while streams:
            for i, stream in list(streams.items()):
                output = next(stream)
                tokens[i] += output.new_token_ids
                if output.finished or len(tokens[i]) >= leave_after.get(i, MAX_TOKENS):
                    stream.close()
                    del streams[i]
        for i, one in enumerate(asked):
            right = expected(reference, one)
            assert tokens[i] == right[: len(tokens[i])]
            assert len(tokens[i]) >= min(len(right), leave_after.get(i, MAX_TOKENS))
        assert llm.stats.running == llm.stats.waiting == 0
        assert llm.stats.free_blocks == 9
