"""Cache groups: what a window lets go, what a prefix hit has, and what just fits.

The fake worker keeps what blocks hold, and refuses a step in which a position reads, in any group's
window, a cell that is not its row's own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from nanovllm_core.engine import EngineLimits
from nanovllm_core.engine.block_pool import NO_BLOCK, BlockPool, Content
from nanovllm_core.engine.prefix_cache import PagedKV
from nanovllm_core.engine.request import Request
from nanovllm_core.errors import ConfigError, InconsistentStateError, RequestTooLongError
from nanovllm_core.interfaces.cache_groups import SequenceNeed
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.fake_worker import first_seen
from nanovllm_kit.traffic import cache_windows

LONG = Setting(max_model_len=400, max_num_batched_tokens=16, num_blocks=200)


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def ids(num_tokens: int) -> list[int]:
    return [index % 50 for index in range(num_tokens)]


def held(request: Request) -> list[int]:
    """The blocks that a request holds in each group."""
    return [len(table) - table.count(NO_BLOCK) for table in request.block_tables]


def test_a_long_row_holds_the_blocks_of_its_window_and_few_more() -> None:
    """300 tokens in a group without a window, and in groups with windows of 8 and 1 tokens."""
    harness = Harness(replace(LONG, cache_windows=(None, 8, 1)))
    (request,) = harness.add("a", ids(100), greedy(200))
    most = [0, 0, 0]
    for _ in harness.steps():
        if request.block_tables:
            most = [max(pair) for pair in zip(most, held(request), strict=True)]
    harness.check_all()
    assert most == [75, 3, 1]


def test_what_a_prompts_chunk_leaves_behind_is_free_before_the_next_is_planned() -> None:
    """And the row that decodes after it has dropped all but its window at once."""
    harness = Harness(replace(LONG, cache_windows=(6,), steps_ahead=0))
    (request,) = harness.add("a", range(40), greedy(20))
    for computed in (16, 32, 40):
        harness.step()
        seen = range((computed - 6 + 1) // 4, computed // 4)
        assert [i for i, block in enumerate(request.block_tables[0]) if block >= 0] == [*seen]
    assert request.state.value == "decoding"


def test_plans_have_a_block_table_for_each_group() -> None:
    """Int32, with -1 where a prefix hit lies behind a window; appends name their group."""
    harness = Harness(Setting(cache_windows=(None, 4), steps_ahead=0))
    for name in "ab":
        harness.add(name, range(14), greedy(6))
        harness.run()
    first, hit = [plan.admissions[0] for plan in harness.executor.plans if plan.admissions]
    assert first.block_ids.shape == (2, 4)
    assert (first.block_ids >= 0).all()
    assert (hit.num_computed, hit.block_ids.dtype) == (12, np.int32)
    assert (hit.block_ids >= 0).tolist() == [[True] * 4, [False, False, True, True]]
    [append] = [plan.appends for plan in harness.executor.plans[:6] if plan.appends is not None]
    assert append[:, :3].tolist() == [[0, 0, 4], [0, 1, 4]]
    assert append.dtype == np.int32


def lose(harness: Harness, group: int, *places: int) -> None:
    """Others took these blocks of the cached prompt: their content is gone."""
    pool, (request,) = harness.engine._kv.pool, harness.requests.values()
    for place in places:
        block_id = pool._block_of.pop((request.digests[place], group))
        del pool._content_of[block_id]


@pytest.mark.parametrize(
    ("lost", "cached"),
    [
        ([], 24),
        ([(1, 0), (1, 1), (1, 2)], 24),  # no window of position 24 reaches these
        ([(1, 3)], 24),
        ([(1, 4)], 16),
        ([(1, 5)], 20),
        ([(1, 3), (1, 5)], 12),  # position 20 sees 12 to 20, position 16 sees 8 to 16
        ([(1, 1), (1, 3), (1, 5)], 4),
        ([(1, 0), (1, 3), (1, 5)], 12),
        ([(0, 3)], 12),
        ([(0, 0)], 0),
    ],
)
def test_a_prefix_hit_has_the_blocks_that_the_next_token_sees(
    lost: list[tuple[int, int]], cached: int
) -> None:
    """All of a group without a window; of a window of 9 tokens the last two or three."""
    harness = Harness(Setting(cache_windows=(None, 8)))
    harness.add("a", range(25), greedy(2))
    harness.run()
    for group, place in lost:
        lose(harness, group, place)
    harness.add("b", range(25), greedy(2))
    assert harness.run()["b", 0].num_cached_tokens == cached
    harness.check_all()


class Finder(BlockPool):
    """Finds these blocks, and counts the look-ups."""

    def __init__(self, blocks: dict[Content, int]) -> None:
        super().__init__(1)
        self._block_of = blocks
        self.looked_up = 0

    def find(self, content: Content) -> int:
        self.looked_up += 1
        return super().find(content)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_longest_prefix_is_found_with_few_look_ups(data: st.DataObject) -> None:
    """Whatever is gone: as many as there are blocks, for each pair of groups, not their square."""
    windows = data.draw(cache_windows())
    kv, request = cached(windows, num_blocks=60)
    kept = data.draw(st.sampled_from([0.0, 0.5, 0.9, 0.97, 1.0]))
    draws = data.draw(st.randoms(use_true_random=False))
    contents = [(digest, group) for digest in request.digests for group in range(len(windows))]
    there = {content for content in contents if draws.random() < kept}

    def holds(length: int) -> bool:
        firsts = [0 if window is None else kv.first_block(window, 2 * length) for window in windows]
        return all(
            (digest, group) in there
            for group, first in enumerate(firsts)
            for digest in request.digests[first:length]
        )

    kv.pool = pool = Finder({content: contents.index(content) for content in there})
    tables = kv.match(request)
    longest = max(length for length in range(61) if holds(length))
    assert [len(table) for table in tables] == [longest] * len(windows)
    for group, (window, table) in enumerate(zip(windows, tables, strict=True)):
        first = 0 if window is None else kv.first_block(window, 2 * longest)
        for index, block in enumerate(table):
            there_as = contents.index((request.digests[index], group))
            assert block == (there_as if index >= first else NO_BLOCK)
    assert pool.looked_up <= 60 * len(windows) ** 2 + 60


def test_a_prompt_that_waits_costs_few_look_ups_where_nothing_is_cached() -> None:
    """A window at a time; and one look-up where the window holds every sequence, as without."""
    for windows, most in [((64,), 3), ((None,), 1), ((500,), 1), ((None, 64), 1)]:
        kv, request = cached(windows, num_blocks=60)
        kv.pool = pool = Finder({})
        assert kv.match(request) == [[] for _ in windows]
        assert pool.looked_up <= most


def cached(windows: tuple[int | None, ...], num_blocks: int) -> tuple[PagedKV, Request]:
    """A request for a prompt of so many blocks of 2 tokens and one token, not added anywhere."""
    num_tokens = 2 * num_blocks + 1
    setting = Setting(
        block_size=2, max_model_len=num_tokens + 1, num_blocks=1000, cache_windows=windows
    )
    harness = Harness(setting)
    (request,) = harness.add("a", ids(num_tokens), greedy(1))
    kv = harness.engine._kv
    kv.match(request)
    return kv, request


def cached_after(windows: tuple[int | None, ...], taken: int) -> int:
    """Cached tokens of 256 after others took so many blocks, those with nothing to find aside."""
    setting = Setting(max_num_batched_tokens=512, max_model_len=512, num_blocks=300)
    harness = Harness(replace(setting, block_size=4, cache_windows=windows))
    harness.add("a", ids(257), greedy(2))
    harness.run()
    pool = harness.engine._kv.pool
    unknown = [block for block in pool._free if block not in pool._content_of]
    blocks = [pool.allocate() for _ in range(len(unknown) + taken)]
    for block in blocks:
        pool.release([block])
    harness.add("b", ids(257), greedy(2))
    return harness.run()["b", 0].num_cached_tokens


def test_a_hit_outlives_what_its_window_dropped_and_no_block_of_the_window() -> None:
    """Without a window it is shortened block by block; with one it is whole, then gone at once."""
    assert [cached_after((None,), taken) for taken in (0, 1, 4, 60)] == [256, 252, 240, 16]
    dropped = (257 - 32) // 4
    assert [cached_after((None, 32), taken) for taken in (0, dropped)] == [256, 256]
    assert cached_after((None, 32), dropped + 1) == 0


@pytest.mark.parametrize("window", [1, 2])
def test_a_block_behind_a_window_is_published_only_with_its_ids(window: int) -> None:
    """Steps ahead of the results, a row leaves blocks behind whose ids are not on the host yet."""
    setting = Setting(cache_windows=(window,), block_size=1, steps_ahead=3)
    harness = Harness(setting)
    (request,) = harness.add("a", ids(3), greedy(12))
    went_ahead = False
    for _ in harness.steps():
        went_ahead |= request.num_scheduled - window >= request.num_tokens
        assert request.num_published < request.num_tokens
    harness.check_all()
    assert went_ahead
    turn = [*ids(3), *harness.finished["a", 0].token_ids, 1]
    harness.add("b", turn, greedy(3))
    harness.run()
    harness.check_all()


@pytest.mark.parametrize("chunk", [7, 64])
def test_blocks_behind_a_window_stay_findable(chunk: int) -> None:
    """A second prompt branches off where no window of the first one's end reaches."""
    harness = Harness(Setting(cache_windows=(None, 5, 1), max_num_batched_tokens=chunk))
    harness.add("a", range(40), greedy(4))
    harness.run()
    harness.add("b", [*range(21), 49, 48], greedy(4))
    assert harness.run()["b", 0].num_cached_tokens == 20
    harness.check_all()


