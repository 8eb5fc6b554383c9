"""The conformance suite of constraints: random answers, id by id, as an engine asks for masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from nanovllm_core.config import explain_options
from nanovllm_core.errors import ConfigError
from nanovllm_core.interfaces.constraint import Constraint, ConstraintContext, ConstraintSpec
from nanovllm_core.interfaces.plan import mask_words
from nanovllm_core.registry import read_options
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance

NUM_BYTES, END = 256, 256
"""An id for each byte, and the one that ends an answer."""
VOCAB = NUM_BYTES + 1
LENGTH = 64
"""Ids of an answer at most, unless it ends before."""
NUM_ANSWERS = 6
PROMPT = np.array((7, 3, 3, 11), np.int32)


class ConstraintConformance(SpecConformance):
    """Masks depend on the arguments, the prompt and the ids so far, and on nothing else."""

    arguments: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """What requests ask, as in `SamplingParams.constraints`; answer i takes number i, round.

    Give two that differ: whether each request gets what it asked for shows only there.
    """

    @pytest.fixture
    def context(self, tmp_path: Path) -> ConstraintContext:
        """A small engine, with a tokenizer that has an id for every byte."""
        from nanovllm_kit.logits_processor import write_tokenizer  # brings torch

        write_tokenizer(tmp_path)
        return ConstraintContext(
            vocab_size=VOCAB, max_model_len=128, tokenizer=str(tmp_path), eos_token_ids=(END,)
        )

    @pytest.fixture
    def asked(self, plugin: PluginUnderTest) -> list[BaseModel]:
        """The validated arguments of one answer each."""
        assert isinstance(plugin.spec, ConstraintSpec)
        model = plugin.spec.arguments
        try:
            valid = [read_options(model, each) for each in self.arguments]
        except ValidationError as error:
            problem = explain_options(error, model, "arguments", plugin.spec.name)
            if self.arguments is not ConstraintConformance.arguments:
                raise ConfigError(problem) from None
            pytest.skip(
                "state what a request may ask, in `arguments` of the test class or with "
                f"--argument KEY=VALUE: {problem}".replace("\n", "; ")
            )
        return [valid[i % len(valid)] for i in range(NUM_ANSWERS)]

    @pytest.fixture
    def constraint(
        self, plugin: PluginUnderTest, context: ConstraintContext, asked: list[BaseModel]
    ) -> Constraint:
        """Made as the engine makes it; only where there is something to ask of it."""
        made = plugin.load()(plugin.options, context)
        assert isinstance(made, Constraint), f"{type(made).__name__} is no Constraint"
        return made

    def test_arguments_forbid_unknown_keys(self, plugin: PluginUnderTest) -> None:
        """A misspelt key of a request is refused, never ignored."""
        assert isinstance(plugin.spec, ConstraintSpec)
        extra = plugin.spec.arguments.model_config.get("extra")
        assert extra == "forbid", f'the arguments\' model_config has extra={extra!r}, not "forbid"'

    def test_valid_arguments_are_not_refused(
        self, plugin: PluginUnderTest, asked: list[BaseModel]
    ) -> None:
        """`check` returns a list of reasons, here an empty one."""
        assert isinstance(plugin.spec, ConstraintSpec)
        for arguments in asked:
            reasons = plugin.spec.check(arguments, VOCAB)
            assert reasons == [], f"{arguments!r} is refused: {reasons}"

    def test_no_answer_comes_to_a_dead_end(
        self, constraint: Constraint, asked: list[BaseModel], draws: Random
    ) -> None:
        """After every id that was allowed some id is allowed, if only the one that ends."""
        for arguments in asked:
            answer(constraint, arguments, draws)

    def test_an_answer_goes_on_behind_an_end_that_is_ignored(
        self, constraint: Constraint, asked: list[BaseModel], draws: Random
    ) -> None:
        """With `ignore_eos` the id that ends an answer is taken in, and allowed again."""
        for arguments in asked:
            ids, masks = answer(constraint, arguments, draws)
            if len(masks) == len(ids):
                continue  # It did not end.
            state = constraint.start(arguments, PROMPT.copy())
            for token_id in ids:
                constraint.advance(state, token_id)
            for _ in range(3):
                constraint.advance(state, END)
                assert END in ids_of(fill(constraint, state)), (
                    f"behind {ids} and an end-of-sequence id, that id is not allowed again; with "
                    "ignore_eos the answer goes on"
                )

    def test_something_is_forbidden(
        self, constraint: Constraint, asked: list[BaseModel], draws: Random
    ) -> None:
        """Else nothing here shows whether it works."""
        masks = [mask for one in asked for mask in answer(constraint, one, draws)[1]]
        if all(len(ids_of(mask)) == VOCAB for mask in masks):
            pytest.skip(
                "it allowed every id: state `arguments`, or --argument KEY=VALUE, with which it "
                "forbids some"
            )

    def test_filling_again_gives_the_same_mask(
        self, constraint: Constraint, asked: list[BaseModel], draws: Random
    ) -> None:
        """A request that was preempted asks again for a mask that it had."""
        for arguments in asked:
            ids, masks = answer(constraint, arguments, draws, times=3)
            _assert_same(masks, replay(constraint, arguments, ids), "masks filled only once")

    def test_an_answer_has_a_state_of_its_own(
        self, constraint: Constraint, asked: list[BaseModel], draws: Random
    ) -> None:
        """Answers of one engine take turns; each gets the masks that it gets alone."""
        alone = [answer(constraint, arguments, draws) for arguments in asked]
        states = [constraint.start(arguments, PROMPT.copy()) for arguments in asked]
        together: list[list[NDArray[np.int32]]] = [[] for _ in asked]
        for step in range(LENGTH):
            for (ids, masks), state, mine in zip(alone, states, together, strict=True):
                if step < len(masks):
                    mine.append(fill(constraint, state))
                if step < len(ids):
                    constraint.advance(state, ids[step])
        for mine, (_, masks) in zip(together, alone, strict=True):
            _assert_same(mine, masks, "answers that take turns")

    def test_a_mask_follows_from_the_arguments_and_the_ids(
        self,
        plugin: PluginUnderTest,
        constraint: Constraint,
        asked: list[BaseModel],
        context: ConstraintContext,
        draws: Random,
    ) -> None:
        """The same answer again, and in another engine: nothing is remembered."""
        for arguments in asked:
            ids, masks = answer(constraint, arguments, draws)
            _assert_same(replay(constraint, arguments, ids), masks, "the same answer again")
            other = plugin.load()(plugin.options, context)
            _assert_same(replay(other, arguments, ids), masks, "the same answer elsewhere")

    def test_what_it_is_given_is_only_read(
        self, constraint: Constraint, asked: list[BaseModel], draws: Random
    ) -> None:
        """The prompt and earlier masks stay as they are, and the arguments too."""
        for arguments in asked:
            before, prompt = arguments.model_dump(), PROMPT.copy()
            state = constraint.start(arguments, prompt)
            kept = fill(constraint, state)
            copy = kept.copy()
            ids = ids_of(kept)
            if ids != [END]:
                constraint.advance(state, draws.choice([one for one in ids if one != END]))
                fill(constraint, state)
            assert np.array_equal(prompt, PROMPT), "prompt_ids were written"
            assert np.array_equal(kept, copy), "a mask was written after `fill` had returned"
            assert arguments.model_dump() == before, "the arguments were written"


def fill(constraint: Constraint, state: object) -> NDArray[np.int32]:
    """A fresh mask of the next id."""
    mask = np.zeros(mask_words(VOCAB), np.int32)
    returned: object = constraint.fill(state, mask)
    assert returned is None, f"fill returned {type(returned).__name__}, which is ignored"
    return mask


def ids_of(mask: NDArray[np.int32]) -> list[int]:
    """The ids that a mask allows, without bits beyond the vocabulary."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits[:VOCAB]).tolist()
    return ids


