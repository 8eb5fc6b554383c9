"""Blocks: who holds them, what is found again, and what must never be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xxhash

from nanovllm_core.engine.block_pool import NO_BLOCK, BlockPool
from nanovllm_core.errors import InconsistentStateError
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.engine_harness import Harness, Setting

A, B, C = (b"a", 0), (b"ab", 0), (b"abc", 0)


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def test_blocks_with_nothing_to_find_are_used_first_then_the_longest_free() -> None:
    """Published content outlives blocks that hold none, and the oldest goes first."""
    pool = BlockPool(4)
    held = [pool.allocate() for _ in range(4)]
    for block_id, content in zip(held[:3], (A, B, C), strict=True):
        pool.publish(block_id, content)
    for block_id in (held[1], held[0], held[3], held[2]):
        pool.release([block_id])
    assert [pool.allocate() for _ in range(4)] == [held[3], held[1], held[0], held[2]]
    assert pool.find(A) == NO_BLOCK


def test_the_last_block_of_a_table_is_given_away_first() -> None:
    """A prefix is cut from its end, so that what remains can still be found."""
    pool = BlockPool(3)
    held = [pool.allocate() for _ in range(3)]
    for block_id, content in zip(held, (A, B, C), strict=True):
        pool.publish(block_id, content)
    pool.release(held)
    assert pool.allocate() == held[2]


def test_a_block_is_published_under_one_name_and_a_name_has_one_block() -> None:
    """Equal content in a second block stays private."""
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, A)
    pool.publish(second, A)
    pool.publish(first, B)
    assert pool.find(A) == first
    assert pool.find(B) == NO_BLOCK


def test_an_empty_pool_says_so() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(InconsistentStateError, match="all 1 are held"):
        pool.allocate()


def test_a_block_is_not_released_twice() -> None:
    pool = BlockPool(1)
    with pytest.raises(InconsistentStateError, match="block 0 was released by nobody"):
        pool.release([0])


def test_the_pool_notices_what_does_not_add_up() -> None:
    """Wrong counts, a block named twice, a free list or an index that contradicts the counts."""
    pool = BlockPool(2)
    block_id = pool.allocate()
    assert list(pool.faults([[block_id]])) == []
    assert list(pool.faults([])) == [f"block {block_id} counts 1 holders, 0 requests name it"]
    twice, count = pool.faults([[block_id, block_id]])
    assert twice == f"a request names a block twice: {[block_id, block_id]}"
    assert count == f"block {block_id} counts 1 holders, 2 requests name it"
    pool._free[block_id] = None
    (listed,) = pool.faults([[block_id]])
    assert listed == f"block {block_id} has 1 holders but is on the free list"
    pool._free.clear()
    (lost,) = pool.faults([[block_id]])
    assert lost == f"block {1 - block_id} has 0 holders but is not on the free list"
    pool._free[1 - block_id] = None
    pool._block_of[A] = block_id
    assert list(pool.faults([[block_id]])) == ["the index of published blocks contradicts itself"]


@pytest.mark.parametrize("length", [4, 9, 12])
def test_samples_share_the_full_blocks_of_the_prompt(length: int) -> None:
    """n samples take the prompt's full blocks once, and a block of their own for the rest."""
    samples, shared = 4, (length - 1) // 4
    harness = Harness(Setting(block_size=4, max_num_seqs=samples, num_blocks=60))
    requests = harness.add("a", range(length), greedy(12, n=samples))
    all_ran = False
    while harness.engine.has_unfinished():
        harness.step()
        if all(request.block_tables for request in requests):
            all_ran = True
            own = sum(request.num_blocks - shared for request in requests)
            assert 60 - harness.engine.stats.free_blocks == shared + own
    assert all_ran
    harness.check_all()
    for index in range(1, samples):
        assert harness.finished["a", index].num_cached_tokens == shared * 4


def test_samples_do_not_wait_where_nothing_can_be_shared() -> None:
    """Without prefix caching, or with less than a block of prompt, all samples start at once."""
    for prefix_caching, prompt in ((False, range(20)), (True, range(3))):
        harness = Harness(Setting(prefix_caching=prefix_caching, steps_ahead=0))
        harness.add("a", prompt, greedy(4, n=3))
        harness.step()
        assert harness.engine.stats.running == 3
        harness.run()
        harness.check_all()


def test_without_prefix_caching_nothing_is_hashed() -> None:
    harness = Harness(Setting(prefix_caching=False))
    (request,) = harness.add("a", range(9), greedy(12))
    harness.run()
    assert request.digests == []
    assert harness.engine._kv.pool._block_of == {}


def test_what_follows_a_block_that_is_gone_is_not_found() -> None:
    """A later block alone would stand in the first one's place."""
    harness = Harness()
    harness.add("a", range(9))
    harness.run()
    pool = harness.engine._kv.pool
    first = next(iter(pool._content_of))
    del pool._block_of[pool._content_of.pop(first)]
    harness.add("b", range(9))
    assert harness.run()["b", 0].num_cached_tokens == 0
    harness.check_all()


def test_samples_start_at_once_on_a_prompt_that_is_cached() -> None:
    """Samples are held only until the blocks can be found, which they already can."""
    harness = Harness(Setting(max_num_seqs=3))
    harness.add("first", range(9))
    harness.run()
    harness.add("more", range(9), greedy(4, n=3))
    harness.step()
    assert harness.engine.stats.running == 3
    harness.run()
    harness.check_all()


