"""`open_engine`: a started engine on a thread of its own, and the messages that it takes."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.engine import Engine, EngineStats, OutputDelta
from nanovllm_core.errors import EngineClosedError
from nanovllm_core.frontend.loop import Deliver, EngineLoop
from nanovllm_core.frontend.messages import (
    Abort,
    AddRequests,
    Answer,
    Close,
    EndAt,
    Ended,
    GetStats,
    Message,
    NewRequest,
    Refused,
    ResetPrefixCache,
    WaitIdle,
)

EXIT_SECONDS = 10.0
"""A program that ends waits at most so long for a step that is under way."""


def open_engine(config: EngineConfig, name: str = "engine") -> EngineClient:
    """Start an engine on a thread of its own; returns when it can take requests.

    Raises the error of the start. Ctrl-C ends the start. `name` is how errors call the engine.
    """
    return EngineClient(config, name)


class EngineClient:
    """Sends messages to an engine. Threads may share one. Made by `open_engine`.

    One that nobody holds any more closes its engine. `info`, `tokenizer` and `sampling_defaults`
    are facts of the started engine.
    """

    def __init__(self, config: EngineConfig, name: str) -> None:
        self.config = config
        self._name = name
        self._pid = os.getpid()
        self._request_ids, self._subscribers = count(), count()
        self._loop = EngineLoop(config, name)
        self._thread = threading.Thread(target=self._loop.run, name="nanovllm-engine", daemon=True)
        self._thread.start()
        try:
            started = self._loop.started.result()
        except BaseException:
            _interrupt_start(self._loop, self._thread)
            raise
        self.info = started.info
        self.tokenizer = started.tokenizer
        self.sampling_defaults = started.sampling_defaults
        self._closing = weakref.finalize(self, _close, self._loop, self._thread, self._pid)
        self._closing.atexit = False  # A program that ends frees the device in any case.
        atexit.unregister(_stop_at_exit)
        atexit.register(_stop_at_exit)  # It comes before what the start has registered.
        _running[self._thread] = self._loop, self._pid

    @property
    def engine(self) -> Engine:
        """The engine itself, once no request is unfinished that came by messages.

        Its thread takes steps only for those, so that the caller may take steps of its own.
        """
        if self._loop.is_open:
            self._ask(WaitIdle)
        return self._loop.engine

    # -- messages

    def new_request_id(self) -> str:
        return str(next(self._request_ids))

    def subscribe(self, deliver: Deliver) -> int:
        """The number under which `deliver` gets answers, on the engine's thread."""
        number = next(self._subscribers)
        self._loop.subscribers[number] = deliver
        return number

    def unsubscribe(self, number: int) -> None:
        self._loop.subscribers.pop(number, None)

    def send(self, message: Message) -> None:
        """Put a message into the inbox; EngineClosedError where nobody reads it any more."""
        self.check_open()
        self._loop.inbox.put(message)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests, before the engine's next step; of a closed engine too."""
        if request_ids:
            self._loop.inbox.put(Abort(tuple(request_ids)))

    def end_at(self, request_id: str, index: int, num_tokens: int, stop: str | None) -> None:
        """`Engine.end_at` as a message."""
        self._loop.inbox.put(EndAt(request_id, index, num_tokens, stop))

    def stats(self) -> EngineStats:
        """The counters, between two steps; those at the end where the engine is closed."""
        if not self._loop.is_open:
            return self._loop.last_stats
        return self._ask(GetStats)

    def reset_prefix_cache(self) -> None:
        self._ask(ResetPrefixCache)

    def _ask(
        self, question: Callable[[int], GetStats | WaitIdle | ResetPrefixCache]
    ) -> EngineStats:
        with Mailbox(self) as mailbox:
            self.send(question(mailbox.number))
            stats: EngineStats = mailbox.wait()
            return stats

    # -- the end

    def check_open(self) -> None:
        """Raises EngineClosedError where the engine is closed, or belongs to another process."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this {self._name} was created in process {self._pid}, and this is "
                f"{os.getpid()}: neither threads nor a GPU outlive a fork; create a new one here"
            )
        if not (self._loop.is_open and self._closing.alive):
            raise EngineClosedError(f"this {self._name} is closed; create a new one")

    def close(self) -> None:
        """Free the device, once the step that is under way has ended. Closing twice is fine."""
        self._closing()
        if os.getpid() == self._pid:
            self._thread.join()  # where another thread closes at the same time


class Mailbox:
    """The answers for one caller. A context manager: leaving it aborts what is unfinished."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self.unfinished: dict[str, int] = {}
        """By request: samples whose last delta has not come."""
        self._ended: Ended | None = None
        self.refused = 0
        """Which of the requests was refused."""
        self.number = client.subscribe(self._answers.put)

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Send requests, all of which are added before the next step."""
        self.unfinished.update((new.request_id, new.params.n) for new in requests)
        self._client.send(AddRequests(self.number, tuple(requests)))

    def deltas(self) -> Iterator[OutputDelta]:
        """Wait for the next deltas of these requests.

        A sample counts as finished once its caller has dealt with its last delta and takes the
        next. Raises the error for which a request was refused, or which ended the engine.
        """
        for delta in self.wait():
            yield delta
            if delta.finish_reason is not None:
                self.unfinished[delta.request_id] -= 1
                if not self.unfinished[delta.request_id]:
                    del self.unfinished[delta.request_id]

    def wait(self) -> Any:
        """The next answer; an error is raised."""
        self._client.check_open()
        answer = self._ended or self._answers.get()
        if isinstance(answer, Refused):
            self.refused = answer.index
            self.unfinished.clear()
            raise answer.error
        if isinstance(answer, Ended):
            self._ended = answer
            raise answer.error
        return answer

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.unsubscribe(self.number)
        self._client.abort(tuple(self.unfinished))


def _close(loop: EngineLoop, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # The thread is the parent's.
    loop.inbox.put(Close())
    if thread is not threading.current_thread():  # where the engine's own code dropped the last
        thread.join()
    _running.pop(thread, None)
    if loop.close_error is not None:
        raise loop.close_error


_running: dict[threading.Thread, tuple[EngineLoop, int]] = {}
"""The engines that are not closed, and the process of each."""


def _stop_at_exit() -> None:
    """Let no thread be at a step when Python takes itself down: what a step calls would crash."""
    for thread, (loop, pid) in tuple(_running.items()):
        if os.getpid() == pid:
            loop.inbox.put(Close(free=False))
            thread.join(EXIT_SECONDS)


def _interrupt_start(loop: EngineLoop, thread: threading.Thread) -> None:
    """End a start that nobody waits for any more: Ctrl-C reaches the main thread alone."""
    loop.inbox.put(Close())
    while thread.is_alive():
        if loop.is_starting:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), interrupt)
        thread.join(1.0)
