"""The answers of an engine: one of the texts, at any depth, and nobody else notices."""

from __future__ import annotations

import pytest

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import ConfigError, ConstraintContext, InvalidSamplingError, NoOptions
from nanovllm_example_constraint_choices.constraint import Choices

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