def test_a_preempted_request_holds_and_shares_no_block() -> None:
    """Until it is admitted again, with what is then found of it."""
    harness = Harness(Setting(num_blocks=6, steps_ahead=0))
    harness.add("first", range(8), greedy(12))
    (second,) = harness.add("second", range(20, 28), greedy(12))
    while not harness.engine.stats.preemptions:
        assert second.num_published <= second.num_blocks
        harness.step()
    assert (second.state.value, second.block_tables, second.num_published) == ("waiting", [], 0)
    assert second.num_in_flight == 0
    harness.run()
    harness.check_all()


def test_held_samples_go_on_when_the_first_one_is_gone() -> None:
    """A first sample that stops at once still lets the others in."""
    harness = Harness(Setting(max_num_batched_tokens=4, max_num_seqs=4))
    harness.add("a", range(30), SamplingParams(temperature=0.5, max_tokens=1, n=3))
    harness.run()
    harness.check_all()


def test_a_salt_keeps_prefixes_apart() -> None:
    """Requests of different salts share no block; of the same salt they do."""
    harness = Harness()
    for name, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        harness.add(name, range(9), cache_salt=salt)
        harness.run()
    assert [harness.finished[name, 0].num_cached_tokens for name in "abc"] == [0, 0, 8]
    assert harness.engine.stats.prefix_hit_tokens == 8


def test_no_salt_names_the_blocks_behind_those_of_another() -> None:
    """Else a salt that spells a digest and ids stands for a prompt that begins with them."""
    harness = Harness(Setting(block_size=4))
    harness.add("a", range(9), cache_salt=b"x")
    harness.run()
    for root in (xxhash.xxh3_128_digest(b"x"), xxhash.xxh3_128_digest(b"x", seed=1)):
        spelt = root + np.arange(4, dtype=np.int32).tobytes()
        harness.add(f"b{root[0]}", range(4, 9), cache_salt=spelt)
        assert harness.run()[f"b{root[0]}", 0].num_cached_tokens == 0


def test_blocks_filled_while_decoding_are_found_again() -> None:
    """A conversation's next turn finds the answer's blocks, not only the prompt's."""
    harness = Harness(Setting(block_size=4))
    harness.add("turn 1", range(6), greedy(12))
    answer = harness.run()["turn 1", 0].token_ids
    harness.add("turn 2", [*range(6), *answer, 1, 2])
    finished = harness.run()
    harness.check_all()
    # The last output is never fed back: 17 positions have KV, four full blocks.
    assert finished["turn 2", 0].num_cached_tokens == 16


def test_forgetting_the_cache_loses_nothing_that_runs() -> None:
    """After a reset nothing is found, and the running requests go on."""
    harness = Harness()
    harness.add("a", range(9))
    harness.step()
    harness.step()
    harness.engine.reset_prefix_cache()
    harness.add("b", range(9))
    finished = harness.run()
    harness.check_all()
    assert finished["b", 0].num_cached_tokens == 0
    assert harness.engine.stats.prefix_hit_tokens == 0


def test_rows_that_need_a_block_soon_get_it_with_the_one_that_needs_it_now() -> None:
    """Four rows one token apart, blocks of 16: one plan brings the blocks of all."""
    harness = Harness(Setting(block_size=16, num_blocks=64, max_model_len=128))
    for index in range(4):
        harness.add(str(index), [1] * (8 + index), greedy(36))
    harness.run()
    harness.check_all()
    appends = [plan.appends for plan in harness.executor.plans if plan.appends is not None]
    assert [len(together) for together in appends] == [4, 4]


@pytest.mark.parametrize("windows", [(None,), (None, None)])
def test_no_block_is_given_early_where_not_every_row_could_have_another(
    windows: tuple[int | None, ...],
) -> None:
    """The same four rows on a cache that is nearly full: each gets its blocks when it needs them.

    A row needs one in each group.
    """
    groups = len(windows)
    setting = Setting(block_size=16, num_blocks=9 * groups, max_model_len=128)
    harness = Harness(replace(setting, cache_windows=windows))
    for index in range(4):
        harness.add(str(index), [1] * (8 + index), greedy(20))
    harness.run()
    harness.check_all()
    assert harness.engine.stats.preemptions == 0
    appends = [plan.appends for plan in harness.executor.plans if plan.appends is not None]
    assert [len(together) for together in appends] == [groups] * 4


def test_blocks_come_early_also_where_the_row_that_is_due_was_preempted() -> None:
    """Its blocks are free then: a plan for the row that needs one soon is saved as ever."""
    sizes = Setting(block_size=16, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=99)
    harness = Harness(replace(sizes, max_model_len=128))
    (soon,) = harness.add("soon", [1] * 45, greedy(20))
    (due,) = harness.add("due", [2] * 46, greedy(20))  # arrived last: preempted first
    planner = harness.engine._planner
    planner.plan()
    harness.take_free_blocks()
    while due.state.value == "decoding":
        assert soon.num_blocks == 3
        planned = planner.plan()
    assert planner.num_preemptions == 1
    assert soon.num_scheduled == 48  # its third block is just full
    assert planned is not None
    assert planned.plan.appends is not None
    assert planned.plan.appends.tolist() == [[soon.row, 0, 3, soon.block_tables[0][3]]]
