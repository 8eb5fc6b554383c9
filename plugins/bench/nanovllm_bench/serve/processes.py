"""Several client processes that carry one load, for one core is full at some ten thousand events/s.

Each process opens its connections and warms up; when all are ready, they start at one moment of the
clock that the processes of a host share. Every wait has a bound.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from nanovllm_bench.serve.load import Outcome, Share, run_share, warm_up
from nanovllm_core.errors import NanoVLLMError

START_SECONDS = 60.0
"""For a process to start, beside the timeout of its first requests."""
LEAD_SECONDS = 0.05


class ClientError(NanoVLLMError):
    """A client process did not carry its share of the load."""


def divide(load: Share, processes: int) -> list[Share]:
    """Deal the requests and the clients out; no process is without either.

    Long prompts are one process's: the others of its own end are the sign to stop them.
    """
    limit = len(load.requests) if load.clients is None else min(load.clients, len(load.requests))
    count = min(processes, limit)
    return [
        replace(
            load,
            requests=load.requests[index::count],
            clients=None if load.clients is None else len(range(index, load.clients, count)),
            warm_up=load.warm_up[index::count],
            long_prompts=load.long_prompts if index == 0 else None,
        )
        for index in range(count)
    ]


def carry(load: Share, processes: int) -> list[Outcome]:
    """Carry a load with up to `processes` processes; their outcomes.

    Raises ClientError where a process fails or takes longer than its requests may.
    """
    shares = divide(load, processes)
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        children = [_Child.start(context, share, stack) for share in shares]
        limit = START_SECONDS + load.endpoint.timeout
        for child in children:
            child.receive("ready", limit)
        start = time.monotonic() + LEAD_SECONDS
        for child in children:
            child.connection.send(start)
        return [child.receive("done", _longest(child.share)) for child in children]


def _longest(share: Share) -> float:
    """Seconds that a share may take where every request takes its whole time."""
    timeout = share.endpoint.timeout
    long = timeout if share.long_prompts is not None else 0.0
    if share.clients is None:
        last = max((request.at or 0.0 for request in share.requests), default=0.0)
        return START_SECONDS + last + timeout + long
    return START_SECONDS + timeout * -(-len(share.requests) // share.clients) + long


@dataclass(slots=True)
class _Child:
    share: Share
    process: Any
    connection: Connection

    @classmethod
    def start(cls, context: Any, share: Share, stack: ExitStack) -> _Child:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve_share, args=(share, theirs), daemon=True)
        process.start()
        theirs.close()  # so that its end is seen when the process ends
        child = cls(share, process, ours)
        stack.callback(child.end)
        return child

    def receive(self, what: str, seconds: float) -> Any:
        """The value that comes with the message `what`."""
        if not self.connection.poll(seconds):
            raise ClientError(
                f"a client process was not {what} after {seconds:.0f} s; is the endpoint there? "
                "Give a shorter --timeout to see its errors earlier"
            )
        try:
            said, value = self.connection.recv()
        except EOFError:
            raise ClientError(
                f"a client process ended before it was {what}, with exit status "
                f"{self._exit_code()}; its own output says why"
            ) from None
        if said != what:
            raise ClientError(f"a client process failed: {value}")
        return value

    def _exit_code(self) -> int | None:
        self.process.join(5)
        code: int | None = self.process.exitcode
        return code

    def end(self) -> None:
        """The process is over, or is ended."""
        self.connection.close()
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


def _serve_share(share: Share, connection: Connection) -> None:
    """What a client process does."""

    async def main() -> None:
        async with share.endpoint.open_session() as session:
            answers = await warm_up(share, session)
            if errors := [a for a in answers if a.error]:
                first = errors[0]
                raise ClientError(
                    f"{len(errors)} of {len(answers)} requests of the warm-up failed, the first "
                    f"with {first.error}: {first.message}"
                )
            gc.collect()
            gc.freeze()  # what lives as long as the run is not visited by a collection during it
            connection.send(("ready", None))
            outcome = await run_share(share, session, await asyncio.to_thread(connection.recv))
            connection.send(("done", outcome))

    try:
        asyncio.run(main())
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        return  # the parent has ended
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
