"""`/v1/completions` and `/v1/chat/completions`, driven by OpenAI's own clients."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ConfigDict

from nanovllm_core import AsyncLLM
from nanovllm_server import logprobs
from nanovllm_server.guard import prompts
from nanovllm_server.logprobs import TokenTexts

STORY = "Once upon a time there was a fox named Mia."
QUESTION = [{"role": "user", "content": "What is 27 + 15?"}]


@pytest.fixture(scope="session")
def client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_url, timeout=60) as http:
        yield http


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which ends with [DONE]."""
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def strictly(model: type[BaseModel], value: Any) -> None:
    """Every field of `value` is one of the model's and has its type, and none is missing."""
    checked = model.model_validate(value)
    assert extras(checked) == []


def extras(value: Any, path: str = "") -> list[str]:
    """Paths of fields that a model does not know."""
    if isinstance(value, list):
        return [one for index, item in enumerate(value) for one in extras(item, f"{path}[{index}]")]
    if not isinstance(value, BaseModel):
        return []
    unknown = [f"{path}.{name}" for name in value.model_extra or ()]
    return unknown + [
        one
        for name in type(value).model_fields
        for one in extras(getattr(value, name), f"{path}.{name}")
    ]


# -- the shapes of answers


def test_a_field_that_openai_does_not_have_is_found() -> None:
    class Known(BaseModel):
        model_config = ConfigDict(extra="allow")
        inner: list[Any] = []

    assert extras(Known(inner=[Known(odd=1)])) == [".inner[0].odd"]  # type: ignore[call-arg]


@pytest.mark.parametrize("more", [{}, {"logprobs": 2, "n": 2}, {"echo": True}])
def test_a_completion_is_what_openai_says(http: httpx.Client, more: dict[str, Any]) -> None:
    body = {"model": "demo", "prompt": [STORY, "The"], "max_tokens": 5, "temperature": 0}
    value = http.post("/v1/completions", json={**body, **more}).json()
    strictly(Completion, value)
    assert [choice["index"] for choice in value["choices"]] == [*range(2 * more.get("n", 1))]


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 3, "n": 2}])
def test_a_chat_answer_is_what_openai_says(http: httpx.Client, more: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "max_tokens": 8, "temperature": 0, **more}
    strictly(ChatCompletion, http.post("/v1/chat/completions", json=body).json())
    for event in events(http, "/v1/chat/completions", body):
        strictly(ChatCompletionChunk, event)


def test_an_event_of_a_completion_is_what_openai_says(http: httpx.Client) -> None:
    """But for the reason, which OpenAI's type forgets may be null before the last event."""
    body = {
        "prompt": STORY,
        "max_tokens": 5,
        "logprobs": 1,
        "stream_options": {"include_usage": True},
    }
    for event in events(http, "/v1/completions", body):
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strictly(Completion, event)


# -- OpenAI's clients


