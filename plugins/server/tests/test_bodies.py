"""Parameters: each of OpenAI's is supported or refused by name; the description has their types."""

from __future__ import annotations

import json
import typing
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from nanovllm_core import AsyncLLM, SamplingParams
from nanovllm_core.api import EngineConfig
from nanovllm_server.app import make_app
from nanovllm_server.bodies import Sampling, typed_for
from nanovllm_server.chat_body import ChatBody, ChatMessage
from nanovllm_server.completion_body import CompletionBody
from nanovllm_server.settings import ServerSettings

OPENAI: dict[type[Sampling], Any] = {
    CompletionBody: completion_create_params.CompletionCreateParamsStreaming,
    ChatBody: chat_create_params.CompletionCreateParamsStreaming,
}
PATHS = {CompletionBody: "/v1/completions", ChatBody: "/v1/chat/completions"}
LEAST: dict[type[Sampling], dict[str, Any]] = {
    CompletionBody: {"prompt": "a", "max_tokens": 1},
    ChatBody: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}


@pytest.mark.parametrize("body", OPENAI)
def test_every_field_of_openai_is_supported_or_refused_by_name(body: type[Sampling]) -> None:
    """Where this fails, the package `openai` has a new field: support it, or name it in NEUTRAL."""
    theirs = set(typing.get_type_hints(OPENAI[body]))
    assert len(theirs) > 15
    assert theirs - body.model_fields.keys() - body.NEUTRAL.keys() == set()
    assert body.NEUTRAL.keys() - theirs == set()
    assert body.NEUTRAL.keys() & body.model_fields.keys() == set()


@pytest.mark.parametrize("body", OPENAI)
def test_every_sampling_parameter_of_the_engine_can_be_asked_for(body: type[Sampling]) -> None:
    assert set(SamplingParams.__dataclass_fields__) <= set(body.model_fields)


@pytest.mark.parametrize("body", OPENAI)
def test_an_unsupported_field_is_refused_unless_it_asks_nothing(
    body: type[Sampling], server_url: str
) -> None:
    with httpx.Client(base_url=server_url) as http:
        for name in body.NEUTRAL:
            answer = http.post(PATHS[body], json={**LEAST[body], name: {"some": "thing"}})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name)
            assert name in error["message"]
        neutral = {name: [*values, None][0] for name, values in body.NEUTRAL.items()}
        assert http.post(PATHS[body], json={**LEAST[body], **neutral}).status_code == 200
        answer = http.post(PATHS[body], json={**LEAST[body], "temprature": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "temprature"


def test_a_refused_value_is_told_with_its_limit(server_url: str) -> None:
    """And what JSON calls it; a body that is no text says where."""
    expected = {
        "temperature": (-0.1, "temperature: -0.1 must be at least 0.0"),
        "max_tokens": (2**63, f"max_tokens: {2**63} must be at most {2**63 - 1}"),
        "logit_bias": ([1], "logit_bias: [1] must be a JSON object"),
        "min_tokens": (
            100_000,
            "1 prompt tokens and min_tokens=100000 make 100001; max_model_len is 2048, so use "
            "min_tokens of at most 2047",
        ),
        "stream": ("yes", "stream: 'yes' must be true or false; write true"),
        "user": ("ab" * 200, "must be text of at most 256 characters"),
    }
    with httpx.Client(base_url=server_url) as http:
        for name, (value, message) in expected.items():
            answer = http.post("/v1/completions", json={"prompt": "a", name: value})
            assert answer.json()["error"]["message"].endswith(message)
        is_json = {"content-type": "application/json"}
        content = b'{"prompt": "\xff"}'
        answer = http.post("/v1/completions", content=content, headers=is_json)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == (
            "the body is not UTF-8: byte 0xff at position 12; send JSON, encoded as UTF-8"
        )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"min_tokens": 10**6, "max_tokens": None}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logits_processors": {"none": {}}}, "logits_processors"),
    ({"logits_processors": 3}, "logits_processors"),
    ({"constraints": {"none": {}}}, "constraints"),
    ({"logits_processors": {"\ud800": {}}}, "logits_processors"),
    ({"constraints": {"\ud800": {}}}, "constraints"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"stream": 1}, "stream"),
    ({"user": 5}, "user"),
    ({"user": "\ud800"}, "user"),
    ({"model": "other"}, "model"),
]
ONLY: dict[type[Sampling], list[tuple[dict[str, Any], str]]] = {
    CompletionBody: [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "word " * 3000}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
    ],
    ChatBody: [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 2}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", OPENAI)
