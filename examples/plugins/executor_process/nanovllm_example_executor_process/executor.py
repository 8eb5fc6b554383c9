"""A worker in a spawned process, reached through a pipe.

One thread sends what is in the outbox, another puts what it receives into the inbox. So `submit`
never waits, every other wait has a bound, and Ctrl-C cannot tear a message apart.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from nanovllm_core.api import (
    Executor,
    ExecutorError,
    StepPlan,
    StepResult,
    TokenMasks,
    WorkerInfo,
    WorkerSetup,
)
from nanovllm_example_executor_process.plugin import ProcessOptions
from nanovllm_example_executor_process.process import COLLECT, serve


class ProcessExecutor(Executor):
    """Sends plans and asks for results; see `nanovllm_core.api.Executor` for the contract."""

    def __init__(self, options: ProcessOptions) -> None:
        super().__init__(options)
        self._bounds = options
        self._process: SpawnProcess | None = None
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        self._is_asked = False  # for a result; Ctrl-C may have left the wait for it

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        ours, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, setup), daemon=True)
        self._process.start()
        theirs.close()  # the process alone holds it, so its end is the pipe's
        Thread(target=send_all, args=(ours, self._outbox), daemon=True).start()
        Thread(target=receive_all, args=(ours, self._inbox), daemon=True).start()
        return self._receive("start_seconds")  # type: ignore[no-any-return]

    def submit(self, plan: StepPlan) -> None:
        self._send(plan)

    def sample(self, masks: TokenMasks) -> None:
        self._send(masks)

    def collect(self) -> StepResult:
        if not self._is_asked:
            self._send(COLLECT)
            self._is_asked = True
        result = self._receive("step_seconds")
        self._is_asked = False
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._process is not None:
            self._send(None)
            self._outbox.put(b"")
            process, self._process = self._process, None
            process.join(self._bounds.close_seconds)
            process.kill()
            process.join(self._bounds.close_seconds)

    def _running(self) -> SpawnProcess:
        if self._process is None:
            raise ExecutorError("the executor is not running; make a new LLM")
        return self._process

    def _send(self, message: object) -> None:
        self._running()
        self._outbox.put(pickle.dumps(message))

    def _receive(self, bound: str) -> Any:
        process, seconds = self._running(), getattr(self._bounds, bound)
        try:
            message = self._inbox.get(timeout=seconds)
        except Empty:
            reason = f"gave no answer for {seconds} s; look at it with py-spy, or raise {bound}"
            raise ExecutorError(f"rank 0 (process {process.pid}) {reason}") from None
        if message is None:  # the pipe has ended
            process.join(1)
            code = process.exitcode or 0
            end = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            reason = f"ended with {end}; see its stderr and the system's log; make a new LLM"
            raise ExecutorError(f"rank 0 (process {process.pid}) {reason}")
        if isinstance(message, Exception):
            raise message
        return message


def send_all(pipe: Connection, outbox: SimpleQueue[bytes]) -> None:
    """Send messages until an empty one, or until the process has gone."""
    with suppress(OSError):
        for message in iter(outbox.get, b""):
            pipe.send_bytes(message)


def receive_all(pipe: Connection, inbox: SimpleQueue[Any]) -> None:
    """Pass messages on, and None once the process has gone."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(pipe.recv())
    inbox.put(None)