def test_the_client_gets_an_answer_and_its_stream(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == "42"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = [*client.chat.completions.create(**options, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "42"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="demo",
            messages=QUESTION,
            tools=[{"type": "function", "function": {"name": "f"}}],  # type: ignore[arg-type, list-item]
        )
    assert refused.value.param == "tools"
    assert refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"


def test_langchain_invokes_and_streams(server_url: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{server_url}/v1", api_key="none", model="demo", temperature=0, max_retries=0
    )
    answer = chat.invoke("What is 27 + 15?")
    assert answer.content == "42"
    assert answer.usage_metadata["output_tokens"] == 3
    assert "".join(chunk.content for chunk in chat.stream("What is 27 + 15?")) == "42"


# -- what requests ask


def test_prompts_as_text_and_as_ids_get_the_same_answers(http: httpx.Client) -> None:
    ids = [
        http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in (STORY, "The")
    ]
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "echo": True}
    answers = [
        [
            choice["text"]
            for choice in http.post("/v1/completions", json={"prompt": prompt, **asked}).json()[
                "choices"
            ]
        ]
        for prompt in ([STORY, "The"], ids, [STORY, ids[1]], STORY, ids[0])
    ]
    both, one = answers[0], answers[3]
    assert both[0].startswith(STORY)
    assert answers == [both, both, both, one, one]
    assert one == both[:1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"logits_processors": {str(i): {} for i in range(9000)}, "prompt": ["a"] * 16},
            "logits_processors",
        ),
        ({"prompt": ["The", "A"], "echo": True, "n": 3}, "echo"),
    ],
    ids=["arguments for each prompt", "echoes for each choice"],
)
def test_a_small_request_cannot_become_a_large_one(
    body: dict[str, Any], param: str, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the engine, or other requests, notice it."""
    monkeypatch.setattr(prompts, "MAX_ECHOED_CHARACTERS", 11)
    body |= {"max_tokens": 1}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert error["param"] == param, error
    assert "send at most" in error["message"] or "the limit is" in error["message"]


def test_log_probabilities_of_a_whole_answer_are_encoded_beside_the_event_loop(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a long one take seconds, in which all other streams would wait."""
    encode, loops = logprobs.for_completion, []

    def noted(*arguments: Any) -> dict[str, Any]:
        with suppress(RuntimeError):
            loops.append(asyncio.get_running_loop())
        return encode(*arguments)

    monkeypatch.setattr(logprobs, "for_completion", noted)
    body = {"prompt": "a", "logprobs": 2, "max_tokens": 3}
    answer = http.post("/v1/completions", json=body).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3
    assert loops == []


@pytest.mark.parametrize(
    ("path", "few", "many"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 4, "max_tokens": 5}, {"n": 3}),
        ("/v1/completions", {"prompt": "a", "logprobs": 4}, {"n": 2}),
        (
            "/v1/chat/completions",
            {"messages": QUESTION, "logprobs": True, "top_logprobs": 9, "max_tokens": 10},
            {"max_tokens": 11},
        ),
        ("/v1/chat/completions", {"messages": QUESTION}, {"logprobs": True}),
    ],
    ids=["choices", "tokens of a completion", "tokens", "tokens up to the model's length"],
)
def test_very_many_log_probabilities_come_in_a_stream_alone(
    path: str,
    few: dict[str, Any],
    many: dict[str, Any],
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole answer holds all of them at once."""
    monkeypatch.setattr(prompts, "MAX_WHOLE_LOGPROBS", 100)
    assert http.post(path, json=few).status_code == 200
    refusal = http.post(path, json=few | many)
    assert refusal.status_code == 400
    error = refusal.json()["error"]
    assert error["param"] == "logprobs"
    assert "the limit is 100; stream it" in error["message"]
    assert http.post(path, json=few | many | {"stream": True}).status_code == 200


def test_a_completion_has_16_tokens_if_nothing_is_said(http: httpx.Client) -> None:
    value = http.post("/v1/completions", json={"prompt": STORY, "ignore_eos": True}).json()
    assert value["usage"]["completion_tokens"] == 16


def test_max_completion_tokens_is_max_tokens(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "ignore_eos": True}
    for name in ("max_tokens", "max_completion_tokens"):
        value = http.post("/v1/chat/completions", json={**body, name: 5}).json()
        assert value["usage"]["completion_tokens"] == 5
        assert value["choices"][0]["finish_reason"] == "length"


def test_parts_of_text_are_joined(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What is 27 "}, {"type": "text", "text": "+ 15?"}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    value = http.post("/v1/chat/completions", json=body).json()
    assert value["choices"][0]["message"]["content"] == "42"


def test_cached_tokens_are_reported(http: httpx.Client) -> None:
    body = {"prompt": "A long prompt, which is sent again. " * 4, "max_tokens": 1}
    used = [http.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in used]
    assert cached[0] < cached[1] <= used[1]["prompt_tokens"]


def test_logprobs_are_those_of_the_tokens(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["4", "2", "<|im_end|>"]
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in content)
    streamed = events(http, "/v1/chat/completions", body)
    found = [event["choices"][0]["logprobs"] for event in streamed]
    entries = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    assert [entry["token"] for entry in entries] == ["4", "2", "<|im_end|>"]


def test_a_tokens_bytes_join_to_the_text(http: httpx.Client) -> None:
    """Also where a character has several tokens: é and 東 are parts for this vocabulary."""
    ids = http.post("/tokenize", json={"prompt": "né 東"}).json()["tokens"]
    bias = {str(token_id): 100 for token_id in ids}
    body = {"messages": QUESTION, "max_tokens": 12, "logit_bias": bias, "logprobs": True, "seed": 1}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert raw.decode(errors="replace") == choice["message"]["content"]


def test_an_offset_is_where_a_tokens_text_begins(llm: AsyncLLM) -> None:
    """Parts of a character begin with it, also where none completes it; ends have no text."""
    encode, texts = llm.tokenizer.encode, TokenTexts(llm.tokenizer)
    [first, second, third] = encode("東")
    [letter] = encode("a")
    [end] = encode("<|im_end|>")
    for ids, wanted in (
        ([letter, end, letter, end], [0, 1, 1, 2]),
        ([letter, first, second, third, letter], [0, 1, 1, 1, 2]),
        ([first, second, third] * 2, [0, 0, 0, 1, 1, 1]),
        ([first, letter, second, letter], [0, 1, 2, 3]),
        ([first, first, first, letter], [0, 1, 2, 3]),
        ([first, first, second, third, letter], [0, 1, 1, 1, 2]),
        ([third, third, end, letter], [0, 1, 2, 2]),
    ):
        assert texts.offsets().take(ids) == wanted
        streamed = texts.offsets()
        assert [one for token_id in ids for one in streamed.take([token_id])] == wanted


def test_an_offset_is_one_into_the_text_of_its_choice(http: httpx.Client) -> None:
    """Where characters have several tokens, and in a stream too."""
    ids = http.post("/tokenize", json={"prompt": "né 東"}).json()["tokens"]
    body = {"prompt": STORY, "max_tokens": 30, "n": 3, "logprobs": 1, "seed": 1, "temperature": 1}
    body |= {"logit_bias": {str(token_id): 20 for token_id in ids}, "frequency_penalty": 2}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in events(http, "/v1/completions", body):
        [choice] = event["choices"]
        streamed[choice["index"]] += (choice["logprobs"] or {}).get("text_offset", [])
    for choice in choices:
        text, logprobs = choice["text"], choice["logprobs"]
        assert len(text) < sum(map(len, logprobs["tokens"])), "characters have several tokens"
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith(("\ufffd", "<|")):
                assert text[offset:].startswith(token)
        assert streamed[choice["index"]] == logprobs["text_offset"]


# -- a stream is the whole answer


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_the_stream_joins_to_the_whole_answer(http: httpx.Client, endpoint: str) -> None:
    """With characters of several tokens, stop strings, several samples, and log-probabilities."""
    chat = endpoint.endswith("chat/completions")
    ids = http.post("/tokenize", json={"prompt": "né 東 🦊"}).json()["tokens"]
    unicode_bias = {str(token_id): 12 for token_id in ids}
    cases: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 3, "n": 3},
        {"temperature": 1, "seed": 4, "n": 2, "stop": ["the", ". "]},
        {"temperature": 1, "seed": 5, "n": 2, "logit_bias": unicode_bias},
        {"temperature": 0, "stop": ["ver", "e"], "min_tokens": 9},
        {"temperature": 1, "seed": 6, "stop": "zzz", "logprobs": True if chat else 0},
    ]
    for case in cases:
        body = {"max_tokens": 40, **({"messages": QUESTION} if chat else {"prompt": STORY}), **case}
        whole = http.post(endpoint, json=body).json()
        wanted = {
            choice["index"]: (
                choice["message"]["content"] if chat else choice["text"],
                choice["finish_reason"],
            )
            for choice in whole["choices"]
        }
        streamed = dict.fromkeys(wanted, ("", None))
        for event in events(http, endpoint, body):
            [choice] = event["choices"]
            before, reason = streamed[choice["index"]]
            assert reason is None
            new = choice["delta"].get("content", "") if chat else choice["text"]
            streamed[choice["index"]] = before + new, choice["finish_reason"]
        assert streamed == wanted, case


def test_a_stream_ends_with_its_usage_where_it_was_asked_for(http: httpx.Client) -> None:
    body = {"prompt": [STORY, "The"], "n": 2, "max_tokens": 4, "ignore_eos": True}
    found = events(http, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert all(event["usage"] is None for event in found[:-1])
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 16
    whole = http.post("/v1/completions", json=body).json()["usage"]
    assert found[-1]["usage"]["prompt_tokens"] == whole["prompt_tokens"]


@pytest.mark.parametrize("include_usage", [False, True])
def test_every_event_has_the_usage_so_far_where_it_was_asked_for(
    http: httpx.Client, include_usage: bool
) -> None:
    """vLLM's name; guidellm and other tools that measure send it."""
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    body: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "stream_options": options}
    for path, asked, total in (
        ("/v1/completions", {"prompt": [STORY, "The"], "n": 2}, 24),
        ("/v1/chat/completions", {"messages": QUESTION}, 6),
    ):
        found = events(http, path, {**body, **asked})
        counts = [event["usage"]["completion_tokens"] for event in found]
        assert counts == sorted(counts)
        assert counts[-1] == total
        assert 0 < counts[0] < total
        assert len({event["usage"]["prompt_tokens"] for event in found}) == 1
        assert [not event["choices"] for event in found].count(True) == include_usage


