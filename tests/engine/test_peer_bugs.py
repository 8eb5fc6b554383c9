"""One test for each bug of other engines that could live in this one, by the number of the list."""

from __future__ import annotations

import pytest

from nanovllm_core.engine.block_pool import BlockPool
from nanovllm_core.engine.request import RequestState
from nanovllm_core.errors import (
    InvalidPromptError,
    InvalidSamplingError,
    RequestTooLongError,
)
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.engine_harness import Harness, Letters, Setting, letters


def greedy(max_tokens: int | None = 8, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def test_the_last_running_request_always_gets_its_block() -> None:
    """Bug 1: the last running sequence could not append a block and failed, or retried for ever.

    Two requests that each fill the cache alone: one is preempted, both finish, nobody spins.
    """
    harness = Harness(Setting(num_blocks=5, block_size=4, max_model_len=21))
    harness.add("a", range(8), greedy(13))
    harness.add("b", range(20, 28), greedy(13))
    harness.run()
    harness.check_all()
    assert harness.engine.stats.preemptions >= 1
    assert harness.engine.stats.steps < 60


def test_what_can_never_fit_is_refused_when_it_is_added() -> None:
    """Bug 1: a request with more blocks than the cache has is refused with the numbers."""
    harness = Harness(Setting(num_blocks=5, block_size=4, max_model_len=64))
    with pytest.raises(RequestTooLongError, match=r"up to 22 tokens needs 6 blocks of 4.* has 5"):
        harness.add("a", range(10), greedy(12))
    harness.add("b", range(10), greedy(11))
    harness.run()
    harness.check_all()


def test_residents_are_bounded_and_the_surplus_is_served_in_turn() -> None:
    """Bug 2: max_num_seqs bounded one step instead of the residents, and the surplus starved."""
    harness = Harness(Setting(max_num_seqs=2, num_blocks=200))
    for i in range(7):
        harness.add(f"r{i}", [i, i + 1], greedy(6))
    most = 0
    while harness.engine.has_unfinished():
        harness.step()
        most = max(most, harness.engine.stats.running)
    assert most == 2
    admitted = [a.token_ids[0] for plan in harness.executor.plans for a in plan.admissions]
    assert admitted == list(range(7))
    harness.check_all()


def test_an_empty_prompt_is_refused() -> None:
    """Bug 3: an empty prompt raised an IndexError somewhere inside."""
    with pytest.raises(InvalidPromptError, match="empty"):
        Harness().add("a", [])


@pytest.mark.parametrize("max_tokens", [0, -1, 2.5, 3.0, True, float("nan"), "8"])
def test_max_tokens_that_is_not_a_positive_whole_number_is_refused(max_tokens: object) -> None:
    """Bug 3: max_tokens of 0, below 0 or fractional never ended."""
    with pytest.raises(InvalidSamplingError, match=r"max_tokens is .* a whole number from 1 to"):
        greedy(max_tokens)  # type: ignore[arg-type]


def test_output_beyond_the_model_length_is_refused() -> None:
    """Bug 3: prompt and output beyond the model's length were accepted."""
    harness = Harness(Setting(max_model_len=32))
    with pytest.raises(RequestTooLongError, match=r"10 prompt tokens and max_tokens=23 make 33"):
        harness.add("a", range(10), greedy(23))
    with pytest.raises(RequestTooLongError, match=r"32 tokens; max_model_len is 32"):
        harness.add("a", [1] * 32, greedy(None))


@pytest.mark.parametrize("block_size", [4, 5])
def test_a_request_may_fill_the_model_length_exactly(block_size: int) -> None:
    """Bug 4: a block table one entry too wide crashed the graph at the full model length.

    The fake worker refuses a table of more blocks than max_model_len has.
    """
    harness = Harness(Setting(max_model_len=32, block_size=block_size))
    harness.add("long prompt", [1] * 31, greedy(None))
    harness.add("long output", [2], greedy(None))
    finished = harness.run()
    harness.check_all()
    assert len(finished["long prompt", 0].token_ids) == 1
    assert len(finished["long output", 0].token_ids) == 31


def test_a_fully_cached_prompt_still_computes_a_token() -> None:
    """Bug 10: a fully cached prompt gave a query of length zero."""
    harness = Harness(Setting(block_size=4))
    prompt = list(range(12))
    harness.add("first", prompt, greedy(2))
    harness.run()
    harness.add("again", prompt, greedy(2))
    finished = harness.run()
    harness.check_all()
    assert finished["again", 0].num_cached_tokens == 8
    admission = harness.executor.plans[-2].admissions or harness.executor.plans[-3].admissions
    assert admission[0].num_computed == 8


def test_a_reused_block_is_no_longer_found_by_its_old_content() -> None:
    """Bug 10: a hash still pointed to a block that had been given to somebody else."""
    harness = Harness(Setting(num_blocks=4, block_size=4, max_model_len=17))
    harness.add("old", range(12), greedy(2))
    harness.run()
    harness.add("new", range(20, 32), greedy(5))  # takes all four blocks
    harness.run()
    harness.add("old again", range(12), greedy(2))
    finished = harness.run()
    harness.check_all()
    assert finished["old again", 0].num_cached_tokens == 0


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_a_preempted_request_goes_on_where_it_was(steps_ahead: int) -> None:
    """Bug 11: the phase was guessed from missing outputs, and a token was lost at the new prefill.

    The tokens in flight at the preemption are known when the request comes back.
    """
    harness = Harness(Setting(num_blocks=6, block_size=4, steps_ahead=steps_ahead))
    harness.add("first", range(8), greedy(12))
    (second,) = harness.add("second", range(20, 28), greedy(12))
    harness.step()
    row = second.row
    while not harness.engine.stats.preemptions:
        harness.step()
    assert second.state in (RequestState.DRAINING, RequestState.WAITING)
    assert not second.block_tables
    sampled = sum(row in rows for rows in harness.executor.sampled_rows)
    harness.run()
    harness.check_all()
    admissions = [a for plan in harness.executor.plans for a in plan.admissions]
    _, again = [a for a in admissions if a.token_ids[0] == 20]
    assert len(again.token_ids) == 8 + sampled
    assert again.num_prompt_tokens == 8


def test_the_budget_is_counted_after_the_prefix_hit() -> None:
    """Bug 12: a budget counted before the prefix hit ran past the end of the prompt."""
    harness = Harness(Setting(max_num_batched_tokens=8, max_num_seqs=2, num_blocks=40))
    prompt = list(range(30))
    harness.add("first", prompt, greedy(2))
    harness.run()
    steps = harness.engine.stats.steps
    harness.add("again", [*prompt[:28], 40, 41], greedy(1))
    harness.run()
    harness.check_all()
    assert harness.engine.stats.steps == steps + 1, "two tokens are left: one chunk holds them"


def test_a_chunk_ends_at_the_end_of_the_prompt() -> None:
    """Bug 12: the sequence length was not cut at the end of a chunk."""
    harness = Harness(Setting(max_num_batched_tokens=7, max_num_seqs=4, num_blocks=40))
    harness.add("long", range(40), greedy(3))
    harness.add("short", [1], greedy(3))
    harness.run()
    harness.check_all()
    chunks = [chunk for plan in harness.executor.plans for chunk in plan.prefill]
    assert sum(chunk.length for chunk in chunks) == 41
    assert sum(chunk.samples for chunk in chunks) == 2


def test_a_block_is_not_found_before_its_kv_is_computed() -> None:
    """Bug 13: the hash was published when the block was allocated, before its KV existed.

    Two equal prompts that arrive together share nothing; a third that comes later does.
    """
    harness = Harness(Setting(steps_ahead=2))
    prompt = list(range(9))
    harness.add("a", prompt)
    harness.add("b", prompt)
    harness.step()
    harness.add("c", prompt)
    finished = harness.run()
    harness.check_all()
    assert [finished[name, 0].num_cached_tokens for name in "abc"] == [0, 0, 8]


def test_a_hit_on_a_free_block_keeps_it_findable() -> None:
    """Bug 13: taking a free block over erased its hash, so the second hit missed."""
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.publish(block_id, (b"content", 0))
    pool.release([block_id])
    for _ in range(2):
        assert pool.find((b"content", 0)) == block_id
        pool.retain(block_id)
        assert not pool.is_free(block_id)
        pool.release([block_id])


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_prompts_round_a_block_boundary_run(block_size: int, length: int) -> None:
    """Bug 13: `len % block == 1` stood for "a new block begins" and failed for one token."""
    harness = Harness(Setting(block_size=block_size, num_blocks=64))
    harness.add("a", range(length), greedy(9))
    harness.run()
    harness.check_all()


def test_the_second_block_is_named_by_its_parent_too() -> None:
    """Bug 14: block two was hashed without its parent, so another prompt reused wrong KV.

    Blocks of 16 and prompts of three blocks that differ in the first block only.
    """
    harness = Harness(Setting(block_size=16, max_model_len=80, num_blocks=40))
    tail = list(range(33))
    harness.add("one", [1] * 16 + tail)
    harness.run()
    harness.add("two", [2] * 16 + tail)
    harness.add("one again", [1] * 16 + tail)
    finished = harness.run()
    harness.check_all()
    assert finished["two", 0].num_cached_tokens == 0
    assert finished["one again", 0].num_cached_tokens == 48


def test_every_end_of_sequence_id_ends_a_request() -> None:
    """Bug 18: only one of several end-of-sequence ids was honoured."""
    free = Harness()
    free.add("a", [5, 6], greedy(12))
    free_ids = free.run()["a", 0].token_ids
    unused = next(token_id for token_id in range(50) if token_id not in free_ids)
    for end in dict.fromkeys(free_ids):
        harness = Harness(Setting(eos_token_ids=(unused, end)))
        harness.add("a", [5, 6], greedy(12))
        output = harness.run()["a", 0]
        assert output.token_ids == free_ids[: free_ids.index(end) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", end)


def test_finish_reasons_are_true() -> None:
    """Bug 19: finish_reason was always "stop", and stop strings, n and stream were ignored."""
    harness = Harness(Setting(max_num_seqs=6))
    harness.add("length", [1, 2], greedy(5))
    ids = harness.run()["length", 0].token_ids
    text = letters(ids)
    harness.add("string", [1, 2], greedy(5, stop=text[2]), detokenizer=Letters)
    harness.add("id", [1, 2], greedy(5, stop_token_ids=[ids[1]]))
    harness.add("abort", [1, 2], greedy(5))
    harness.add("samples", [1, 2], greedy(5, n=3), stream=True)
    harness.engine.abort("abort")
    finished = harness.run()
    assert finished["length", 0].finish_reason == "length"
    string = finished["string", 0]
    assert (string.finish_reason, string.stop_reason) == ("stop", text[2])
    assert string.text == text[: text.index(text[2])]
    assert (finished["id", 0].finish_reason, finished["id", 0].stop_reason) == ("stop", ids[1])
    assert finished["abort", 0].finish_reason == "abort"
    assert {index for name, index in finished if name == "samples"} == {0, 1, 2}
    streamed = [o for o in harness.outputs if (o.request_id, o.index) == ("samples", 1)]
    assert [len(output.new_token_ids) for output in streamed] == [1] * 5


def test_a_refused_request_is_an_error_and_harms_nobody() -> None:
    """Bug 19: a prompt that was too long vanished without a reply."""
    harness = Harness(Setting(max_model_len=16))
    harness.add("good", [1, 2, 3])
    with pytest.raises(RequestTooLongError):
        harness.add("long", [1] * 16)
    harness.run()
    harness.check_all()


def test_duplicate_blocks_stay_private_and_tables_are_never_rewritten() -> None:
    """Bug 20: a duplicate block was freed while a block table still pointed at it.

    Two equal prompts fill the same blocks twice; when one finishes the other reads on.
    """
    harness = Harness(Setting(num_blocks=16))
    prompt = list(range(12))
    (short,) = harness.add("short", prompt, greedy(2))
    (long,) = harness.add("long", prompt, greedy(20))
    harness.step()
    tables = list(short.block_tables[0]), list(long.block_tables[0])
    assert not set(tables[0]) & set(tables[1])
    while short.state is not RequestState.FINISHED:
        harness.step()
    harness.add("other", range(20, 40), greedy(10))
    assert long.block_tables[0][:3] == tables[1][:3]
    harness.run()
    harness.check_all()
