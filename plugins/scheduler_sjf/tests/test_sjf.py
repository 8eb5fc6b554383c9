"""Shortest job first: the order, and the bound on waiting that ageing gives."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from pydantic import ValidationError

from nanovllm_core.api import (
    Executor,
    NoOptions,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenMasks,
    WorkerInfo,
    WorkerSetup,
)
from nanovllm_core.engine import Engine, EngineLimits, OutputDelta, TokenBudgetScheduler
from nanovllm_scheduler_sjf.plugin import SjfOptions, nanovllm_schedulers
from nanovllm_scheduler_sjf.policy import SjfPolicy


class OneTokenWorker(Executor):
    """Ends every request with its first token."""

    def __init__(self) -> None:
        super().__init__(NoOptions())
        self.sizes: deque[int] = deque()
        self.admitted: list[int] = []

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        raise NotImplementedError("the tests build the engine by hand")

    def submit(self, plan: StepPlan) -> None:
        self.sizes.append(plan.num_sampled)
        self.admitted += [len(admission.token_ids) for admission in plan.admissions]

    def sample(self, masks: TokenMasks) -> None:
        raise NotImplementedError("no request is constrained")

    def collect(self) -> StepResult:
        size = self.sizes.popleft()
        return StepResult(np.zeros(size, np.int32), np.ones(size, np.bool_))

    def close(self) -> None: ...


ONE_TOKEN = SamplingParams(max_tokens=1)


def make_engine(ageing: float, budget: int = 32, max_num_seqs: int = 2) -> Engine:
    return Engine(
        OneTokenWorker(),
        TokenBudgetScheduler(SjfPolicy(SjfOptions(ageing=ageing))),
        EngineLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=512,
            num_blocks=256,
            block_size=16,
            vocab_size=10,
        ),
        prefix_caching=False,
        debug=True,
    )


def passed_over(engine: Engine, long: int, short: int, per_step: int, steps: int) -> list[int]:
    """Add a long prompt, then short ones at every step; the steps of those admitted before it.

    A `-1` at the end says that the long one was not served within `steps`.
    """
    engine.add_request("long", [1] * long, ONE_TOKEN)
    before: list[int] = []
    for _ in range(steps):
        arrived = engine.stats.steps
        for i in range(per_step):
            engine.add_request(f"{arrived}.{i}.{len(before)}", [1] * short, ONE_TOKEN)
        done: list[OutputDelta] = engine.step()
        names = [output.request_id for output in done]
        if "long" in names:
            return before
        before += [int(name.split(".")[0]) for name in names]
    return [*before, -1]


def test_without_ageing_a_long_prompt_starves() -> None:
    """The same load with ageing off: the long prompt is never served."""
    long, short, per_step = 400, 30, 2
    fair = make_engine(ageing=16)
    assert passed_over(fair, long, short, per_step, steps=200)[-1] != -1
    starving = make_engine(ageing=0)
    assert passed_over(starving, long, short, per_step, steps=200)[-1] == -1


@pytest.mark.parametrize(("ageing", "bound"), [(16, 2.0), (1, 32.0), (0, float("inf"))])
def test_the_spec_declares_the_bound(ageing: float, bound: float) -> None:
    """33 tokens of work: (33 - 1) / ageing steps. The conformance suite holds it."""
    engine = make_engine(ageing)
    engine.add_request("a", [1] * 33, ONE_TOKEN)
    [request] = engine._planner.waiting.values()
    [spec] = nanovllm_schedulers()
    assert spec.max_overtaking_steps is not None
    assert spec.max_overtaking_steps(SjfOptions(ageing=ageing), request) == bound


def test_the_shortest_is_served_first() -> None:
    """Prompts that wait together go by length, equal ones in the order of arrival."""
    engine = make_engine(ageing=16, max_num_seqs=1, budget=512)
    for name, length in (("c", 30), ("b", 20), ("d", 40), ("a", 10), ("b2", 20)):
        engine.add_request(name, [1] * length, ONE_TOKEN)
    order = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step()]
    assert order == ["a", "b", "b2", "c", "d"]


def test_the_latest_arrival_is_preempted_first() -> None:
    """The victim is the newest, however short it is."""
    engine = make_engine(ageing=16)
    engine.add_request("old and long", [1] * 100, ONE_TOKEN)
    engine.add_request("new and short", [1], ONE_TOKEN)
    requests = list(engine._planner.waiting.values())
    scheduler = TokenBudgetScheduler(SjfPolicy(SjfOptions()))
    assert scheduler.choose_victim(requests) == "new and short"


@pytest.mark.parametrize("ageing", [-1, float("nan"), float("inf")])
def test_ageing_is_a_number_of_at_least_0(ageing: float) -> None:
    with pytest.raises(ValidationError):
        SjfOptions(ageing=ageing)


def test_the_spec_names_the_policy() -> None:
    (spec,) = nanovllm_schedulers()
    assert (spec.name, spec.level, spec.options) == ("sjf", "policy", SjfOptions)
    assert spec.impl == f"{SjfPolicy.__module__}:{SjfPolicy.__name__}"
