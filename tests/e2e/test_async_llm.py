"""The door for event loops: many tasks, one wake-up for each step, and tasks that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core import AsyncLLM, RequestOutput, SamplingParams
from nanovllm_core.engine import OutputDelta
from nanovllm_core.errors import EngineClosedError, InvalidPromptError, RequestTooLongError
from nanovllm_core.frontend.async_llm import Answers
from nanovllm_core.frontend.messages import Ended
from nanovllm_core.frontend.outputs import OutputStream
from nanovllm_core.interfaces.plan import TokenLogprobs

from .tiny import CONFIG, Reference

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5] * 20]


def greedy(max_tokens: int = 6, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[AsyncLLM]:
    small = {"max_model_len": 512, "max_num_seqs": 8, "cache.num_blocks": 64}
    llm = AsyncLLM(str(tiny), device="cpu", attention="sdpa", debug=True, **small)
    yield llm
    llm.close()


async def tokens(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> list[int]:
    return [
        token async for output in llm.generate(prompt, params) for token in output.new_token_ids
    ]


def test_tasks_of_one_loop_get_their_own_outputs(llm: AsyncLLM, reference: Reference) -> None:
    async def main() -> list[list[int]]:
        return await asyncio.gather(*(tokens(llm, one, greedy()) for one in PROMPTS * 3))

    expected = [reference.tokens(prompt, 6) for prompt in PROMPTS]
    for _ in range(2):  # each time in a loop of its own
        assert asyncio.run(main()) == expected * 3
    assert not llm._mailboxes


def test_cached_prefixes_are_shared_by_requests_of_one_salt_only(llm: AsyncLLM) -> None:
    """A tenant that sends another's prompt sees no cached tokens; the salt changes no token."""

    async def ask(salt: bytes) -> tuple[int, list[int]]:
        prompt = [*range(40, 64)] * 2
        outputs = [o async for o in llm.generate(prompt, greedy(), cache_salt=salt)]
        return outputs[-1].num_cached_tokens, outputs[-1].token_ids

    async def main() -> list[tuple[int, list[int]]]:
        return [await ask(salt) for salt in (b"one", b"two", b"one", b"", b"two")]

    cached, texts = zip(*asyncio.run(main()), strict=True)
    assert [bool(count) for count in cached] == [False, False, True, False, True]
    assert all(text == texts[0] for text in texts)


def test_outputs_come_as_they_grow_and_the_loop_serves_others_meanwhile(llm: AsyncLLM) -> None:
    async def main() -> tuple[int, list[int]]:
        ticks, running = 0, True

        async def tick() -> None:
            nonlocal ticks
            while running:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        sizes = [o.num_token_ids async for o in llm.generate([1, 2], greedy(200, ignore_eos=True))]
        running = False
        await ticking
        return ticks, sizes

    ticks, sizes = asyncio.run(main())
    # An output that the loop did not take at once has more than one token.
    assert sizes == sorted(set(sizes))
    assert len(sizes) > 100
    assert sizes[-1] == 200
    assert ticks > 10


