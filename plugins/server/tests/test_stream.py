"""The ASGI answers alone: errors after the first event, slow clients, clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm_core import AsyncLLM, SamplingParams
from nanovllm_core.errors import (
    EngineClosedError,
    EngineError,
    InvalidPromptError,
    InvalidSamplingError,
    PluginFailedError,
)
from nanovllm_server import stream as stream_module
from nanovllm_server.bodies import StreamOptions
from nanovllm_server.chat import ChatShape
from nanovllm_server.chat_body import ChatBody
from nanovllm_server.completion_body import CompletionBody
from nanovllm_server.completions import CompletionShape
from nanovllm_server.errors import ApiError
from nanovllm_server.guard.admission import Admission
from nanovllm_server.service import Service
from nanovllm_server.settings import ServerSettings
from nanovllm_server.stream import Answer, Choice, EventStream, Shape, Work, answer

Sent = list[dict[str, Any]]
SECRET = "the prompt of a stranger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing(Work):
    """Gives some outputs, and fails."""

    error: Exception
    num_outputs: int

    async def outputs(self) -> AsyncGenerator[list[Choice], None]:
        async for output in self.llm.generate(self.prompts[0], self.params):
            if output.num_token_ids > self.num_outputs:
                raise self.error
            yield [(0, output)]


def make_answer(llm: AsyncLLM, stream: bool, work: type[Work] = Work, **more: Any) -> Answer:
    body = CompletionBody(prompt="a", stream=stream)
    shape = CompletionShape(Service(llm, ServerSettings()), "demo", body, [])
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    asked = work(
        llm=llm,
        prompts=[[5, 6, 7]],
        params=params,
        labels={},
        cache_salt=b"",
        admission=Admission(16, 256),
        stream=stream,
        prompt_field="prompt",
        **more,
    )
    made = answer(asked, shape, None)
    assert isinstance(made, Answer)
    return made


def call(
    response: Answer,
    send: Callable[[Mapping[str, Any]], Awaitable[None]],
    left: Callable[[], bool] = lambda: False,
) -> None:
    """Run an answer for a client that leaves when `left` says so."""

    async def receive() -> dict[str, Any]:
        while not left():
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def main() -> None:
        await asyncio.wait_for(response({"type": "http"}, receive, send), 30)

    asyncio.run(main())


def collect(response: Answer) -> Sent:
    sent: Sent = []

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(dict(message))

    call(response, send)
    return sent


def events_of(sent: Sent) -> list[Any]:
    text = b"".join(message.get("body", b"") for message in sent).decode()
    return [
        json.loads(line.removeprefix("data: "))
        for line in text.split("\n\n")
        if line and line != "data: [DONE]"
    ]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineClosedError("closed"), 503, "engine_ended"),
        (PluginFailedError("its own reason"), 500, "internal_error"),
        (KeyError(SECRET), 500, "internal_error"),
        (InvalidPromptError("empty"), 400, None),
        (InvalidSamplingError("constraints: no id is left"), 400, None),
        (ApiError(504, "too late", code="deadline"), 504, "deadline"),
    ],
)
def test_an_error_has_its_status_or_ends_the_stream_as_an_event(
    error: Exception,
    status: int,
    code: str | None,
    llm: AsyncLLM,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before the first event it is an answer; after it, an event that the clients raise."""
    caplog.set_level(logging.DEBUG)
    for stream, after in ((False, 0), (True, 0), (True, 3)):
        response = make_answer(llm, stream, Failing, error=error, num_outputs=after)
        sent = collect(response)
        assert sent[0]["status"] == (200 if after else status)
        assert sum(message["type"] == "http.response.start" for message in sent) == 1
        # Another server, or the engine that follows, may answer soon.
        again = (b"retry-after", b"1") in sent[0]["headers"]
        assert again == (code == "engine_ended" and not after)
        assert not sent[-1].get("more_body", False)
        *texts, last = events_of(sent)
        assert len(texts) <= after
        assert last["error"]["code"] == code
        assert b"[DONE]" not in sent[-1]["body"]
    assert SECRET not in caplog.text


class Ending:
    """An engine that answers the prompt [1], and gives a token of every other and then an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def generate(
        self, prompt: list[int], _: SamplingParams, **__: Any
    ) -> AsyncGenerator[Any, None]:
        yield SimpleNamespace(index=0, finished=prompt == [1])
        if prompt != [1]:
            raise self._error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (EngineError("engine 0 ended with signal SIGKILL"), 2),
        (RuntimeError("the device is gone"), 2),
        (EngineClosedError("it had ended before"), 0),
        (InvalidPromptError("empty"), 0),
    ],
)
def test_choices_that_end_with_the_engine_are_counted_once_each(
    error: Exception, lost: int, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine counts them. What was refused had not begun, and what ended before was counted."""
    monkeypatch.setattr(Work, "check_prompts", lambda _: None)
    counted: list[int] = []
    given = make_answer(llm, stream=True).work
    engine: Any = Ending(error)
    for prompts in ([[2], [1], [2]], [[2]]):
        work = replace(given, llm=engine, prompts=prompts, count_lost=counted.append)
        with pytest.raises(type(error)):
            record(work)
    assert counted == ([lost, 1] if lost else [])


