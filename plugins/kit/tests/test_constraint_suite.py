"""The suite of constraints catches those whose masks depend on what they must not."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from nanovllm_core.errors import ConfigError
from nanovllm_core.interfaces.constraint import (
    Constraint,
    ConstraintContext,
    ConstraintSpec,
    allow_ids,
)
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_kit import ConstraintConformance, PluginUnderTest
from nanovllm_kit.constraint import END

SUITE = ConstraintConformance()


class Size(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 3


class Right(Constraint):
    """An answer of `size` ids, each near the one before; to be spoilt."""

    def start(self, arguments: Any, prompt_ids: NDArray[np.int32]) -> Any:
        return [arguments.size, int(prompt_ids[-1])]

    def advance(self, state: Any, token_id: int) -> None:
        state.append(token_id)

    def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
        size, *ids = state
        over = len(ids) > size
        allow_ids(
            mask, self.context.eos_token_ids if over else [(ids[-1] + i) % 256 for i in range(9)]
        )


class DeadEnd(Right):
    """Has nothing to say at its end."""

    def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
        if len(state) <= state[0] + 1:
            super().fill(state, mask)


class EndsOnce(Right):
    """Counts down past the end of its answer, as `left -= 1` does."""

    def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
        if END not in state[:-1]:
            super().fill(state, mask)
        if state[-1] == END:
            mask[:] = 0
            allow_ids(mask, [5])


class CountsFills(Right):
    """Goes on with each mask, not with each id."""

    def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
        super().fill(state, mask)
        state[0] -= 1


class OneState(Right):
    """Keeps the newest answer only."""

    kept: ClassVar[list[Any]] = []

    def start(self, arguments: Any, prompt_ids: NDArray[np.int32]) -> Any:
        self.kept[:] = super().start(arguments, prompt_ids)
        return self.kept


class Remembers(Right):
    """Counts its answers."""

    answers = 0

    def start(self, arguments: Any, prompt_ids: NDArray[np.int32]) -> Any:
        self.answers += 1
        return [arguments.size, int(prompt_ids[-1]) + self.answers]


class Elsewhere(Right):
    """Depends on the object that it is."""

    def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
        super().fill(state, mask)
        allow_ids(mask, [MADE.index(self)])

    def __init__(self, options: BaseModel, context: ConstraintContext) -> None:
        super().__init__(options, context)
        MADE.append(self)


MADE: list[Constraint] = []


class KeepsMasks(Right):
    """Writes to a mask that it gave out."""

    last: NDArray[np.int32] | None = None

    def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
        if self.last is not None:
            self.last |= 1
        super().fill(state, mask)
        self.last = mask


class Scribbles(Right):
    """Writes to the prompt."""

    def start(self, arguments: Any, prompt_ids: NDArray[np.int32]) -> Any:
        state = super().start(arguments, prompt_ids)
        prompt_ids[0] = 0
        return state


class Takes(Right):
    """Writes to the arguments."""

    def start(self, arguments: Any, prompt_ids: NDArray[np.int32]) -> Any:
        state = super().start(arguments, prompt_ids)
        arguments.size += 1
        return state


class Returns(Right):
    """Makes a mask of its own."""

    def fill(self, state: Any, mask: NDArray[np.int32]) -> Any:
        mine = mask.copy()
        super().fill(state, mine)
        return mine


class Free(Right):
    """Forbids nothing."""

    def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
        mask[:] = -1


def under_test(constraint: type[Constraint], **changes: Any) -> PluginUnderTest:
    spec = ConstraintSpec(
        name="x", impl=f"{__name__}:{constraint.__name__}", contract=1, arguments=Size, **changes
    )
    return PluginUnderTest(spec, NoOptions(), __name__)


def check(constraint: type[Constraint], name: str, folder: Path) -> None:
    """Run one check of the suite on answers of two sizes."""
    suite: Any = ConstraintConformance
    context = suite.context.__wrapped__(SUITE, folder)
    plugin = under_test(constraint)
    asked = [Size(size=3), Size(size=70)] * 2
    given = {
        "plugin": plugin, "context": context, "asked": asked, "draws": Random(0),
        "constraint": plugin.load()(plugin.options, context),
    }  # fmt: skip
    method = getattr(suite, name)
    wanted = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    method(SUITE, **{key: given[key] for key in wanted})


@pytest.mark.parametrize(
    ("constraint", "name", "said"),
    [
        (DeadEnd, "test_no_answer_comes_to_a_dead_end", "no id is allowed after .*eos_token"),
        (Returns, "test_no_answer_comes_to_a_dead_end", "fill returned ndarray, which is ignored"),
        (EndsOnce, "test_an_answer_goes_on_behind_an_end_that_is_ignored", "is not allowed again"),
        (CountsFills, "test_filling_again_gives_the_same_mask", "masks filled only once: mask"),
        (OneState, "test_an_answer_has_a_state_of_its_own", "answers that take turns: mask"),
        (Remembers, "test_a_mask_follows_from_the_arguments_and_the_ids", "again: mask 0 differs"),
        (Elsewhere, "test_a_mask_follows_from_the_arguments_and_the_ids", "answer elsewhere: mask"),
        (KeepsMasks, "test_what_it_is_given_is_only_read", "a mask was written after"),
        (Scribbles, "test_what_it_is_given_is_only_read", "prompt_ids were written"),
        (Takes, "test_what_it_is_given_is_only_read", "the arguments were written"),
    ],
)
def test_planted_bugs_are_caught(
    constraint: type[Constraint], name: str, said: str, tmp_path: Path
) -> None:
    """Each by the check that states the rule; the right one passes it."""
    MADE.clear()
    with pytest.raises(AssertionError, match=said):
        check(constraint, name, tmp_path)
    check(Right, name, tmp_path)


def test_a_constraint_that_forbids_nothing_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="it allowed every id: state `arguments`"):
        check(Free, "test_something_is_forbidden", tmp_path)
    check(Right, "test_something_is_forbidden", tmp_path)


def test_specs_that_refuse_or_ignore_what_a_request_asks_are_caught() -> None:
    class Loose(BaseModel):
        pass

    refuses = under_test(Right, check=lambda asked, size: ["never"])
    with pytest.raises(AssertionError, match=r"Size\(size=3\) is refused: \['never'\]"):
        SUITE.test_valid_arguments_are_not_refused(refuses, [Size()])
    loose = ConstraintSpec(name="x", impl="a:B", contract=1, arguments=Loose)
    with pytest.raises(AssertionError, match='extra=None, not "forbid"'):
        SUITE.test_arguments_forbid_unknown_keys(PluginUnderTest(loose, NoOptions(), __name__))
    SUITE.test_arguments_forbid_unknown_keys(under_test(Right))
    SUITE.test_valid_arguments_are_not_refused(under_test(Right), [Size()])


def test_what_a_request_must_state_is_asked_for() -> None:
    """Skipped where the author stated nothing, an error where it is wrong."""

    class Needs(BaseModel):
        model_config = ConfigDict(extra="forbid")
        text: str

    class Suite(ConstraintConformance):
        arguments: ClassVar[Any] = ({"txt": "a"},)

    spec = ConstraintSpec(name="x", impl="a:B", contract=1, arguments=Needs)
    plugin = PluginUnderTest(spec, NoOptions(), __name__)
    asked: Any = ConstraintConformance.asked
    with pytest.raises(pytest.skip.Exception, match=r"--argument KEY=VALUE: arguments\.text"):
        asked.__wrapped__(SUITE, plugin)
    with pytest.raises(ConfigError, match=r"arguments\.txt"):
        asked.__wrapped__(Suite(), plugin)
