"""The answers of an engine: one of the texts, at any depth, and nobody else notices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import (
    ConfigError,
    ConstraintContext,
    InvalidSamplingError,
    NoOptions,
    allows,
)
from nanovllm_example_constraint_choices.constraint import Choices
from nanovllm_example_constraint_choices.plugin import ChoicesArguments

QUESTION = [{"role": "user", "content": "What is 27 + 15?"}]
TEXTS = ["forty-two", "43", "forty", "I do not know."]


def answers(steps_ahead: int) -> list[tuple[str, str | None]]:
    """Greedy and sampled, with a choice and without, in one batch; text and reason of each."""
    asked = {"choices": {"texts": TEXTS}}
    params = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=20, constraints=asked),
        *(
            SamplingParams(temperature=50.0, seed=i, max_tokens=20, constraints=asked)
            for i in range(4)
        ),
        SamplingParams(temperature=1.0, seed=1, max_tokens=20),
        SamplingParams(temperature=0, n=2, constraints={"choices": {"texts": ["no"]}}),
    ]
    with LLM(
        "demo", device="cpu", attention="sdpa", max_num_seqs=4, max_model_len=128,
        constraints=["choices"], steps_ahead=steps_ahead,
    ) as llm:  # fmt: skip
        outputs = llm.chat([QUESTION] * len(params), params, use_tqdm=False)
    return [(output.text, output.finish_reason) for output in outputs]


def test_answers_are_among_the_choices_at_any_depth_and_the_free_ones_are_free() -> None:
    given = answers(steps_ahead=1)
    assert given == answers(steps_ahead=0)
    (plain, _), *chosen = given
    free = chosen.pop(5)[0]
    assert "42" in plain
    assert free not in TEXTS
    assert {text for text, _ in chosen[:5]} <= set(TEXTS)
    assert len({text for text, _ in chosen[1:5]}) > 1, "it is sampled"
    assert [text for text, _ in chosen[5:]] == ["no", "no"]
    assert {reason for _, reason in chosen} == {"stop"}


def test_texts_are_those_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    """Also of a tokenizer that drops the space at the beginning of a text."""
    ids = {"<unk>": 0, "</s>": 1, "▁forty": 2, "▁two": 3, "two": 4, "forty": 5, "▁": 6, "a": 7}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    context = ConstraintContext(
        vocab_size=8, max_model_len=9, tokenizer=str(tmp_path), eos_token_ids=(1,)
    )
    choices = Choices(NoOptions(), context)
    given = {}
    for text in ("fortytwo", "forty two"):
        state = choices.start(ChoicesArguments(texts=(text,)), np.zeros(1, np.int32))
        mask = np.zeros(1, np.int32)
        choices.fill(state, mask)
        choices.advance(state, 5)
        choices.fill(state, mask)
        given[text] = [token_id for token_id in range(8) if allows(mask, token_id)]
    assert given == {"fortytwo": [4, 5], "forty two": [3, 5, 6]}


def test_a_choice_goes_on_with_its_end_where_that_is_ignored() -> None:
    """Up to the length that the request states."""
    with LLM("demo", device="cpu", attention="sdpa", constraints=["choices"]) as llm:
        params = SamplingParams(
            max_tokens=12, ignore_eos=True, constraints={"choices": {"texts": ["yes"]}}
        )
        [output] = llm.generate(["a"], params, use_tqdm=False)
    assert (output.text, output.finish_reason) == ("yes", "length")


def test_a_wrong_request_is_refused_and_a_model_without_texts_too() -> None:
    with LLM("demo", device="cpu", attention="sdpa", constraints=["choices"]) as llm:
        for wrong in ({"texts": []}, {"texts": [""]}, {"text": ["a"]}):
            with pytest.raises(InvalidSamplingError, match="choices"):
                llm.generate("a", SamplingParams(constraints={"choices": wrong}), use_tqdm=False)
    context = ConstraintContext(
        vocab_size=9, max_model_len=9, tokenizer="/no/tokenizer", eos_token_ids=()
    )  # fmt: skip
    with pytest.raises(ConfigError, match="the tokenizer in '/no/tokenizer' cannot be loaded"):
        Choices(NoOptions(), context)
