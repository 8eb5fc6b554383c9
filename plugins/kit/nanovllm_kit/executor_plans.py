"""Plans and masks for executors, and their outcomes as plain data."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pytest

from nanovllm_core.interfaces.constraint import allow_ids
from nanovllm_core.interfaces.executor import Executor
from nanovllm_core.interfaces.plan import (
    Admission,
    PrefillChunk,
    RowSampling,
    StepPlan,
    StepResult,
    TokenMasks,
    WorkerInfo,
    mask_words,
)
from nanovllm_kit.model_settings import LLAMA_LIKE
from nanovllm_kit.plans import decode_plan

PROMPTS = ((9, 8, 7, 6, 5), (3, 3, 1))
NUM_DECODES = 5

Data = TypeVar("Data", StepPlan, StepResult, TokenMasks, WorkerInfo)


def copied(original: Data) -> Data:
    """What another process would receive: equal, and another object."""
    copy: Data = pickle.loads(pickle.dumps(original))
    return copy


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step gave.

    `logprobs` by entry and id: those of the most likely ids, and of the sampled one under `None`.
    """

    token_ids: tuple[int, ...]
    finished: tuple[bool, ...]
    logprobs: Mapping[tuple[int, int | None], float]


def outcome_of(result: StepResult) -> Outcome:
    """The same as plain data; it must be data, of the types that `StepResult` states."""
    assert isinstance(result.logprobs, Mapping), f"logprobs is {result.logprobs!r}, not a mapping"
    dtypes = result.token_ids.dtype, result.finished.dtype
    assert dtypes == (np.dtype(np.int32), np.dtype(np.bool_)), (
        f"token ids and finish flags have the dtypes {dtypes}"
    )
    assert copied(result) == result, "a result is another one after pickle"
    logprobs: dict[tuple[int, int | None], float] = {}
    for entry, each in result.logprobs.items():
        logprobs[entry, None] = each.token_logprob
        logprobs |= {(entry, token_id): value for token_id, value in each.top}
    return Outcome(tuple(result.token_ids.tolist()), tuple(result.finished.tolist()), logprobs)


