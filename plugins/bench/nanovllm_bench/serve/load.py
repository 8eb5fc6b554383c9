"""The load of one process: requests at their times or from clients that wait for their answers.

A request's clock starts when it arrives. In an open loop that is its place in the schedule, also
where this process is late to send it; in a closed loop it is the moment of sending.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from nanovllm_bench.serve.client import Answer, Endpoint, Request, ask

LAG_PERIOD = 0.01
TIMER_SECONDS = 0.0015
"""An event loop's timers may be a millisecond late: the rest of a wait is spent turn by turn."""


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Prompts that arrive at a steady rate for as long as the other requests run."""

    rate: float
    length: int
    output_len: int = 8
    vocab_size: int = 10_000
    seed: int = 0

    def requests(self) -> Iterator[Request]:
        """One after the other, without end; no two share a prefix."""
        rng, index = random.Random(f"long {self.seed}"), 0
        while True:
            ids = rng.choices(range(self.vocab_size), k=self.length)
            yield Request(ids, self.output_len, index / self.rate)
            index += 1


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a load that one process carries."""

    endpoint: Endpoint
    requests: Sequence[Request]
    clients: int | None = None
    """Of a closed loop; None: each request arrives at its own time."""
    warm_up: Sequence[Request] = ()
    long_prompts: LongPrompts | None = None


@dataclass(slots=True)
class Outcome:
    """Answers in the order of the requests, and how the process itself did."""

    answers: list[Answer]
    long_answers: list[Answer] = field(default_factory=list)
    lag_ms: list[float] = field(default_factory=list)
    """How late a timer of the event loop was, each 10 ms."""
    cpu_share: float = 0.0
    """Of one core, while the load ran."""


async def run_share(share: Share, session: aiohttp.ClientSession, start: float) -> Outcome:
    """Carry the load, from `start` on the event loop's clock."""
    await until(start)
    cpu, wall = time.process_time(), time.perf_counter()
    outcome = Outcome([])
    over = asyncio.Event()
    async with watched_lag(outcome.lag_ms), asyncio.TaskGroup() as tasks:
        if share.long_prompts is not None:
            tasks.create_task(_send_long(share, session, start, over, outcome.long_answers))
        if share.clients is None:
            outcome.answers = await _open_loop(share, session, start)
        else:
            outcome.answers = await _closed_loop(share, share.clients, session)
        over.set()
    outcome.cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    return outcome


async def warm_up(share: Share, session: aiohttp.ClientSession) -> list[Answer]:
    """Send the first requests, all at once; they open connections and are not measured."""
    asked = (ask(session, share.endpoint, request, None) for request in share.warm_up)
    return await asyncio.gather(*asked)


async def _open_loop(share: Share, session: aiohttp.ClientSession, start: float) -> list[Answer]:
    async def at_its_time(request: Request) -> Answer:
        arrived = start + (request.at or 0.0)
        await until(arrived)
        return await ask(session, share.endpoint, request, arrived)

    return await asyncio.gather(*map(at_its_time, share.requests))


async def _closed_loop(share: Share, clients: int, session: aiohttp.ClientSession) -> list[Answer]:
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(share.requests))

    async def client() -> None:
        for index, request in waiting:
            answers[index] = await ask(session, share.endpoint, request, None)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [answers[index] for index in sorted(answers)]


async def _send_long(
    share: Share,
    session: aiohttp.ClientSession,
    start: float,
    over: asyncio.Event,
    answers: list[Answer],
) -> None:
    """Send long prompts at their times until the others are over, and wait for their answers."""
    assert share.long_prompts is not None
    asked = []
    for request in share.long_prompts.requests():
        arrived = start + (request.at or 0.0)
        try:
            async with asyncio.timeout_at(arrived):
                await over.wait()
            break
        except TimeoutError:
            asked.append(asyncio.create_task(ask(session, share.endpoint, request, arrived)))
    answers += await asyncio.gather(*asked)


async def until(moment: float) -> None:
    """Wait for a moment of the event loop's clock, without a timer's delay."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(moment - loop.time() - TIMER_SECONDS)
    while loop.time() < moment:
        await asyncio.sleep(0)


@asynccontextmanager
async def watched_lag(lag_ms: list[float]) -> AsyncIterator[None]:
    """Append, each 10 ms, by how many milliseconds a timer of the event loop is late."""
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        while True:
            due = loop.time() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            lag_ms.append(1e3 * (loop.time() - due))

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
