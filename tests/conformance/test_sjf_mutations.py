"""Bugs planted in sjf: the policies' suite catches each by the check that names the matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from .mutation import Mutation, Subject, numbered

pytest.importorskip("nanovllm_scheduler_sjf", reason="needs the sjf plugin")

SJF = Subject(
    package="nanovllm_scheduler_sjf",
    suite="""
import pytest
from nanovllm_kit import PluginUnderTest, SchedulingPolicyConformance
from COPY.plugin import nanovllm_schedulers

class TestCopy(SchedulingPolicyConformance):
    @pytest.fixture
    def plugin(self):
        [spec] = nanovllm_schedulers()
        return PluginUnderTest(spec, spec.options(), "COPY.plugin")
""",
)

KEY = "return (work + self.options.ageing * request.arrival_step,)"
WORK = "work = request.num_tokens - request.num_scheduled"
STARVES = "test_no_request_is_passed_over_for_longer_than_declared"
UNSTABLE = "test_a_key_is_the_same_whenever_it_is_read"


def policy(
    name: str, caught_by: str, *edits: tuple[str, str], peers: int | None = None
) -> Mutation:
    return Mutation(name=name, file="policy.py", edits=edits, caught_by=caught_by, peers=peers)


MUTATIONS = [
    policy("an unbounded wait: ageing is forgotten", STARVES, (KEY, "return (work,)")),
    policy("the aged key inverted", STARVES, ("(work + self", "(work - self")),
    policy("ageing counts a tenth of its option", STARVES, ("(work + ", "(work + 0.1 * ")),
    policy(
        "age is counted from the request's number, not its step",
        STARVES,
        ("request.arrival_step", "-request.arrival_index"),
    ),
    policy("the longest first", STARVES, ("(work + ", "(-work * 100 + ")),
    policy(
        "a key that depends on the time of reading",
        UNSTABLE,
        (KEY, "import time\n        return (work - self.options.ageing * time.monotonic(),)"),
    ),
    policy(
        "a key that counts its own calls",
        UNSTABLE,
        (WORK, WORK + "\n        self.calls = getattr(self, 'calls', 0) + 1"),
        (KEY, "return (work + self.calls,)"),
    ),
    policy(
        "a victim by dice",
        UNSTABLE,
        ("return (request.arrival_index,)", "import random\n        return (random.random(),)"),
    ),
    policy(
        "a key of dice in all but name",
        "test_the_same_traffic_is_decided_the_same_way",
        (KEY, "return (id(request) % 97,)"),
    ),
    policy(
        "keys of different lengths",
        "test_keys_are_tuples_of_numbers_that_compare",
        (KEY, "return (work,) if work % 2 else (work, request.arrival_step)"),
    ),
    policy(
        "a key that is not a number for a long prompt",
        "test_keys_are_tuples_of_numbers_that_compare",
        (WORK, WORK + "\n        work = work if work < 2000 else float('nan')"),
    ),
    policy(
        "a preempted request is taken for one that decodes",
        "test_every_request_ends_with_the_tokens_that_its_ids_decide",
        (WORK, WORK + "\n        if request.num_tokens > request.num_prompt_tokens:"
         "\n            raise IndexError('decoding already')"),
        peers=11,
    ),
    policy(
        "reads what the contract does not name",
        "test_every_request_ends_with_the_tokens_that_its_ids_decide",
        (WORK, "work = len(request.token_ids)"),
    ),
    policy(
        "writes on a request",
        "test_every_request_ends_with_the_tokens_that_its_ids_decide",
        (WORK, WORK + "\n        request.work = work"),
    ),
    Mutation(
        name="a misspelt option is ignored",
        file="plugin.py",
        edits=(('extra="forbid"', 'extra="ignore"'),),
        caught_by="test_the_options_model_forbids_unknown_keys",
    ),
    Mutation(
        name="listing the plugin imports torch",
        file="plugin.py",
        edits=(("from pydantic import", "import torch\nfrom pydantic import"),),
        caught_by="test_reading_the_spec_imports_nothing_heavy",
    ),
    Mutation(
        name="the bound is declared too short",
        file="plugin.py",
        edits=(("- 1) / options.ageing", "- 1) / (4 * options.ageing)"),),
        caught_by=STARVES,
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=6))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    SJF.assert_caught(tmp_path, number, MUTATIONS[number])


@pytest.mark.slow
def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """Every check that catches a bug passes without it."""
    SJF.assert_passes(tmp_path, MUTATIONS)
