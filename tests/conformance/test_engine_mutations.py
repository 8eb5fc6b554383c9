"""Bugs planted in the core's own scheduler, planner and cache, and found by the schedulers' suite.

Here are those that a policy cannot have. The copy's engine runs the copy's scheduler.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .mutation import Mutation, Subject, numbered

ENGINE = Subject(
    package="nanovllm_core.engine",
    suite="""
import pytest
from nanovllm_core.interfaces.specs import NoOptions, SchedulerSpec
from nanovllm_kit import PluginUnderTest, SchedulerConformance
from COPY import Engine, FcfsPolicy

class TestCopy(SchedulerConformance):
    engine_class = Engine

    @pytest.fixture
    def plugin(self):
        spec = SchedulerSpec(
            name="copy",
            impl="COPY.scheduler:TokenBudgetScheduler",
            contract=1,
            level="scheduler",
            max_overtaking_steps=lambda _options, _request: 0,
        )
        return PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")

    def make_scheduler(self, plugin):
        return plugin.load()(FcfsPolicy())
""",
)

ANY = "test_every_request_ends_with_the_tokens_that_its_ids_decide"
PREEMPTED = "test_a_preempted_request_waits_again_and_ends"


def bug(
    name: str, file: str, caught_by: str, *edits: tuple[str, str], peers: int | None = None
) -> Mutation:
    return Mutation(name=name, file=file, edits=edits, caught_by=caught_by, peers=peers)


MUTATIONS = [
    bug(
        "the preempted request itself is handed a block",
        "planner.py",
        PREEMPTED,
        ("            if victim is request:\n                return False\n", ""),
        peers=1,
    ),
    bug(
        "max_num_seqs bounds a step, not who is resident",
        "scheduler.py",
        "test_no_more_are_admitted_than_rows_are_free",
        ("self._queue[: state.free_rows]", "self._queue[: max(state.free_rows, 2)]"),
        peers=2,
    ),
    bug(
        "a row goes on past its last block",
        "planner.py",
        ANY,
        (
            "return min(request.num_blocks * self.kv.block_size, request.max_length - 1)",
            "return request.num_blocks * self.kv.block_size",
        ),
        peers=4,
    ),
    bug(
        "decoding begins one position late",
        "planner.py",
        ANY,
        ("self.rows.scheduled[request.row] = end", "self.rows.scheduled[request.row] = end + 1"),
        peers=10,
    ),
    bug(
        "a block that is reused is still found under its old content",
        "block_pool.py",
        ANY,
        ("            del self._block_of[content]\n", "            pass\n"),
        peers=10,
    ),
    bug(
        "a fully cached prompt has nothing left to compute",
        "prefix_cache.py",
        ANY,
        ("return (num_tokens - 1) // self.block_size", "return num_tokens // self.block_size"),
        peers=10,
    ),
    bug(
        "the last sampled token is lost when a request is preempted",
        "planner.py",
        PREEMPTED,
        (
            "            self._leave_row(request)\n            self.enqueue",
            "            self._leave_row(request)\n"
            "            request.token_ids = request.token_ids[:-1]\n            self.enqueue",
        ),
        peers=11,
    ),
    bug(
        "the budget is counted before the prefix hit",
        "scheduler.py",
        "test_a_cached_prefix_is_not_computed_again",
        ("request.num_tokens - state.num_cached_tokens(request)", "request.num_tokens"),
        peers=12,
    ),
    bug(
        "a prompt is not cut at the budget",
        "scheduler.py",
        "test_the_token_budget_is_kept",
        ("break\n            chunk = min(missing, budget)", "break\n            chunk = missing"),
        peers=12,
    ),
    bug(
        "a block is hashed before its ids are known",
        "prefix_cache.py",
        ANY,
        ("num_computed // self.block_size", "-(-num_computed // self.block_size)"),
        peers=13,
    ),
    bug(
        "a block is hashed without its parent",
        "prefix_cache.py",
        ANY,
        ("xxh3_128_digest(digest + ids[", "xxh3_128_digest(ids["),
        peers=14,
    ),
    bug(
        "a shared block is freed under those who share it",
        "block_pool.py",
        ANY,
        ("            if holders == 0:", "            if holders <= 1:"),
        peers=20,
    ),
    bug(
        "a block is freed with a step in flight",
        "planner.py",
        ANY,
        (
            "                self._stop_decoding(request)",
            "                self._stop_decoding(request)\n"
            "                self.kv.release(request)",
        ),
    ),
    bug(
        "a block is freed while its group's window reaches it",
        "prefix_cache.py",
        ANY,
        ("max(0, position - window + 1) //", "max(0, position - window + 2) //"),
    ),
    bug(
        "a prefix is cached where blocks of a window are gone",
        "prefix_cache.py",
        ANY,
        (
            "            number = number + 1 if found == length else 0\n",
            "            number += 1\n",
        ),
    ),
    bug(
        "two cache groups find each other's blocks",
        "prefix_cache.py",
        ANY,
        (
            "self.pool.publish(table[index], (digests[index], group))",
            "self.pool.publish(table[index], (digests[index], 0))",
        ),
        ("find((digest, group))) ==", "find((digest, 0))) =="),
    ),
    bug(
        "a row that is due has room with one free block, in however many groups",
        "planner.py",
        PREEMPTED,
        ("while self.kv.pool.num_free < len(self.kv.windows):", "while self.kv.pool.num_free < 1:"),
    ),
    bug(
        "a result for a row's former request is taken",
        "rows.py",
        ANY,
        ("rows, token_ids, finished = rows[alive], token_ids[alive], finished[alive]", "pass"),
    ),
    bug(
        "blocks leak when a request is aborted",
        "planner.py",
        "test_an_aborted_request_that_runs_makes_room",
        (
            "        self.kv.release(request)\n        self._leave_row(request)\n"
            "        request.state = RequestState.FINISHED",
            "        self._leave_row(request)\n        request.state = RequestState.FINISHED",
        ),
    ),
    bug(
        "a lost victim: a request joins the queue only once",
        "scheduler.py",
        PREEMPTED,
        (
            '        key = self._key("service_key", request)\n',
            "        self._seen = getattr(self, '_seen', set())\n"
            "        if request.request_id in self._seen:\n            return\n"
            "        self._seen.add(request.request_id)\n"
            '        key = self._key("service_key", request)\n',
        ),
    ),
    bug(
        "a request that left the queue is scheduled",
        "scheduler.py",
        "test_an_aborted_request_that_waits_is_forgotten",
        ("        del self._queue[", "        self._queue["),
    ),
    bug(
        "blocks are given out that are not free",
        "scheduler.py",
        "test_no_more_blocks_are_given_out_than_are_free",
        ("            if blocks < 0:\n                break\n", ""),
    ),
    bug(
        "a stale victim",
        "scheduler.py",
        "test_a_victim_is_one_of_the_running",
        (
            "        return victim.request_id",
            "        self._victim = getattr(self, '_victim', victim.request_id)\n"
            "        return self._victim",
        ),
    ),
    bug(
        "a chunk that was computed is given out again",
        "scheduler.py",
        "test_only_work_that_is_there_is_given_out",
        ("missing = request.num_tokens - request.num_scheduled", "missing = request.num_tokens"),
    ),
    bug(
        "an unbounded wait: small requests pass a big one for which blocks are short",
        "scheduler.py",
        "test_no_request_is_passed_over_for_longer_than_declared",
        (
            "            blocks -= state.num_new_blocks(request, missing + "
            "self._num_reserved(request))\n"
            "            if blocks < 0:\n                break\n",
            "            if state.num_new_blocks(request, missing) > blocks:\n"
            "                continue\n"
            "            blocks -= state.num_new_blocks(request, missing)\n",
        ),
    ),
    bug(
        "last come, first served",
        "scheduler.py",
        "test_no_request_is_passed_over_for_longer_than_declared",
        ("return (request.arrival_index,)", "return (-request.arrival_index,)"),
    ),
]


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=6))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    ENGINE.assert_caught(tmp_path, number, MUTATIONS[number])


@pytest.mark.slow
def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """Every check that catches a bug passes without it."""
    ENGINE.assert_passes(tmp_path, MUTATIONS)
