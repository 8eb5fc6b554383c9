"""Engines in processes answer as the one on a thread does: tokens, texts, ends, errors."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from nanovllm_core import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanovllm_core.api import (
    EngineClosedError,
    InvalidPromptError,
    InvalidSamplingError,
    UnsupportedError,
)
from nanovllm_core.frontend import derive_seed

PROMPTS = ["Once upon a time", "The", "What is 27 + 15?", "Hello"]


def facts(output: RequestOutput) -> tuple[Any, ...]:
    return (
        output.index,
        output.token_ids,
        output.text,
        output.new_text,
        output.finish_reason,
        output.stop_reason,
        output.prompt_token_ids,
    )


def greedy(max_tokens: int = 16, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


ASKED = {
    "greedy": greedy(),
    "seeded": SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True),
    "several samples": SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True),
    "stop strings": greedy(48, stop=["e", " the"], min_tokens=6, n=2),
    "stop ids": greedy(48, stop_token_ids=[382, 404], ignore_eos=True),
    "biases and penalties": greedy(
        12, logit_bias={3: 1.5}, frequency_penalty=0.5, repetition_penalty=1.2, ignore_eos=True
    ),
}


@pytest.mark.parametrize("params", ASKED.values(), ids=ASKED)
def test_processes_give_the_outputs_of_a_thread(
    params: SamplingParams, two: LLM, thread: LLM
) -> None:
    """Of a whole call, and of a stream output by output."""
    expected = [facts(one) for one in thread.generate(PROMPTS, params, use_tqdm=False)]
    outputs = two.generate(PROMPTS, params, use_tqdm=False, labels={"tenant": "a"})
    assert [facts(one) for one in outputs] == expected
    if params.n == 1:
        expected = [facts(one) for one in thread.stream(PROMPTS[0], params)]
        assert [facts(one) for one in two.stream(PROMPTS[0], params)] == expected


def test_log_probabilities_come_with_their_tokens(two: LLM, thread: LLM) -> None:
    """To the precision of sums over batches of other sizes."""
    params = greedy(6, logprobs=3)
    both = zip(
        *(llm.generate(PROMPTS, params, use_tqdm=False) for llm in (thread, two)), strict=True
    )
    for expected, output in both:
        assert output.logprobs is not None
        assert expected.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        for one, other in zip(output.logprobs, expected.logprobs, strict=True):
            assert one.token_logprob == pytest.approx(other.token_logprob, abs=1e-3)
            assert one.top[0][0] == other.top[0][0]
            assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=1e-3)


def test_requests_without_a_seed_have_the_noise_that_a_thread_gives_them(
    settings: dict[str, Any], two: LLM
) -> None:
    """The seed follows from the arrival alone, whichever engine runs the request."""
    params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, n=2)
    before = two._client._hub._num_arrived  # type: ignore[attr-defined]
    given = [one.token_ids for one in two.generate(PROMPTS, params, use_tqdm=False)]
    again = [
        SamplingParams(
            temperature=1.0, max_tokens=6, ignore_eos=True, n=2, seed=derive_seed(0, before + 2 * i)
        )
        for i in range(len(PROMPTS))
    ]
    assert [one.token_ids for one in two.generate(PROMPTS, again, use_tqdm=False)] == given
    assert len({tuple(ids) for ids in given}) > 2


def test_both_engines_work_and_the_counters_are_their_sum(two: LLM) -> None:
    before = two.stats
    two.generate(PROMPTS * 2, greedy(8, ignore_eos=True), use_tqdm=False)
    stats = two.stats
    assert stats.output_tokens - before.output_tokens == 64
    each = [
        a.output_tokens - b.output_tokens
        for a, b in zip(stats.engines, before.engines, strict=True)
    ]
    assert sum(each) == 64
    assert min(each) >= 16, "one engine was left idle"
    assert stats.blocks == sum(one.blocks for one in stats.engines)
    assert two.info.device == "2 of 2 engines x cpu"


def test_a_refused_request_is_named_and_the_others_of_its_call_are_not_run(
    two: LLM, thread: LLM
) -> None:
    """The error's type, text and place are those of a thread."""
    for bad in ([], [1, 99999], [1] * 600, [2**70]):
        errors = []
        for llm in (thread, two):
            with pytest.raises((InvalidPromptError, Exception)) as caught:
                llm.generate([[1, 2, 3], bad, [4]], greedy(), use_tqdm=False)
            errors.append(caught.value)
        assert type(errors[0]) is type(errors[1])
        assert errors[1].prompt_index == 1  # type: ignore[attr-defined]
        if bad != [2**70]:
            assert str(errors[0]) == str(errors[1])
    assert wait_until_idle(two)


