"""The constraint keeps the contract of constraints, and its own promise."""

from __future__ import annotations

import numpy as np
import pytest
from nanovllm_core.api import ConstraintContext, allows, mask_words
from nanovllm_kit import ConstraintConformance, PluginUnderTest, plugin_under_test

from nanovllm_constraint_my_plugin import constraint as code
from nanovllm_constraint_my_plugin import plugin as declared

TEXTS = ["", "1", "22", "1a", "a"]
END = 5


class TestMyPlugin(ConstraintConformance):
    # What answers ask for, in turns: two sets that differ, so that one cannot get another's.
    arguments = ({"characters": "01", "length": 3}, {"characters": "abc"})

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(declared.SPEC)


def allowed_after(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids that may follow these in an answer of at most three digits."""
    monkeypatch.setattr(code, "token_texts", lambda context: TEXTS)
    context = ConstraintContext(vocab_size=6, max_model_len=8, tokenizer="", eos_token_ids=(END,))
    constraint = code.MyPluginConstraint(declared.EngineOptions(), context)
    arguments = declared.RequestArguments(length=3)
    state = constraint.start(arguments, np.array([1], np.int32))
    for token_id in ids:
        constraint.advance(state, token_id)
    mask = np.zeros(mask_words(6), np.int32)
    constraint.fill(state, mask)
    return [token_id for token_id in range(6) if allows(mask, token_id)]


def test_an_answer_has_digits_alone_and_at_most_three(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allowed_after([], monkeypatch) == [1, 2], "it must not be empty"
    assert allowed_after([1], monkeypatch) == [1, 2, END]
    assert allowed_after([2], monkeypatch) == [1, END], "one character is left"
    assert allowed_after([2, 1], monkeypatch) == [END]
