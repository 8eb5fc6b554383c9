"""Bugs planted in an engine client: the suite catches each by the check that names the matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from nanovllm_core.config import load_config
from nanovllm_core.frontend import (
    AddRequests,
    Deliver,
    EndAt,
    GetStats,
    Message,
    NewRequest,
    OutputDelta,
    ResetPrefixCache,
    ThreadClient,
)
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_kit import engine_client
from nanovllm_kit.enabled import enabled_plugins
from nanovllm_kit.engine_client import (
    SETTINGS,
    Answers,
    answers_of,
    check_abort,
    check_answers,
    check_end_at,
    check_refusals,
    check_reset,
)
from nanovllm_kit.model_settings import save_served


class Planted(ThreadClient):
    """A client of which a bug replaces one method."""

    def request(self, new: NewRequest) -> NewRequest:
        """What the engine gets of a request."""
        return new

    def delta(self, delta: OutputDelta) -> OutputDelta:
        """What the caller gets of a delta."""
        return delta

    def message(self, message: Message) -> Message | None:
        """What the engine gets of a message; None where it gets nothing."""
        return message

    def post(self, message: Message) -> None:
        if isinstance(message, AddRequests):
            message = replace(message, requests=tuple(map(self.request, message.requests)))
        if (sent := self.message(message)) is not None:
            super().post(sent)

    def subscribe(self, deliver: Deliver) -> int:
        def hand_on(answer: Any) -> None:
            deliver([*map(self.delta, answer)] if isinstance(answer, list) else answer)

        return super().subscribe(hand_on)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    """One engine for all tests."""
    folder = tmp_path_factory.mktemp("served")
    if not save_served(folder):
        pytest.skip("needs a model plugin that serves a model like Llama")
    config = load_config(str(folder), overrides=SETTINGS)
    client = Planted(NoOptions(), config, "engine", enabled_plugins())
    client.start()
    yield client
    client.close()


@pytest.fixture(scope="module")
def expected(started: Planted) -> Answers:
    """The answers of a client without a bug."""
    return answers_of(started)


Plant = Callable[[str, Callable[[Any], Any]], Planted]


@pytest.fixture
def plant(started: Planted, expected: Answers, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Replaces a method of the client, whose cache has no prefixes."""
    started.reset_prefix_cache()

    def replaced(method: str, bug: Callable[[Any], Any]) -> Planted:
        monkeypatch.setattr(started, method, bug)
        return started

    return replaced


def test_a_client_without_a_bug_passes(started: Planted, expected: Answers) -> None:
    """Its engine has had other requests before."""
    started.reset_prefix_cache()
    check_answers(started, expected)
    check_refusals(started)
    check_end_at(started)
    check_abort(started)
    check_reset(started)


def test_the_requests_have_the_answers_that_they_are_made_for(expected: Answers) -> None:
    """A sample that ends at a stop id is short, and a prefix is cached for its own salt alone."""
    [stopped] = expected["with stop ids"]
    assert stopped.stop_reason == stopped.new_token_ids[-1]
    assert 1 < len(stopped.new_token_ids) < 8
    salted = [expected[f"with {which} cache salt"] for which in ("a", "the same", "another")]
    assert [sample.num_cached_tokens for [sample] in salted] == [0, 16, 0]
    [logged] = expected["with log-probabilities"]
    assert [len(one.top) for one in logged.new_logprobs or ()] == [2] * 8


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({"output_token_ids": ()}, "with outputs of another engine: new_token_ids is"),
        ({"cache_salt": b""}, "with a cache salt: num_cached_tokens is 16, of a thread 0"),
        ({"logprobs": None}, "with log-probabilities: its log-probabilities"),
        ({"stop_token_ids": ()}, "with stop ids: new_token_ids is"),
    ],
    ids=str,
)
def test_a_field_that_the_engine_does_not_get_is_caught(
    lost: dict[str, Any], said: str, plant: Plant, expected: Answers
) -> None:
    def lose(new: NewRequest) -> NewRequest:
        if hasattr(new, *lost):
            return replace(new, **lost)
        return replace(new, params=replace(new.params, **lost))

    with pytest.raises(AssertionError, match=said):
        check_answers(plant("request", lose), expected)


@pytest.mark.parametrize(
    ("constant", "said"),
    [
        ({"finish_reason": "length"}, "with stop ids: finish_reason is 'length'"),
        ({"stop_reason": None}, "with stop ids: stop_reason is None"),
        ({"num_cached_tokens": 0}, "num_cached_tokens is 0, of a thread 16"),
        ({"wait_steps": None}, "wait_steps is None at its end"),
        ({"new_logprobs": None}, "with log-probabilities: its log-probabilities"),
    ],
    ids=str,
)
def test_a_field_that_the_caller_does_not_get_is_caught(
    constant: dict[str, Any], said: str, plant: Plant, expected: Answers
) -> None:
    """In its place comes the commonest value."""

    def lose(delta: OutputDelta) -> OutputDelta:
        if "finish_reason" in constant and delta.finish_reason is None:
            return delta  # The sample goes on.
        return replace(delta, **constant)

    with pytest.raises(AssertionError, match=said):
        check_answers(plant("delta", lose), expected)


def test_labels_that_the_engine_does_not_get_are_caught(plant: Plant) -> None:
    """Wrong ones are not refused."""
    client = plant("request", lambda new: replace(new, labels=None))
    with pytest.raises(pytest.fail.Exception, match="InvalidLabelsError"):
        check_refusals(client)


def test_stop_strings_that_end_nothing_are_caught(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "ATTEMPTS", 2)
    client = plant("message", lambda one: None if isinstance(one, EndAt) else one)
    with pytest.raises(AssertionError, match=r"none of 2 samples: the last has 60 ids"):
        check_end_at(client)


def test_a_reset_that_resets_nothing_is_caught(plant: Plant) -> None:
    """The counters come in answer."""

    def count(message: Message) -> Message:
        return GetStats(message.subscriber) if isinstance(message, ResetPrefixCache) else message

    with pytest.raises(AssertionError, match="16 ids are still cached"):
        check_reset(plant("message", count))
