"""All ranks of an engine: what is sent to them, what comes back, and which of them has failed."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from nanovllm_core.api import ExecutorError
from nanovllm_executor_parallel.messages import CLOSE, encode
from nanovllm_executor_parallel.plugin import ParallelOptions
from nanovllm_executor_parallel.process import RankProcess

logger = logging.getLogger(__name__)

MAX_PING_SECONDS = 1.0
CAUSE_SECONDS = 1.0
"""After a rank has lost another: how long to wait for news of that one."""


class Ranks:
    """The processes, all of them watched in every wait. The first failure ends them all."""

    def __init__(self, bounds: ParallelOptions) -> None:
        self.are_running = True
        self._bounds = bounds
        self._processes: list[RankProcess] = []
        self._ping_seconds = min(MAX_PING_SECONDS, bounds.stall_seconds / 4)
        self._still = 0
        """The pings since a rank last did something of which the engine knows.

        Pings, not seconds: where the engine's own process was stopped, no rank is to blame.
        """

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._processes)

    def add(self, process: RankProcess) -> None:
        """A rank that has been spawned, the next in order."""
        self._processes.append(process)

    def send(self, message: object) -> None:
        """Send to all ranks; never waits. A rank that has ended is noticed in the next wait."""
        frame = encode(message)
        for one in self._processes:
            one.messages.add(frame)
        for one in self._processes:
            one.messages.flush()

    def receive(self, rank: int, until: float | None = None) -> Any:
        """The next message of a rank.

        Raises what a rank raised; or ExecutorError with the rank: it has ended, or is ready and
        does not answer, or has sent nothing `until` then, which is the bound of the start. Without
        `until`, of a step, the bound is the time in which no rank moves.
        """
        inbox = self._processes[rank].inbox
        self._still, pinged = 0, time.monotonic()
        for one in self._processes:
            one.listen()
        while not inbox:
            self._poll(self._ping_seconds)
            self._check_failures()
            self._check_answers()
            if until is None:
                self._check_moves()
            elif time.monotonic() > until:
                bound = f"start_seconds ({self._bounds.start_seconds:g} s)"
                self._fail(f"did not start within {bound}", self._awaited())
            if time.monotonic() - pinged >= self._ping_seconds:
                pinged = time.monotonic()
                self._still += 1
                for one in self._processes:
                    one.ping()
        return inbox.popleft()

    def check(self) -> None:
        """Raise the failure of a rank that has ended while nothing was asked of it."""
        self._poll(0)
        self._check_failures()

    def _poll(self, seconds: float) -> None:
        """Take all that has come, after at most this long, and send what could not be sent."""
        poller = select.poll()
        for one in self._processes:
            if not one.messages.has_ended:
                events = select.POLLIN | (select.POLLOUT if one.messages.has_unsent else 0)
                poller.register(one.messages, events)
                poller.register(one.watch, select.POLLIN)
        ready = dict(poller.poll(max(0.0, seconds) * 1000))
        for one in self._processes:
            has_moved = False
            if one.messages.fileno() in ready:
                one.messages.flush()
                has_moved = one.read()
            if one.watch.fileno() in ready:
                has_moved |= one.read_status()
            if has_moved:
                self._still = 0

    # -- failures ---------------------------------------------------------------------------------

    def _check_failures(self) -> None:
        """Raise the failure of a rank; where it lost another one, the failure of that."""
        for one in self._processes:
            one.notice_end()
        if not any(one.has_failed for one in self._processes):
            return
        until = time.monotonic() + CAUSE_SECONDS
        while (cause := self._cause()) is None and time.monotonic() < until:
            self._poll(until - time.monotonic())
        if cause is None:  # all that came are of ranks that lost others
            lost = {one.failure.time: one for one in self._processes if one.failure}
            cause = lost[min(lost)]
        if cause.failure is None:
            self._fail(f"{cause.how_it_ended()}; see its stderr and the system's log", [cause])
        self.kill()
        raise cause.failure.error

    def _cause(self) -> RankProcess | None:
        """A rank that failed by itself."""
        for one in self._processes:
            if one.has_failed and not (one.failure and one.failure.lost_peer):
                return one
        return None

    def _check_answers(self) -> None:
        bound = self._bounds.stall_seconds
        silent = [one for one in self._processes if one.unanswered * self._ping_seconds >= bound]
        if silent:
            self._fail(
                f"gave no answer for stall_seconds ({bound:g} s): stopped, or stuck; look at it "
                "with py-spy, or raise stall_seconds",
                silent,
            )

    def _check_moves(self) -> None:
        bound = self._bounds.stall_seconds
        if self._still * self._ping_seconds >= bound:
            self._fail(
                f"did nothing for stall_seconds ({bound:g} s), nor did the others; look at it with "
                "py-spy, or raise stall_seconds",
                self._awaited(),
            )

    def _awaited(self) -> list[RankProcess]:
        """The ranks that others wait for: those with the fewest collectives, or in none."""

        def reached(one: RankProcess) -> tuple[int, bool]:
            status = one.status
            return (-1, False) if status is None else (status.collectives, bool(status.waiting_in))

        least = min(map(reached, self._processes))
        return [one for one in self._processes if reached(one) == least]

    def _fail(self, reason: str, failed: Sequence[RankProcess]) -> NoReturn:
        self.kill()
        told = "; ".join(f"{one} {one.status}" for one in self._processes if one.status)
        names = ", ".join(map(str, failed))
        raise ExecutorError(f"{names} {reason}; make a new LLM" + (f" ({told})" if told else ""))

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Let all ranks end, and kill those that have not in time."""
        self.send(CLOSE)
        until = time.monotonic() + self._bounds.close_seconds
        while not all(one.has_ended() for one in self._processes) and time.monotonic() < until:
            for one in self._processes:
                one.messages.flush()
            time.sleep(0.005)
        self.kill()

    def kill(self) -> None:
        """End all processes now."""
        self.are_running = False
        for one in self._processes:
            one.kill()
        for one in self._processes:
            if not one.release(self._bounds.close_seconds):
                logger.warning("%s does not end although it was killed; see the system's log", one)