def test_parameters_that_no_message_holds_are_refused(two: LLM) -> None:
    params = greedy(logits_processors={"x": {"y": object()}})
    with pytest.raises(InvalidSamplingError, match=r"object .* is no plain data"):
        two.generate([[1]], params, use_tqdm=False)
    with pytest.raises(InvalidSamplingError, match="no logits processor 'x'"):
        two.generate([[1]], greedy(logits_processors={"x": {}}), use_tqdm=False)


def wait_until_idle(llm: LLM) -> bool:
    """All blocks are free, and nothing is left in the thread between door and engines."""
    until = time.monotonic() + 10
    samples = llm._client._hub._samples  # type: ignore[attr-defined]
    while (stats := llm.stats).running or stats.waiting or [*samples]:
        assert time.monotonic() < until
    assert stats.free_blocks == stats.blocks
    assert {(load.requests, load.tokens) for load in samples.loads.values()} == {(0, 0)}
    return True


def test_leaving_a_stream_frees_its_blocks_at_once(two: LLM) -> None:
    """Also of one whose text is searched."""
    for params in (greedy(400, ignore_eos=True), greedy(400, n=2, stop=["never there"])):
        stream = two.stream("Once", params)
        next(stream)
        stream.close()
        stats = two.stats
        assert (stats.running, stats.waiting) == (0, 0)
        assert wait_until_idle(two)


def test_the_engine_itself_is_not_handed_out(two: LLM) -> None:
    with pytest.raises(UnsupportedError, match="runs in another process; set engine_client: thr"):
        _ = two.engine


def test_a_forgotten_prefix_is_computed_again(two: LLM) -> None:
    prompt = [7] * 100
    for _ in range(2):
        two.generate([prompt], greedy(1), use_tqdm=False)
    two.reset_prefix_cache()
    before = two.stats.prefix_hit_tokens
    two.generate([prompt], greedy(1), use_tqdm=False)
    assert two.stats.prefix_hit_tokens == before


def test_tasks_of_an_event_loop_get_their_own_outputs_and_may_be_cancelled(
    settings: dict[str, Any], thread: LLM
) -> None:
    """One engine in a process; closing it wakes those that wait."""
    expected = [one.token_ids for one in thread.generate(PROMPTS, greedy(), use_tqdm=False)]

    async def tokens(llm: AsyncLLM, prompt: str, params: SamplingParams) -> list[int]:
        return [i async for one in llm.generate(prompt, params) for i in one.new_token_ids]

    async def main() -> None:
        llm = await asyncio.to_thread(AsyncLLM, **settings, engine_client="processes")
        async with llm:
            assert llm.info.device == "cpu"
            assert llm.stats.engines == ()
            tasks = [tokens(llm, prompt, greedy()) for prompt in PROMPTS]
            assert await asyncio.gather(*tasks) == expected
            gone = asyncio.create_task(tokens(llm, "x", greedy(400, ignore_eos=True)))
            while not llm.stats.running:
                await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            assert (llm.stats.running, llm.stats.waiting) == (0, 0)
            waiting = asyncio.create_task(tokens(llm, "x", greedy(500, ignore_eos=True)))
            while not llm.stats.running:
                await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="this AsyncLLM is closed; create a new one"):
            await waiting
        assert llm.stats.steps > 0, "the last counters"

    asyncio.run(main())