def test_a_wrong_value_is_400_with_the_parameters_name(
    body: type[Sampling], stream: bool, server_url: str
) -> None:
    with httpx.Client(base_url=server_url) as http:
        for given, param in REFUSED + ONLY[body]:
            # ASCII, as a lone surrogate has no UTF-8.
            content = json.dumps({**LEAST[body], "stream": stream, **given}).encode()
            headers = {"content-type": "application/json"}
            answer = http.post(PATHS[body], content=content, headers=headers)
            assert answer.status_code == (404 if "model" in given else 400), (given, answer.text)
            assert answer.json()["error"]["param"] == param, (given, answer.text)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[1]", "application/json"),
        (b'{"prompt": "a"}', "text/plain"),
        (b"\xff", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}", "application/json"),
    ],
)
def test_a_body_that_is_no_json_object_is_400(content: bytes, kind: str, server_url: str) -> None:
    answer = httpx.post(
        f"{server_url}/v1/completions", content=content, headers={"content-type": kind}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_template_that_refuses_is_400(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(llm.tokenizer, "_templates", {"default": template})
    answer = TestClient(make_app(llm, ServerSettings())).post(
        "/v1/chat/completions", json=LEAST[ChatBody]
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert "roles must alternate" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("value", "status"), [(False, 200), (None, 200), (0, 400), (True, 400)])
def test_a_field_that_is_not_supported_takes_its_neutral_value_alone(
    llm: AsyncLLM, value: object, status: int
) -> None:
    """Python holds 0 for False."""
    body = {**LEAST[ChatBody], "max_tokens": 1, "store": value}
    answer = TestClient(make_app(llm, ServerSettings())).post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text


def test_developer_is_the_system(server_url: str) -> None:
    def tokens(role: str) -> Any:
        messages = [{"role": role, "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        answer = httpx.post(f"{server_url}/tokenize", json={"messages": messages})
        return answer.json()["tokens"]

    assert tokens("developer") == tokens("system")


def test_tokenize_and_detokenize_are_inverse(server_url: str) -> None:
    text = "Né in 東京, 🦊\n"
    with httpx.Client(base_url=server_url) as http:
        found = http.post("/tokenize", json={"prompt": text}).json()
        assert found["count"] == len(found["tokens"])
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
        answer = http.post("/detokenize", json={"tokens": [10**6]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


def test_the_description_has_the_types_of_the_engines_own_processors() -> None:
    """Their arguments are typed in the schema; the engine checks the values."""
    config = EngineConfig(model="demo", logits_processors=("banned_words",))
    typed = typed_for(CompletionBody, config)
    schema = typed.model_json_schema()
    [named] = [one for one in schema["$defs"] if one.endswith("logits_processors")]
    [name] = schema["$defs"][named]["properties"]
    assert name == "banned_words"
    [arguments] = [one for one in schema["$defs"] if "rgument" in one or "Banned" in one]
    assert schema["$defs"][arguments]["properties"]
    given = {"banned_words": {"anything": 1}}
    assert (
        typed.model_validate({"prompt": "a", "logits_processors": given}).logits_processors == given
    )


def test_every_parameter_of_the_description_says_what_it_is() -> None:
    for body in (CompletionBody, ChatBody, ChatMessage):
        for name, field in body.model_fields.items():
            assert field.description, f"{body.__name__}.{name}"


LONG_NUMBER = "the body is not valid JSON: a number has more than 4300 digits; send fewer"


def test_an_error_says_what_to_do_instead(server_url: str) -> None:
    """A name that is nearly right, JSON that breaks off, a number that is too long, a path or a
    method that is not there. A path with a slash at its end is another one, without a redirect."""
    requests: list[tuple[str, str, bytes, int, str]] = [
        ("POST", "completions", b'{"prompt": "a", "max_token": 1}', 400, "mean max_tokens?"),
        ("POST", "chat/completions", b'{"messages": [}', 400, "(at character 14)"),
        ("POST", "completions", b'{"seed": ' + b"9" * 5000 + b"}", 400, LONG_NUMBER),
        ("POST", "embeddings", b"{}", 404, "POST /v1/embeddings; GET /openapi.json lists"),
        ("POST", "completions/", b"{}", 404, "POST /v1/completions/; GET /openapi.json lists"),
        ("DELETE", "models", b"", 405, "DELETE /v1/models; use GET"),
    ]
    with httpx.Client(base_url=server_url) as http:
        for method, path, content, status, expected in requests:
            headers = {"content-type": "application/json"}
            answer = http.request(method, f"/v1/{path}", content=content, headers=headers)
            assert answer.status_code == status
            assert expected in answer.json()["error"]["message"]
