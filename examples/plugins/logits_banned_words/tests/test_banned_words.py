"""What is forbidden, to whom, and when: against plain Python, and in the answers of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import (
    ConfigError,
    InvalidSamplingError,
    LogitsContext,
    LogitsRequest,
)
from nanovllm_example_logits_banned_words.plugin import (
    BannedWordsArguments,
    BannedWordsOptions,
    check,
)
from nanovllm_example_logits_banned_words.processor import BannedWords

VOCAB_SIZE = 11
CONTEXT = LogitsContext(
    device=torch.device("cpu"),
    vocab_size=VOCAB_SIZE,
    max_model_len=16,
    max_num_seqs=4,
    tokenizer="/no/tokenizer",
)
ids = st.integers(0, VOCAB_SIZE - 1)
rows = st.tuples(
    st.lists(ids, min_size=1, max_size=12),
    st.lists(ids, max_size=3).map(tuple),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
)


def forbidden_by_definition(known: list[int], sequences: tuple[tuple[int, ...], ...]) -> set[int]:
    return {s[-1] for s in sequences if tuple(known[len(known) - len(s) + 1 :]) == s[:-1]}


@given(batch=st.lists(rows, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_exactly_what_would_complete_a_banned_sequence_is_forbidden(
    batch: list[tuple[list[int], tuple[int, ...], tuple[tuple[int, ...], ...]]],
) -> None:
    """Rows of different lengths and arguments; ids behind the known ones count for nothing."""
    processor = BannedWords(BannedWordsOptions(), CONTEXT)
    requests = []
    for known, banned_ids, sequences in batch:
        arguments = BannedWordsArguments(ids=banned_ids, sequences=sequences)
        stale = [i % 3 for i in range(16 - len(known))]
        requests.append(
            LogitsRequest(
                arguments=arguments,
                state=processor.prepare(arguments),
                token_ids=torch.tensor(known + stale, dtype=torch.int32),
                num_prompt=torch.tensor(1, dtype=torch.int32),
                num_known=torch.tensor(len(known), dtype=torch.int32),
            )
        )
    before = torch.randn(len(batch), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    after = before.clone()
    processor.process(after, requests)
    for row, (request, (known, _, _)) in enumerate(zip(requests, batch, strict=True)):
        assert isinstance(request.arguments, BannedWordsArguments)
        forbidden = forbidden_by_definition(known, request.arguments.banned)
        for token_id in range(VOCAB_SIZE):
            wanted = -math.inf if token_id in forbidden else before[row, token_id].item()
            assert after[row, token_id].item() == wanted


def test_a_long_sequence_beside_many_short_ones_takes_room_for_itself_alone() -> None:
    """Tables of all sequences at the length of the longest would have a million entries."""
    num = 1000
    arguments = BannedWordsArguments(sequences=(*[(1,)] * num, (2,) * num))
    state = BannedWords(BannedWordsOptions(), CONTEXT).prepare(arguments)
    tables = [getattr(state, one.name) for one in fields(state)]
    assert sum(table.numel() for table in tables) < 6 * num


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ids": [4, VOCAB_SIZE]}, "id 11 is outside the vocabulary of 11"),
        ({"sequences": [[40, 1]]}, "id 40 is outside"),
        ({"ids": list(range(6))}, "6 ids may be forbidden at a time, and the limit is 5 of 11"),
        ({"ids": [1], "sequences": [[2] * 11]}, "12 ids, and the limit is 11; send fewer"),
    ],
)
def test_what_a_request_cannot_have_is_refused(arguments: dict[str, Any], said: str) -> None:
    [reason] = check(BannedWordsArguments.model_validate(arguments), VOCAB_SIZE)
    assert said in reason
    assert check(BannedWordsArguments(ids=(1, 2), sequences=((3, 2),)), VOCAB_SIZE) == []


def test_words_need_a_tokenizer_and_must_leave_something_to_say() -> None:
    """At the start of an engine, not with the first request."""
    with pytest.raises(ConfigError, match="1 words, but the tokenizer in '/no/tokenizer'"):
        BannedWords(BannedWordsOptions(words=("fox",)), CONTEXT)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The embedded model; two words are kept from every request that asks."""
    processors = [{"name": "banned_words", "options": {"words": ["fox", "Mia"]}}]
    with LLM(
        "demo",
        device="cpu",
        attention="sdpa",
        max_num_seqs=4,
        max_model_len=256,
        num_kvcache_blocks=64,
        logits_processors=processors,
    ) as engine:
        yield engine


QUESTION = "Write a story about a fox named Mia, the forest and a key."


def answer(llm: LLM, *asked: dict[str, Any] | None) -> list[str]:
    """The answers to one question, all in one batch, each with its own arguments."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=60,
            logits_processors={} if one is None else {"banned_words": one},
        )
        for one in asked
    ]
    conversations = [[{"role": "user", "content": QUESTION}]] * len(asked)
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return [output.text for output in outputs]


def test_the_owners_words_are_kept_from_who_asks_and_from_nobody_else(llm: LLM) -> None:
    plain, kept, alone = answer(llm, None, {}, None)
    assert "fox" in plain.lower()
    assert "Mia" in plain
    assert "fox" not in kept
    assert "Mia" not in kept
    assert alone == plain


def test_a_request_bans_ids_and_sequences_of_its_own(llm: LLM) -> None:
    """Here the second token of the plain answer, and then its second and third in a row."""
    plain = llm.chat(
        [{"role": "user", "content": QUESTION}],
        SamplingParams(temperature=0, max_tokens=20),
        use_tqdm=False,
    )[0].token_ids
    second, pair = plain[1], plain[1:3]
    for banned in ({"ids": [second]}, {"sequences": [pair]}):
        params = SamplingParams(
            temperature=0, max_tokens=20, logits_processors={"banned_words": banned}
        )
        [output] = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
        assert output.token_ids[0] == plain[0]
        if "ids" in banned:
            assert second not in output.token_ids
        else:
            assert output.token_ids[1] == second
            assert pair not in [output.token_ids[i : i + 2] for i in range(19)]


def test_a_wrong_request_is_refused_and_the_engine_goes_on(llm: LLM) -> None:
    for wrong in ({"ids": [10**9]}, {"idz": [1]}, {"ids": [-1]}):
        with pytest.raises(InvalidSamplingError, match="banned_words"):
            answer(llm, wrong)
    assert answer(llm, None)


def test_words_that_forbid_almost_every_id_are_refused(llm: LLM) -> None:
    """Together with what a request may ask, one id is always left."""
    folder = Path(llm.tokenizer.folder)
    context = LogitsContext(
        device=torch.device("cpu"), vocab_size=5, max_model_len=16, max_num_seqs=4,
        tokenizer=str(folder),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="forbid more than 2 of the 5 ids"):
        BannedWords(BannedWordsOptions(words=("fox", "key", "forest")), context)
