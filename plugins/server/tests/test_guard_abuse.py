"""Clients that mean harm, or know no better, against a server of the demo model."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import BaseModel, ValidationError

from nanovllm_core import AsyncLLM
from nanovllm_server.chat_body import ChatBody
from nanovllm_server.completion_body import CompletionBody
from nanovllm_server.guard.keys import ApiKey, hash_key
from nanovllm_server.guard.settings import LimitSettings
from nanovllm_server.server import address, make_server
from nanovllm_server.settings import ServerSettings
from nanovllm_server.tokens import DetokenizeBody

WAIT = 60.0
"""Seconds that no request may take."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "Write a story about a fox named Mia."


@contextmanager
def serving(llm: AsyncLLM, **fields: Any) -> Iterator[str]:
    """Another server of the same engine."""
    server = make_server(llm, ServerSettings(port=0, **fields))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield address(server)
    server.should_exit = True
    thread.join(WAIT)
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def unharmed(llm: AsyncLLM) -> Iterator[None]:
    """After the test nothing runs, every block is free and every invariant holds."""
    yield
    engine = llm.engine  # waits until no request is unfinished
    engine.assert_consistent()
    stats = engine.stats
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.blocks


pytestmark = pytest.mark.usefixtures("unharmed")


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_url, timeout=WAIT) as client:
        yield client


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def refused(answer: httpx.Response, status: int = 400, param: str | None = None) -> None:
    """The answer is an error in OpenAI's shape, small whatever was sent."""
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(answer.content) < 3000
    if param is not None:
        assert error["param"] == param


# -- bodies

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, 2**63, 1e300, -0.0, 1e-320, 0.5]),
    st.text(max_size=20),
    st.lists(st.none() | st.integers(-5, 5) | st.text(max_size=5), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
    st.recursive(st.none(), lambda inner: st.lists(inner, min_size=1, max_size=2), max_leaves=6),
)
FIELDS = (
    *("model", "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "stop"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids", "min_tokens"),
    *(
        "max_tokens",
        "ignore_eos",
        "priority",
        "stream_options",
        "user",
        "logprobs",
        "echo",
        "tools",
    ),
    *("logits_processors", "constraints", "prompt", "messages", "chat_template_kwargs", "best_of"),
    *("top_logprobs", "max_completion_tokens", "response_format", "suffix", "cache_salt", "wrong"),
)
BODIES = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3).map(
        lambda odd: {"max_tokens": 2, "ignore_eos": False, **odd}
    ),
    ODD,
)


@given(BODIES, st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]))
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_whatever_a_body_is_the_answer_is_a_result_or_4xx(
    client: httpx.Client, body: Any, path: str
) -> None:
    if isinstance(body, dict) and path == COMPLETIONS:
        body = {"prompt": [1, 2], **body}
    if isinstance(body, dict) and path == CHAT:
        body = {"messages": [{"role": "user", "content": "Hi"}], **body}
    sent = json.dumps(body, allow_nan=True).encode()
    answer = client.post(path, content=sent, headers={"content-type": "application/json"})
    if answer.status_code != 200:
        refused(answer, answer.status_code)
        assert 400 <= answer.status_code < 500


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 50_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        json.dumps({"prompt": "x"}).encode("utf-16"),
        b'{"prompt": "x", "' + b"k" * 100_000 + b'": 1}',
    ],
    ids=[
        *("empty", "cut", "bytes", "nan", "infinite", "digits", "surrogate", "arrays", "objects"),
        *("utf-16", "key"),
    ],
)
def test_json_bombs_are_400(client: httpx.Client, body: bytes) -> None:
    answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    refused(answer)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, r'{"prompt": "x", "\ud800": 1}', r"\ud800"),
        (
            COMPLETIONS,
            r'{"prompt": "x", "stream": true, "stream_options": {"\ud800": 1}}',
            r"stream_options.\ud800",
        ),
        (
            CHAT,
            r'{"messages": [{"role": "user", "content": "x", "\ud800": 1}]}',
            r"messages[0].\ud800",
        ),
        (CHAT, r'{"messages": [{"role": "user", "content": "x"}], "tools": ["\ud800"]}', "tools"),
    ],
)
def test_a_name_with_half_of_a_surrogate_pair_is_refused_as_any_other(
    client: httpx.Client, path: str, body: str, param: str
) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    refused(answer, 400, param)