def answer(
    constraint: Constraint, arguments: BaseModel, draws: Random, times: int = 1
) -> tuple[list[int], list[NDArray[np.int32]]]:
    """A random answer under its masks, each filled so many times: its ids, and the masks.

    The id that ends it has no mask behind it, and is not among the ids.
    """
    state = constraint.start(arguments, PROMPT.copy())
    ids: list[int] = []
    masks: list[NDArray[np.int32]] = []
    while len(ids) < LENGTH:
        for _ in range(times):
            mask = fill(constraint, state)
        masks.append(mask)
        allowed = ids_of(mask)
        assert allowed, (
            f"no id is allowed after {ids}; an answer that is complete must allow one of "
            "context.eos_token_ids"
        )
        chosen = draws.choice(allowed)
        if chosen == END:
            break
        constraint.advance(state, chosen)
        ids.append(chosen)
    return ids, masks


def replay(
    constraint: Constraint, arguments: BaseModel, ids: Sequence[int]
) -> list[NDArray[np.int32]]:
    """The masks before each of these ids, and the one behind them if there is room."""
    state = constraint.start(arguments, PROMPT.copy())
    masks = []
    for token_id in ids:
        masks.append(fill(constraint, state))
        constraint.advance(state, token_id)
    return masks if len(ids) == LENGTH else [*masks, fill(constraint, state)]


def _assert_same(
    actual: Sequence[NDArray[np.int32]], expected: Sequence[NDArray[np.int32]], what: str
) -> None:
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        differing = {*ids_of(one)} ^ {*ids_of(other)}
        assert not differing, f"{what}: mask {number} differs in the ids {sorted(differing)[:8]}"