def test_64_streams_at_once_have_the_texts_that_each_has_alone(
    server_url: str, http: httpx.Client
) -> None:
    """Bit for bit, greedy; the engine has 16 rows, so most of them wait."""
    bodies = [
        {
            "prompt": f"{STORY} {index} " * (1 + index % 3),
            "max_tokens": 3 + index % 3,
            "temperature": 0,
        }
        for index in range(64)
    ]
    alone = [
        http.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies
    ]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none") as client:

            async def follow(body: Any) -> str:
                stream = await client.completions.create(model="demo", stream=True, **body)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(follow, bodies))

    assert asyncio.run(together()) == alone


# -- the end of a request


def wait_until_idle(llm: AsyncLLM) -> None:
    """Returns when no request of the server is unfinished; the engine checks its books."""
    llm.engine.assert_consistent()


def test_a_client_that_leaves_ends_its_requests(server_url: str, llm: AsyncLLM) -> None:
    """A stream, a batch of streams, and an answer that was not streamed."""
    long: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    for body in (
        {"prompt": STORY, "stream": True},
        {"prompt": [STORY, "The", "A"], "n": 2, "stream": True},
    ):
        with (
            httpx.Client(base_url=server_url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json={**long, **body}) as answer,
        ):
            next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server_url) as http:
        http.post("/v1/completions", json={**long, "prompt": STORY}, timeout=0.2)
    steps = llm.stats.steps
    wait_until_idle(llm)
    assert llm.stats.steps - steps < 500, "the requests went on to their ends"


def test_a_client_that_closes_its_sending_side_has_left(server_url: str, llm: AsyncLLM) -> None:
    """Half of a connection is none: the request is aborted, and the server closes its half."""
    body = {"prompt": STORY, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    url = httpx.URL(server_url)
    with socket.create_connection((url.host, url.port or 80), timeout=60) as client:
        client.sendall(head.encode() + content)
        assert client.recv(65_536).startswith(b"HTTP/1.1 200")
        client.shutdown(socket.SHUT_WR)
        steps = llm.stats.steps
        while client.recv(65_536):
            pass
    wait_until_idle(llm)
    assert llm.stats.steps - steps < 500, "the request went on to its end"