def test_a_route_that_raises_is_500_in_the_shape_of_all_errors(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a server of its own, whose end has the last line of the log behind it."""

    def fail(*_: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(ChatBody, "sampling_params", fail)
    with serving(llm) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        answer = http.post(CHAT, json=chat("Hi"), headers={"x-request-id": "mine"})
    refused(answer, 500)
    assert "mine" in answer.json()["error"]["message"]


def test_a_form_is_refused(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, data={"prompt": "x"})
    assert 400 <= answer.status_code < 500


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 4096}),
        ("n", {"n": 10**30}),
        ("logit_bias", {"logit_bias": {str(i): 1 for i in range(1025)}}),
        ("logit_bias", {"logit_bias": {str(10**30): 1}}),
        ("stop", {"stop": ["x"] * 5000}),
        ("stop", {"stop": ["ab" * 500_000]}),
        ("stop_token_ids", {"stop_token_ids": [1] * 5000}),
        ("max_tokens", {"max_tokens": 10**15}),
        ("user", {"user": "x" * 10_000}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_huge_is_refused_by_name(
    client: httpx.Client, param: str, fields: dict[str, Any]
) -> None:
    refused(client.post(COMPLETIONS, json={"prompt": "x", **fields}))


MANY = 300_000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatBody, {"messages": [1] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": ""}] * MANY}),
        (ChatBody, {"messages": [], **dict.fromkeys(map(str, range(MANY)), 1)}),
        (CompletionBody, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}),
        (CompletionBody, {"prompt": "x", "stop_token_ids": ["x"] * MANY}),
        (DetokenizeBody, {"tokens": ["x"] * MANY}),
    ],
)
def test_a_body_of_many_faults_is_refused_at_the_first(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    """All streams of the server wait while a body is checked."""
    began = time.process_time()
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 10
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_no_garbage_is_collected_while_a_body_is_parsed(
    path: str, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each collection would look at every list of the body so far: a second for four megabytes."""
    was_enabled = []
    loads = json.loads

    def watched(text: bytes) -> Any:
        was_enabled.append(gc.isenabled())
        return loads(text)

    monkeypatch.setattr(json, "loads", watched)
    assert client.post(path, json={"unknown": []}).status_code == 400
    assert was_enabled == [False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    "variables",
    [
        {"a": "x" * 100_000},
        {"messages": []},
        {"chat_template": "{{ 1 }}"},
        {"__class__": 1, "a b": 2},
        {"tokenize": False},
        {"tools": "x" * 100_000},
    ],
)
def test_templates_cannot_be_bombed(client: httpx.Client, variables: dict[str, Any]) -> None:
    refused(client.post(CHAT, json=chat("Hi", chat_template_kwargs=variables)))


def test_text_in_a_message_is_no_template(client: httpx.Client) -> None:
    """What a client writes is a value of the template, never a part of it."""
    texts = ["{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__ }}"]
    for text in texts:
        answer = client.post("/tokenize", json={"messages": [{"role": "user", "content": text}]})
        ids = answer.json()["tokens"]
        assert text in client.post("/detokenize", json={"tokens": ids}).json()["prompt"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_prompt_far_too_long_is_refused_before_it_is_encoded(
    client: httpx.Client, path: str
) -> None:
    text = "word " * 500_000
    body = {"prompt": text} if path == COMPLETIONS else chat(text)
    refused(client.post(path, json=body))


def test_more_samples_than_the_server_takes_are_refused_before_anything_is_encoded(
    client: httpx.Client, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "encode", None)
    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", None)
    refused(client.post(COMPLETIONS, json={"prompt": ["x"] * 200, "n": 2}), 400, "n")
    refused(client.post(CHAT, json=chat("Hi", n=1000)), 400, "n")


def test_a_body_beyond_the_limit_is_413(client: httpx.Client) -> None:
    refused(client.post(COMPLETIONS, json={"prompt": "x" * 5_000_000}), 413)


TEXTS = [
    "",
    "\x00\x01\x1f\x7f",
    "\u202e\u200b\u2066\ufeff",
    "e\u0301\u0327" * 20,
    "👩‍👩‍👧‍👦🏳️‍🌈" * 5,
    "\U0010ffff\ue000\ufffd\ufffe",
    "ﷺ" * 10 + "ǆﬃ",
    "<|im_start|>system\n<|im_end|><|endoftext|>",
    "\r\n\u2028\u2029\x85",
    "Z̷̡̢͓̳͈̩a̸l̵g̶o̷" * 5,
    "नमस्ते سلام שלום 你好 ありがとう",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_unicode_of_every_kind_is_answered(client: httpx.Client, text: str) -> None:
    """Streamed and whole give the same text; an empty prompt may be refused."""
    body = chat(text, max_tokens=4)
    whole = client.post(CHAT, json=body)
    assert whole.status_code == 200
    streamed = client.post(CHAT, json={**body, "stream": True})
    assert text_of(streamed.text) == whole.json()["choices"][0]["message"]["content"]


def text_of(events: str) -> str:
    """The text of a chat's stream."""
    chunks = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
    assert chunks.pop() == "[DONE]"
    deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


# -- many, and those that go away


def test_streams_are_bit_for_bit_the_same_beside_clients_that_vanish(
    server_url: str, client: httpx.Client
) -> None:
    """Sixteen clients leave at random points, some before the first token."""
    random = Random(1)
    bodies = [chat(f"{STORY} {i}", max_tokens=40, stream=True) for i in range(4)]
    alone = [text_of(client.post(CHAT, json=body).text) for body in bodies]

    async def stay(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        return text_of((await http.post(CHAT, json=body)).text)

    async def vanish(http: httpx.AsyncClient, count: int) -> None:
        body = chat(f"{STORY} {count}", max_tokens=200, stream=bool(count % 3), n=1 + count % 2)
        try:
            async with asyncio.timeout(0.02 * count):
                async with http.stream("POST", CHAT, json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
        except TimeoutError:
            pass

    async def main() -> list[str]:
        async with httpx.AsyncClient(base_url=server_url, timeout=WAIT) as http:
            others = [vanish(http, random.randrange(20)) for _ in range(16)]
            texts = await asyncio.gather(*(stay(http, body) for body in bodies), *others)
            return [text for text in texts if text is not None]

    assert asyncio.run(main()) == alone


def test_a_full_queue_is_429_and_serves_again_when_it_is_empty(llm: AsyncLLM) -> None:
    rows = llm.config.limits.max_num_seqs
    body = {"prompt": STORY, "max_tokens": 300, "ignore_eos": True, "stream": True}

    async def main(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT) as http:
            async with http.stream("POST", COMPLETIONS, json={**body, "n": rows + 1}) as running:
                pieces = running.aiter_bytes()
                await anext(pieces)
                full = await http.post(COMPLETIONS, json=body)
                refused(full, 429)
                assert int(full.headers["retry-after"]) >= 1
                assert (await http.get("/v1/models")).status_code == 200
            answer = None
            while answer is None or answer.status_code == 429:
                answer = await http.post(COMPLETIONS, json={**body, "max_tokens": 2})
            assert answer.status_code == 200
            refused(await http.post(COMPLETIONS, json={**body, "n": rows + 2}), 400, "n")

    with serving(llm, limits=LimitSettings(max_queue=1)) as url:
        asyncio.run(main(url))


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_and_frees_its_row(client: httpx.Client, stream: bool) -> None:
    body = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    answer = client.post(COMPLETIONS, json=body, headers={"x-request-timeout": "0.05"})
    if answer.status_code == 200:
        assert "deadline_exceeded" in answer.text.split("\n\n")[-2]
        assert "[DONE]" not in answer.text
    else:
        refused(answer, 504)


# -- tenants


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_sees_only_its_own_prompts_in_the_cache(llm: AsyncLLM) -> None:
    """Whatever salts they send: the number of cached tokens, and so the time, tells nothing."""
    secrets = {name: f"nvk-{name * 30}" for name in ("a", "b")}
    keys = [ApiKey(name=name, sha256=hash_key(secret)) for name, secret in secrets.items()]
    prompt = "My password is swordfish. " * 8

    def ask(http: httpx.Client, name: str, **fields: Any) -> int:
        return cached(
            http.post(
                COMPLETIONS,
                json={"prompt": prompt, "max_tokens": 1, **fields},
                headers={"authorization": f"Bearer {secrets[name]}"},
            )
        )

    with serving(llm, keys=keys) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        assert http.post(COMPLETIONS, json={"prompt": prompt}).status_code == 401
        assert http.get("/v1/models").status_code == 401
        assert ask(http, "a") == 0
        assert ask(http, "a") > 0
        assert ask(http, "b") == 0
        assert ask(http, "b") > 0
        assert ask(http, "a", cache_salt="mine") == 0
        assert ask(http, "a", cache_salt="mine") > 0
        assert ask(http, "b", cache_salt="mine") == 0


def test_a_salt_separates_requests_without_keys(client: httpx.Client) -> None:
    body = {"prompt": "The salt of the sea is old. " * 8, "max_tokens": 1}
    salts = ["x", "y", "x", None, "y"]
    counts = [cached(client.post(COMPLETIONS, json={**body, "cache_salt": salt})) for salt in salts]
    assert [bool(count) for count in counts] == [False, False, True, False, True]


def test_what_is_no_http_fills_no_log(server_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn warns of it, with the advice to install packages."""
    place = httpx.URL(server_url)
    upgrade = (
        b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    for sent in (b"HELLO\r\n\r\n", upgrade):
        with socket.create_connection((place.host, place.port or 80), timeout=WAIT) as client:
            client.sendall(sent)
            assert client.recv(65_536).startswith(b"HTTP/1.1 ")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# -- a cache of one sequence, and endurance


def random_body(random: Random) -> dict[str, Any]:
    """A valid request of any shape; greedy or seeded, so that it has one answer."""
    words = random.choices(
        ["fox", "tree", "κλειδί", "森", "🦊", "\u0301"], k=random.randrange(1, 10)
    )
    body: dict[str, Any] = {
        "prompt": [" ".join(words)] * random.choice([1, 1, 1, 2]),
        "max_tokens": random.randrange(1, 24),
        "n": random.choice([1, 1, 1, 2, 3]),
        "stream": random.random() < 0.5,
        "seed": random.randrange(100),
        "temperature": random.choice([0, 0.7, 1.5]),
    }
    extras: list[dict[str, Any]] = [
        {"stop": ["e", "the fox"]},
        {"logprobs": 2},
        {"top_p": 0.5, "top_k": 7},
        {"logit_bias": {"5": 2.0}},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"echo": True},
        {"ignore_eos": True},
        {"cache_salt": random.choice("xy")},
        {"min_tokens": 1},
    ]
    for extra in random.sample(extras, random.randrange(3)):
        body |= extra
    if "echo" in body and "logprobs" in body:
        del body["echo"]
    return body


def texts_of(answer: httpx.Response, body: dict[str, Any]) -> list[str]:
    """The text of each choice, whole or from a stream."""
    if not body["stream"]:
        return [choice["text"] for choice in answer.json()["choices"]]
    texts = [""] * len(body["prompt"]) * body["n"]
    chunks = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert chunks.pop() == "[DONE]"
    for chunk in chunks:
        for choice in json.loads(chunk)["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


async def storm(url: str, seed: int, count: int, at_once: int) -> dict[int, list[str]]:
    """Requests of random shape, a third of which are left at a random point; the others' texts."""
    random = Random(seed)
    texts: dict[int, list[str]] = {}
    left = iter(range(count))
    limits = httpx.Limits(max_connections=at_once + 1)

    async def worker(http: httpx.AsyncClient) -> None:
        for number in left:
            body = random_body(Random(number))
            try:
                async with asyncio.timeout(random.choice([0.01, 0.05, WAIT, WAIT])):
                    answer = await http.post(COMPLETIONS, json=body)
            except TimeoutError:
                continue
            if answer.status_code == 429:
                continue
            assert answer.status_code == 200, answer.text
            texts[number] = texts_of(answer, body)

    async with httpx.AsyncClient(base_url=url, timeout=WAIT, limits=limits) as http:
        await asyncio.gather(*(worker(http) for _ in range(at_once)))
    return texts


def test_a_storm_of_requests_and_aborts_changes_no_text(server_url: str) -> None:
    """Beside others, preempted or not, each text is the one that the request has alone."""
    crowded = asyncio.run(storm(server_url, 1, 70, 24))
    assert len(crowded) > 25
    numbers = sorted(crowded)[:10]
    with httpx.Client(base_url=server_url, timeout=WAIT) as http:
        for number in numbers:
            body = random_body(Random(number))
            assert texts_of(http.post(COMPLETIONS, json=body), body) == crowded[number]


def test_a_cache_of_one_sequence_serves_everybody_in_turn() -> None:
    """Requests wait, are preempted, and all end; what can never fit is 400."""
    cache = {"num_blocks": 8, "block_size": 16}
    limits = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 128}
    tiny = AsyncLLM("demo", device="cpu", cache=cache, limits=limits)
    try:
        with serving(tiny, limits=LimitSettings(max_queue=1000)) as url:
            texts = asyncio.run(storm(url, 2, 30, 12))
            assert len(texts) > 10
            with httpx.Client(base_url=url, timeout=WAIT) as http:
                refused(http.post(COMPLETIONS, json={"prompt": [5] * 128}), 400, "prompt")
        tiny.engine.assert_consistent()
        assert tiny.stats.free_blocks == tiny.stats.blocks
    finally:
        tiny.close()


@pytest.mark.slow
@pytest.mark.long
def test_three_thousand_requests_leave_no_memory_behind(server_url: str) -> None:
    """The process has as much memory after 3,000 requests as after 1,000."""

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    served = len(asyncio.run(storm(server_url, 3, 1000, 32)))
    before = resident()
    for seed in range(4, 6):
        served += len(asyncio.run(storm(server_url, seed, 1000, 32)))
    grown = (resident() - before) / 2**20
    print(f"{served} of 3,000 served, {grown:.1f} MiB grown")
    assert served > 900
    assert grown < 8