@pytest.mark.parametrize("requests", [1, 8])
def test_a_loop_is_woken_once_for_each_step_whatever_it_brings(
    requests: int, llm: AsyncLLM
) -> None:
    """Streams of thirty tokens: the wake-ups do not grow with their number."""
    wakes = 0

    async def main() -> None:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counting(*arguments: Any, **keywords: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return call(*arguments, **keywords)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        params = greedy(30, ignore_eos=True)
        await asyncio.gather(*(tokens(llm, [7 + i], params) for i in range(requests)))
        loop.call_soon_threadsafe = call  # type: ignore[method-assign]

    steps = llm.stats.steps
    asyncio.run(main())
    assert 30 <= wakes <= llm.stats.steps - steps


def test_a_task_that_does_not_wait_is_not_woken(llm: AsyncLLM) -> None:
    """Answers that come before it takes any wake it once, however many they are."""

    async def main() -> list[int]:
        answers, taken = Answers(asyncio.get_running_loop()), []

        async def take() -> None:
            while len(taken) < 4:
                if not answers.pending:
                    await answers.wait()
                taken.append(len(answers.pending))
                answers.take()

        task = asyncio.create_task(take())
        await asyncio.sleep(0)
        for index in range(4):
            answers.put(OutputDelta(request_id="a", index=index, new_token_ids=[index]))
        await task
        return taken

    assert asyncio.run(main()) == [4, 3, 2, 1]


def test_deltas_that_nobody_has_taken_are_joined() -> None:
    """A slow task takes all ids of a sample at once, with the reason of the last delta.

    Samples of one request come in turn; each has a delta of its own.
    """
    loop = asyncio.new_event_loop()
    try:
        answers = Answers(loop)

        def put(token: int, sample: int) -> None:
            answers.put(
                OutputDelta(
                    request_id="a",
                    index=sample,
                    new_token_ids=[10 * sample + token],
                    new_logprobs=[TokenLogprobs(-float(token), ())],
                    finish_reason="length" if token == 3 else None,
                )
            )

        for token in range(4):
            put(token, 0)
            put(token, 1)
        first = answers.take()
        put(4, 0)
        answers.put(Ended(EngineClosedError("closed")))
    finally:
        loop.close()
    second, third, ended = answers.pending
    assert isinstance(ended, Ended)
    for delta, ids in ((first, [0, 1, 2, 3]), (second, [10, 11, 12, 13]), (third, [4])):
        assert isinstance(delta, OutputDelta)
        assert delta.new_token_ids == ids
        assert len(delta.new_logprobs or ()) == len(ids)
        assert delta.finish_reason == ("length" if len(ids) == 4 else None)


@pytest.mark.parametrize("stop", [(), ("no such text",)], ids=["ids", "text"])
def test_without_stream_a_sample_has_one_output(stop: tuple[str, ...]) -> None:
    """Also where its text is searched as it comes."""

    async def main() -> list[RequestOutput]:
        params = greedy(30, n=2, ignore_eos=True, stop=stop)
        async with AsyncLLM("demo", device="cpu", attention="sdpa", max_model_len=64) as llm:
            return [output async for output in llm.generate([7, 8], params, stream=False)]

    outputs = asyncio.run(main())
    assert sorted(output.index for output in outputs) == [0, 1]
    assert all(output.finished and output.num_token_ids == 30 for output in outputs)
    assert all(output.new_token_ids == output.token_ids for output in outputs)
    assert all(output.new_text == output.text for output in outputs)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_cancelled_task_aborts_its_request_and_frees_its_blocks(
    samples: int, llm: AsyncLLM
) -> None:
    """At once: the next look at the engine sees them free. Other tasks go on."""

    async def main() -> None:
        other = asyncio.create_task(tokens(llm, [1, 2], greedy(300, ignore_eos=True)))
        while not llm.stats.running:
            await asyncio.sleep(0)
        before = llm.stats.finished
        params = greedy(400, ignore_eos=True, n=samples)
        gone = asyncio.create_task(tokens(llm, PROMPTS[2], params))
        while llm.stats.running < 1 + samples:
            await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        stats = llm.stats
        assert (stats.running, stats.waiting, stats.finished) == (1, 0, before + samples)
        assert len(await other) == 300
        assert llm.stats.free_blocks == llm.stats.blocks

    asyncio.run(main())


def test_a_loop_that_was_closed_with_an_open_stream_is_forgotten(llm: AsyncLLM) -> None:
    """With the next loop's first request; its own stream can run no code any more."""
    loop = asyncio.new_event_loop()
    stream = llm.generate(PROMPTS[0], greedy(max_tokens=400, ignore_eos=True))
    loop.run_until_complete(anext(stream))
    loop.close()
    assert len(llm._mailboxes) == 1
    assert asyncio.run(tokens(llm, PROMPTS[0], greedy()))
    assert not llm._mailboxes


def test_what_is_refused_harms_only_its_task(llm: AsyncLLM) -> None:
    async def main() -> list[Any]:
        wrong = [
            tokens(llm, [], greedy()),
            tokens(llm, [1] * 510, greedy()),
            tokens(llm, 5, greedy()),
        ]
        good = tokens(llm, PROMPTS[0], greedy(ignore_eos=True))
        return await asyncio.gather(*wrong, good, return_exceptions=True)

    empty, long, none, good = asyncio.run(main())
    assert isinstance(empty, InvalidPromptError)
    assert isinstance(long, RequestTooLongError)
    assert isinstance(none, InvalidPromptError)
    assert len(good) == 6
    assert not llm._mailboxes


def test_a_request_whose_last_output_cannot_be_made_is_aborted(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine keeps a request with stop strings until its door has searched all of its text."""
    aborted: list[str] = []

    def push(stream: OutputStream, delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            raise ValueError("no text")

    monkeypatch.setattr(OutputStream, "push", push)
    monkeypatch.setattr(llm._client, "abort", aborted.extend)
    with pytest.raises(ValueError, match="no text"):
        asyncio.run(tokens(llm, PROMPTS[0], greedy()))
    assert len(aborted) == 1


def test_leaving_the_generator_aborts_its_request(llm: AsyncLLM) -> None:
    async def main() -> None:
        outputs = llm.generate(PROMPTS[0], greedy(400, ignore_eos=True))
        await anext(outputs)
        await outputs.aclose()
        assert (llm.stats.running, llm.stats.waiting) == (0, 0)

    asyncio.run(main())


def test_a_loop_that_ends_with_requests_unfinished_leaves_the_engine_to_others(
    llm: AsyncLLM,
) -> None:
    """The engine cannot wake a loop that is closed: it aborts what that asked for."""
    loop = asyncio.new_event_loop()
    outputs = llm.generate([1, 2], greedy(400, ignore_eos=True))
    loop.run_until_complete(anext(outputs))
    loop.close()
    assert len(asyncio.run(tokens(llm, [3], greedy(6, ignore_eos=True)))) == 6
    while llm.stats.running:
        pass
    assert llm.stats.free_blocks == llm.stats.blocks


def test_a_closed_engine_wakes_its_tasks_and_refuses_others(tiny: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(
            str(tiny), device="cpu", attention="sdpa", max_model_len=512, **{"cache.num_blocks": 64}
        ) as llm:
            waiting = asyncio.create_task(tokens(llm, [1, 2], greedy(500, ignore_eos=True)))
            while not llm.stats.running:
                await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="this AsyncLLM is closed; create a new one"):
            await waiting
        with pytest.raises(EngineClosedError, match="this AsyncLLM is closed"):
            await tokens(llm, [1], greedy())

    assert CONFIG["max_position_embeddings"] >= 512
    asyncio.run(main())
