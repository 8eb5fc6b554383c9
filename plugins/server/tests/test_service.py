"""What the routes share: which work is refused unread, and which leaves the event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm_server.errors import ApiError
from nanovllm_server.service import LONG_TEXT, Service
from nanovllm_server.settings import ServerSettings

LENGTH = 1000
"""Of the model, in tokens."""


class Tokenizer:
    """A token for each word; it notes what it did, and on which thread."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, bool]] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.done.append((text, self._is_main()))
        return [1] * len(text.split())

    def decode(self, token_ids: list[int]) -> str:
        self.done.append((token_ids, self._is_main()))
        return "x" * len(token_ids)

    @staticmethod
    def _is_main() -> bool:
        return threading.current_thread() is threading.main_thread()

    @property
    def was_on_the_loop(self) -> set[bool]:
        return {is_main for _, is_main in self.done}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.fixture
def service(tokenizer: Tokenizer) -> Service:
    config = SimpleNamespace(
        model="m", limits=SimpleNamespace(max_num_seqs=4), data_parallel_size=1
    )
    llm: Any = SimpleNamespace(
        config=config, tokenizer=tokenizer, info=SimpleNamespace(max_model_len=LENGTH)
    )
    return Service(llm, ServerSettings())


def test_many_prompts_that_are_long_together_leave_the_event_loop(
    service: Service, tokenizer: Tokenizer
) -> None:
    """Each alone is short, and hundreds in a row would stop every stream for seconds."""
    texts = ["word " * 900] * (LONG_TEXT // 4500 + 1)
    assert len(asyncio.run(service.encode_prompts(texts))) == len(texts)
    assert tokenizer.was_on_the_loop == {False}
    tokenizer.done.clear()
    assert asyncio.run(service.encode_prompts(["a b", [5], "c"])) == [[1, 1], [5], [1]]
    assert tokenizer.was_on_the_loop == {True}


def test_many_prompts_of_ids_that_are_echoed_leave_the_event_loop(
    service: Service, tokenizer: Tokenizer
) -> None:
    prompts: list[str | list[int]] = [[1] * 900] * (LONG_TEXT // 900 + 1)
    assert asyncio.run(service.texts_of(["a", *prompts]))[:2] == ["a", "x" * 900]
    assert tokenizer.was_on_the_loop == {False}
    tokenizer.done.clear()
    assert asyncio.run(service.texts_of([[1, 2], "a"])) == ["xx", "a"]
    assert tokenizer.was_on_the_loop == {True}


def test_ids_beyond_the_length_of_the_model_are_refused_before_any_text_is_encoded(
    service: Service, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ApiError, match=rf"1000 tokens.*max_model_len is {LENGTH}") as refused:
        asyncio.run(service.encode_prompts(["a", [1] * LENGTH]))
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert refused.value.code == "context_length_exceeded"
    assert tokenizer.done == []
    assert asyncio.run(service.encode_prompts([[1] * (LENGTH - 1)])) == [[1] * (LENGTH - 1)]


def test_the_first_prompt_that_is_too_long_is_the_last_that_is_encoded(
    service: Service, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ApiError, match="1200 tokens"):
        asyncio.run(service.encode_prompts(["a", "b " * 1200, *["c " * 900] * 20]))
    assert len(tokenizer.done) == 2