def test_samples_share_the_blocks_of_all_groups() -> None:
    harness = Harness(Setting(cache_windows=(6, None), max_num_seqs=3, steps_ahead=0))
    requests = harness.add("a", range(21), greedy(9, n=3))
    for _ in range(2):
        harness.step()
    first, *others = [request.block_tables for request in requests]
    for tables in others:
        assert tables[1][:5] == first[1][:5]
        assert tables[0][:3] == [NO_BLOCK] * 3
        assert tables[0][3:5] != [NO_BLOCK] * 2
    harness.run()
    harness.check_all()


fits = st.builds(
    Setting,
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    max_num_seqs=st.just(1),
    max_num_batched_tokens=st.integers(1, 24),
    max_model_len=st.just(80),
    prefix_caching=st.booleans(),
    steps_ahead=st.integers(0, 2),
    cache_windows=cache_windows(),
)


@given(setting=fits, prompt=st.integers(1, 60), max_tokens=st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_a_request_that_is_taken_ends_without_preemption_and_one_block_less_refuses_it(
    setting: Setting, prompt: int, max_tokens: int
) -> None:
    """Alone on the blocks that it needs at most; a second time with whatever is cached of it."""
    need = SequenceNeed(setting.cache_windows, setting.block_size, setting.max_num_batched_tokens)
    needed = need.blocks(prompt + max_tokens - 1)
    harness = Harness(replace(setting, num_blocks=needed))
    for name in "ab":
        harness.add(name, ids(prompt), greedy(max_tokens))
        harness.run()
    harness.check_all()
    assert harness.engine.stats.preemptions == 0
    if needed > 1:
        tight = Harness(replace(setting, num_blocks=needed - 1))
        with pytest.raises(RequestTooLongError, match=f"needs {needed} blocks"):
            tight.add("a", ids(prompt), greedy(max_tokens))


def off_by_one(by: int) -> object:
    def first_block(kv: PagedKV, window: int, position: int) -> int:
        return max(0, position - window + 1 + by) // kv.block_size

    return first_block


def test_a_block_freed_one_token_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next chunk is written over it while its first token still reads its last cell."""
    setting = Setting(
        cache_windows=(6,),
        max_num_seqs=1,
        max_num_batched_tokens=4,
        num_blocks=3,
        prefix_caching=False,
    )

    def run() -> None:
        harness = Harness(setting)
        harness.add("a", ids(40), greedy(8))
        harness.run()
        harness.check_all()

    run()
    monkeypatch.setattr(PagedKV, "first_block", off_by_one(1))
    with pytest.raises(AssertionError, match=r"reads what is not its own at positions \[\d+\]"):
        run()


def test_a_block_freed_one_token_late_is_noticed_where_it_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a cache of just the blocks that limits count, a chunk finds no block."""
    setting = Setting(cache_windows=(3,), max_num_seqs=1, max_num_batched_tokens=3, num_blocks=2)
    monkeypatch.setattr(PagedKV, "first_block", off_by_one(-1))
    harness = Harness(setting, debug=False)
    harness.add("a", range(16), greedy(8))
    with pytest.raises(InconsistentStateError, match="all 2 are held"):
        harness.run()


@pytest.mark.parametrize("windows", [(), (None, 0), (-1,)])
def test_windows_that_no_group_can_have_are_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigError, match=r"cache_windows is .* at least 1 token"):
        EngineLimits(
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=2,
            num_blocks=1,
            block_size=1,
            vocab_size=1,
            cache_windows=windows,
        )