def test_a_choice_that_ran_on_too_many_engines_which_ended_is_counted(llm: AsyncLLM) -> None:
    """Its last engine is gone with its record; one that its constraint ended has a record."""
    for error, lost in ((EngineError("it had run on 2 engines"), [1]), (PluginFailedError(""), [])):
        counted: list[int] = []
        output: Any = SimpleNamespace(finish_reason="error", error=error)
        response = make_answer(llm, True, Given, steps=[[(0, output)]])
        response.work = replace(response.work, count_lost=counted.append)
        assert events_of(collect(response))[-1]["error"]["code"] == "internal_error"
        assert counted == lost


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_sent_is_no_silence(stream: bool, llm: AsyncLLM) -> None:
    """The access log tells it, and answers with 500."""

    async def send(_: Mapping[str, Any]) -> None:
        raise ValueError("no header like this")

    with pytest.raises(ValueError, match="no header"):
        call(make_answer(llm, stream), send)
    llm.engine.assert_consistent()


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_slow_client_gets_fewer_and_larger_events(prompts: int, llm: AsyncLLM) -> None:
    """What comes in the steps for which `send` waits is joined; the text is the same."""
    sizes, texts = [], []
    for steps in (0, 8):
        sent: Sent = []

        async def send(message: Mapping[str, Any], steps: int = steps, to: Sent = sent) -> None:
            to.append(dict(message))
            until = llm.stats.steps + steps
            while llm.stats.steps < until and llm.stats.running:
                await asyncio.sleep(0.001)

        response = make_answer(llm, stream=True)
        work = replace(response.work, prompts=[[5, 6, 7]] * prompts)
        call(EventStream(work, response.shape, StreamOptions()), send)
        choices = [event["choices"][0] for event in events_of(sent)]
        sizes.append(len(choices))
        texts.append(
            ["".join(c["text"] for c in choices if c["index"] == i) for i in range(prompts)]
        )
    assert texts[0] == texts[1]
    assert sizes[1] < sizes[0] / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(Work):
    """Gives outputs that were recorded."""

    steps: Sequence[list[Choice]]

    async def outputs(self) -> AsyncGenerator[list[Choice], None]:
        for choices in self.steps:
            yield choices


def record(work: Work) -> list[list[Choice]]:
    async def main() -> list[list[Choice]]:
        return [choices async for choices in work.outputs()]

    return asyncio.run(main())


def joined(steps: Sequence[list[Choice]]) -> list[list[Choice]]:
    """All tokens of all choices at once, as to a client that was slow."""
    last = sorted(dict(one for choices in steps for one in choices).items())
    return [[(i, replace(one, new_token_ids=one.token_ids, new_text=one.text)) for i, one in last]]


def make_shape(llm: AsyncLLM, is_chat: bool) -> Shape:
    """Of a stream with two likeliest tokens beside each."""
    service = Service(llm, ServerSettings())
    if not is_chat:
        body = CompletionBody(prompt="a", stream=True, logprobs=2)
        return CompletionShape(service, "demo", body, [])
    asked = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    chat = ChatBody.model_validate({**asked, "logprobs": True, "top_logprobs": 2})
    return ChatShape(service, "demo", chat)