def assert_same(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Step by step; log-probabilities may be computed by other threads, in another order."""
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.token_ids == other.token_ids, f"token ids of step {number}"
        assert one.finished == other.finished, f"finish flags of step {number}"
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4), (
            f"log-probabilities of step {number}"
        )


def admit(
    prompts: dict[int, Sequence[int]],
    *,
    max_length: int = 32,
    stop: tuple[int, ...] = (),
    logprobs: int | None = None,
    constrained: bool = False,
    epoch: int = 1,
    tables: Sequence[Sequence[int]] | None = None,
) -> StepPlan:
    """A step that computes whole prompts, each in a row of its own with two blocks of its own.

    Or with these `tables`, one for each cache group. No row decodes.
    """
    admissions = tuple(
        Admission(
            row=row,
            token_ids=np.array(prompt, np.int32),
            num_prompt_tokens=len(prompt),
            num_computed=0,
            block_ids=np.array(tables or [(3 + 2 * row, 2 * row)], np.int32),
            max_length=max_length,
            sampling=RowSampling(stop_token_ids=stop, logprobs=logprobs, constrained=constrained),
        )
        for row, prompt in prompts.items()
    )
    chunks = tuple(PrefillChunk(row, 0, len(prompt), True) for row, prompt in prompts.items())
    return decode_plan((), epoch, admissions=admissions, prefill=chunks, samples_later=constrained)


def decodes(rows: Sequence[int], count: int, epoch: int = 2) -> list[StepPlan]:
    """The same decode step, several times: the first lists the rows, the others leave them out."""
    first = decode_plan(rows, epoch)
    return [first, *[replace(first, decode_rows=None)] * (count - 1)]


def two_prompts(first_epoch: int = 1) -> list[StepPlan]:
    """Two requests, the second joining while the first decodes, then steady steps of both.

    The second asks for log-probabilities, the first does not.
    """
    alone = first_epoch + 1
    join = admit({2: PROMPTS[1]}, logprobs=2)
    return [
        admit({0: PROMPTS[0]}, epoch=first_epoch),
        *decodes((0,), 1, alone),
        replace(join, epoch=alone, num_decode=1, decode_rows=None),
        *decodes((0, 2), NUM_DECODES, alone + 1),
    ]


def two_groups() -> list[StepPlan]:
    """A row whose 15 ids fill a block of each group, and which then gets another in each.

    Then the first block lies behind the first group's window, and a second row computes its ids
    there.
    """
    ids = tuple(range(20, 35))
    first = admit({0: ids}, tables=[[3], [7]], logprobs=3)
    more = np.array([(0, 0, 1, 5), (0, 1, 1, 1)], np.int32)
    start, *steady = decodes((0,), 12)
    steady[0] = replace(steady[0], appends=more)
    join = admit({1: ids[::-1]}, tables=[[3], [9]], logprobs=3)
    join = replace(join, epoch=2, num_decode=1, decode_rows=None)
    return [first, start, *steady, join, *decodes((0, 1), 2, epoch=3)]


def only_id(step: int) -> int:
    """The one id that row 0 may choose in this step: of another word of the mask each time.

    Row 2 may choose that of the step behind it.
    """
    return (37 * step + 5) % int(LLAMA_LIKE["vocab_size"])


def constrained_plans() -> list[StepPlan]:
    """Constrained requests in rows 0 and 2; a free one joins them in row 3 while they decode."""
    joins = replace(admit({3: PROMPTS[1]}, logprobs=2), epoch=2, num_decode=2, decode_rows=None)
    later = [*decodes((0, 2), 2), joins, *decodes((0, 2, 3), NUM_DECODES, 3)]
    first = admit({0: PROMPTS[0], 2: PROMPTS[1]}, constrained=True)
    return [first, *(replace(plan, samples_later=True) for plan in later)]


def masks_of(step: int) -> TokenMasks:
    """Those of one of `constrained_plans`."""
    is_last = step == len(constrained_plans()) - 1
    return only({} if is_last else {0: only_id(step), 2: only_id(step + 1)})


def only(ids: Mapping[int, int]) -> TokenMasks:
    """Masks by which each of these rows may choose one id alone."""
    allowed = np.zeros((len(ids), mask_words(LLAMA_LIKE["vocab_size"])), np.int32)
    for mask, token_id in zip(allowed, ids.values(), strict=True):
        allow_ids(mask, [token_id])
    return TokenMasks(rows=np.array([*ids], np.int32), allowed=allowed)


def all_ids(row: int) -> TokenMasks:
    """A mask that holds nothing back."""
    return TokenMasks(rows=np.array([row], np.int32), allowed=~only({row: 0}).allowed | 1)


def launch(executor: Executor, calls: Sequence[StepPlan | TokenMasks]) -> None:
    """Submit plans and masks in this order, then collect a result."""
    for call in calls:
        if isinstance(call, TokenMasks):
            executor.sample(copied(call))
        else:
            executor.submit(copied(call))
    executor.collect()


def run_in_two_parts(executor: Executor, ahead: int) -> list[Outcome]:
    """Submit, collect what is `ahead` steps behind, sample with `masks_of` the step."""
    results: list[Outcome] = []
    plans = constrained_plans()
    for step, plan in enumerate(plans):
        executor.submit(copied(plan))
        if step >= ahead > 0:
            results.append(outcome_of(executor.collect()))
        executor.sample(copied(masks_of(step)))
        if not ahead:
            results.append(outcome_of(executor.collect()))
    return results + [outcome_of(executor.collect()) for _ in range(ahead)]


def run(executor: Executor, plans: Sequence[StepPlan], ahead: int) -> list[Outcome]:
    """Submit all plans and collect all results, `ahead` steps behind.

    Each plan is a copy that went through pickle, so that no two are one object.
    """
    results: list[Outcome] = []
    for number, plan in enumerate(plans):
        executor.submit(copied(plan))
        if number >= ahead:
            results.append(outcome_of(executor.collect()))
    results += [outcome_of(executor.collect()) for _ in range(min(ahead, len(plans)))]
    return results
