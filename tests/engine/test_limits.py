"""What just fits is taken, and what is one too many is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nanovllm_core.engine import EngineLimits
from nanovllm_core.errors import (
    ConfigError,
    InvalidPromptError,
    InvalidSamplingError,
    RequestTooLongError,
)
from nanovllm_core.interfaces.sampling_params import SamplingParams

SMALLEST = EngineLimits(
    max_num_seqs=1,
    max_num_batched_tokens=1,
    max_model_len=2,
    num_blocks=1,
    block_size=1,
    vocab_size=1,
)
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=4,
    max_model_len=10,
    num_blocks=3,
    block_size=4,
    vocab_size=50,
)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("max_model_len", 2),
        ("num_blocks", 1),
        ("block_size", 1),
        ("vocab_size", 1),
        ("row_padding", 1),
    ],
)
def test_each_limit_has_a_least_value(name: str, least: int) -> None:
    assert getattr(SMALLEST, name) == least
    with pytest.raises(ConfigError, match=f"{name} is {least - 1}; it must be at least {least}"):
        replace(SMALLEST, **{name: least - 1})


def test_a_step_has_a_token_for_every_running_request() -> None:
    assert LIMITS.max_num_batched_tokens == LIMITS.max_num_seqs
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 3, below max_num_seqs"):
        replace(LIMITS, max_num_batched_tokens=3)


def test_the_padding_of_decoding_rows_takes_its_part_of_the_budget() -> None:
    """As far as it leaves a token for prompts; rows are never padded beyond all there are."""
    limits = replace(LIMITS, max_num_seqs=20, max_num_batched_tokens=40, row_padding=16)
    assert [limits.prompt_budget(rows) for rows in (0, 1, 16, 17, 20)] == [40, 24, 24, 20, 20]
    full = replace(limits, max_num_batched_tokens=20)
    assert [full.prompt_budget(rows) for rows in (0, 1, 16, 17, 20)] == [20, 4, 4, 3, 0]
    assert [LIMITS.prompt_budget(rows) for rows in range(5)] == [4, 3, 2, 1, 0]


def test_a_prompt_is_checked_up_to_the_last_id_and_the_last_place() -> None:
    """The ids from 0 to the last; one place is left for an output. It cannot be written to."""
    prompt = LIMITS.check_prompt([0, 49, *range(7)])
    assert prompt.tolist() == [0, 49, *range(7)]
    assert prompt.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        prompt[0] = 1
    assert LIMITS.check_prompt(np.array([3], np.int64)).tolist() == [3]
    given = np.array([3], np.int32)
    kept = LIMITS.check_prompt(given)
    given[0] = 4
    assert kept.tolist() == [3]
    for wrong in (50, -1, 2**31, -(2**40)):
        with pytest.raises(InvalidPromptError, match=f"holds token id {wrong}, outside"):
            LIMITS.check_prompt([1, wrong, 51])
    with pytest.raises(InvalidPromptError, match="empty"):
        LIMITS.check_prompt([])
    with pytest.raises(RequestTooLongError, match="10 tokens; max_model_len is 10, so a prompt"):
        LIMITS.check_prompt(range(10))


def test_outputs_may_fill_the_model_length_and_no_more() -> None:
    assert LIMITS.check_length(4, SamplingParams(max_tokens=6)) == 10
    assert LIMITS.check_length(4, SamplingParams(max_tokens=None)) == 10
    assert LIMITS.check_length(4, SamplingParams(max_tokens=3)) == 7
    # The remedy ends the message, which is an answer over HTTP too, without Python's `None`.
    with pytest.raises(RequestTooLongError, match=r"make 11; max_model_len is 10, .* at most 6$"):
        LIMITS.check_length(4, SamplingParams(max_tokens=7))


def test_min_tokens_may_be_all_that_there_is_room_for() -> None:
    assert LIMITS.check_length(4, SamplingParams(max_tokens=None, min_tokens=6)) == 10
    with pytest.raises(RequestTooLongError, match=r"min_tokens=7 make 11; .* at most 6"):
        LIMITS.check_length(4, SamplingParams(max_tokens=None, min_tokens=7))


def test_min_tokens_without_room_is_named_before_max_tokens_which_it_bounds() -> None:
    with pytest.raises(RequestTooLongError, match=r"min_tokens=7 make 11; .* at most 6"):
        LIMITS.check_length(4, SamplingParams(max_tokens=8, min_tokens=7))
    with pytest.raises(RequestTooLongError, match=r"max_tokens=8 make 12; .* at most 6"):
        LIMITS.check_length(4, SamplingParams(max_tokens=8, min_tokens=6))


def test_a_request_may_fill_the_cache_whose_last_token_needs_no_place() -> None:
    """Nine ids of which eight are fed to the model fill two blocks of four."""
    two_blocks = replace(LIMITS, num_blocks=2)
    assert two_blocks.check_length(4, SamplingParams(max_tokens=5)) == 9
    with pytest.raises(RequestTooLongError, match="up to 10 tokens needs 3 blocks of 4 tokens"):
        two_blocks.check_length(4, SamplingParams(max_tokens=6))


def test_smaller_chunks_are_a_remedy_where_a_window_and_a_chunk_decide() -> None:
    """Ten tokens: three blocks of the whole context, and of a window of 1 and a chunk of 4 two."""
    windowed = replace(LIMITS, cache_windows=(None, 1), num_blocks=4)
    with pytest.raises(RequestTooLongError, match=r"5 blocks .*max_num_batched_tokens \(4\)$"):
        windowed.check_length(4, SamplingParams(max_tokens=6))
    with pytest.raises(RequestTooLongError, match=r"give the cache more memory$"):
        replace(LIMITS, num_blocks=2).check_length(4, SamplingParams(max_tokens=6))


def test_the_last_id_may_stop_a_request_or_be_biased() -> None:
    LIMITS.check_token_ids(SamplingParams(stop_token_ids=[0, 49], logit_bias={49: 1.0}))
    with pytest.raises(InvalidSamplingError, match="stop_token_ids has token id 50; the vocab"):
        LIMITS.check_token_ids(SamplingParams(stop_token_ids=[50, 49]))
    with pytest.raises(InvalidSamplingError, match="logit_bias has token id 50; the vocabulary"):
        LIMITS.check_token_ids(SamplingParams(logit_bias={50: 1.0, 49: 1.0}))