def logprobs_of(choices: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Those of each token in some events, and where it begins if the events say it."""
    found: list[tuple[Any, ...]] = []
    for one in choices:
        if listed := one["logprobs"]:
            names = ["content"] if "content" in listed else [*listed]
            found += zip(*(listed[name] for name in names), strict=True)
    return found


def text_of(choice: Mapping[str, Any]) -> str:
    text: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "num_parts"), [(1, 100, 10), (40, 2, 8), (3, 30, 9)]
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_joined_log_probabilities_come_in_parts_between_which_others_go_on(
    prompts: int,
    max_tokens: int,
    num_parts: int,
    is_chat: bool,
    llm: AsyncLLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together they are those of single tokens; text comes first, and the reason of the end last.

    Encoded at once, those of 40,000 tokens with 20 alternatives stop the event loop for 6 s.
    """
    monkeypatch.setattr(stream_module, "MAX_LOGPROBS_AT_ONCE", 30)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    given = make_answer(llm, True, Given, steps=[]).work
    assert isinstance(given, Given)
    given = replace(given, prompts=[[5, 6, 7 + i] for i in range(prompts)], params=params)
    steps = record(Work(**{one.name: getattr(given, one.name) for one in fields(Work)}))
    seen = []
    for each in (steps, joined(steps)):
        shape, sent, turns = make_shape(llm, is_chat), [], []

        async def send(message: Mapping[str, Any], to: Sent = sent, at: list[int] = turns) -> None:
            to.append(dict(message))
            asyncio.get_running_loop().call_soon(lambda: at.append(len(to)))

        call(EventStream(replace(given, steps=each), shape, StreamOptions()), send)
        choices = [event["choices"][0] for event in events_of(sent)]
        own = [[one for one in choices if one["index"] == i] for i in range(prompts)]
        seen.append([("".join(map(text_of, one)), logprobs_of(one)) for one in own])
        for some in own:
            assert len(logprobs_of(some)) == max_tokens
            assert all(len(logprobs_of([one])) <= 10 for one in some)
            assert [one["finish_reason"] for one in some[:-1]] == [None] * (len(some) - 1)
            assert some[-1]["finish_reason"] == "length"
    assert seen[0] == seen[1]
    bodies = [place for place, one in enumerate(sent, 1) if one.get("more_body")]
    assert len(bodies) == num_parts
    assert set(bodies[:-1]) <= set(turns), "between two parts no other had a turn"


@pytest.mark.parametrize(("prompts", "n"), [(1, 3), (3, 1), (2, 2)])
def test_what_a_step_gives_to_all_choices_goes_out_together(
    prompts: int, n: int, llm: AsyncLLM
) -> None:
    """One `send` for each step, and not for each choice."""
    response = make_answer(llm, stream=True)
    params = SamplingParams(temperature=1, seed=1, n=n, max_tokens=40, ignore_eos=True)
    work = replace(response.work, prompts=[[5, 6, 7]] * prompts, params=params)
    sent = collect(EventStream(work, response.shape, StreamOptions()))
    choices = [event["choices"][0]["index"] for event in events_of(sent)]
    assert set(choices) == set(range(prompts * n))
    assert len(choices) > 60
    assert len(sent) < 50


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_bytes_of_an_answer_go_out_when_its_places_are_free(
    stream: bool, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has read all of it, and asks another front at once, finds them free."""
    monkeypatch.setattr(stream_module, "MOST_AT_LAST", 8)
    response = make_answer(llm, stream)
    taken: list[int] = []
    sent: Sent = []

    async def send(message: Mapping[str, Any]) -> None:
        taken.append(response.work.admission.taken)
        sent.append(dict(message))

    call(response, send)
    assert taken == [*[1] * (len(sent) - 1), 0]
    assert [message.get("more_body", False) for message in sent[1:]] == [
        *[True] * (len(sent) - 2),
        False,
    ]
    if not stream:
        assert len(sent[-1]["body"]) == 8
    body = b"".join(message.get("body", b"") for message in sent)
    if stream:
        assert body.endswith(stream_module.DONE)
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request_at_once(stream: bool, llm: AsyncLLM) -> None:
    """Also one that reads nothing: `send` waits for it then."""
    steps = llm.stats.steps

    async def send(_: Mapping[str, Any]) -> None:
        await asyncio.Event().wait()

    begun = llm.stats.steps
    call(make_answer(llm, stream), send, left=lambda: llm.stats.steps > begun + 5)
    llm.engine.assert_consistent()
    assert llm.stats.steps - steps < 150


@pytest.mark.parametrize(
    ("wrong", "code"),
    [([10**6], None), ([], None), ([8] * 1900, "context_length_exceeded")],
    ids=["no id of the vocabulary", "empty", "no room for max_tokens"],
)
def test_a_prompt_that_can_never_run_is_refused_before_any_other_of_its_call_runs(
    wrong: list[int], code: str | None, llm: AsyncLLM
) -> None:
    """The status is 400, however fast the others are, and the engine takes no step."""
    response = make_answer(llm, stream=True)
    work = replace(response.work, prompts=[*[[5, 6]] * 8, wrong])
    llm.engine.assert_consistent()
    steps = llm.stats.steps
    sent = collect(EventStream(work, response.shape, StreamOptions()))
    assert sent[0]["status"] == 400
    error = events_of(sent)[-1]["error"]
    assert (error["param"], error["code"]) == ("prompt", code)
    llm.engine.assert_consistent()
    assert llm.stats.steps == steps


def test_errors_of_the_work_of_one_prompt_end_the_others(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with one prompt that ends with an error leaves nothing running."""
    response = make_answer(llm, stream=True)
    work = replace(response.work, prompts=[[5, 6], [10**6], [7]])
    monkeypatch.setattr(Work, "check_prompts", lambda _: None)
    steps = llm.stats.steps
    sent = collect(EventStream(work, response.shape, StreamOptions()))
    assert events_of(sent)[-1]["error"]["param"] == "prompt"
    llm.engine.assert_consistent()
    assert llm.stats.steps - steps < 150