def dropped_too_much(request: Request) -> None:
    request.block_tables[1][:4] = [NO_BLOCK] * 4


def dropped_in_the_middle(request: Request) -> None:
    request.block_tables[1][-1] = NO_BLOCK
    request.block_tables[1][0] = 63  # as many are dropped as ought to be


def dropped_without_a_window(request: Request) -> None:
    request.block_tables[0][0] = NO_BLOCK


def one_table_is_shorter(request: Request) -> None:
    request.block_tables[1].pop()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dropped_too_much, "a dropped 4 blocks of group 1 at 17 positions"),
        (dropped_in_the_middle, "a dropped 2 blocks of group 1 at 17 positions"),
        (dropped_without_a_window, "a dropped 1 blocks of group 0 at 17 positions"),
        (one_table_is_shorter, "a has block tables of 5 and 4 entries"),
    ],
)
def test_a_block_table_that_does_not_fit_its_window_is_noticed(how: object, message: str) -> None:
    from nanovllm_core.engine.consistency import _length_faults

    harness = Harness(Setting(cache_windows=(None, 6), steps_ahead=0))
    (request,) = harness.add("a", range(16), greedy(20))
    harness.step()
    harness.step()
    assert request.num_scheduled == 17
    planner = harness.engine._planner
    assert not list(_length_faults(planner, request, 1))
    how(request)  # type: ignore[operator]
    assert any(message in fault for fault in _length_faults(planner, request, 1))


def test_the_first_position_seen_is_the_contracts() -> None:
    """A window counts the token itself, as in `WorkerInfo.cache_windows`."""
    assert [first_seen(window, 9) for window in (None, 1, 3, 20)] == [0, 9, 7, 0]
