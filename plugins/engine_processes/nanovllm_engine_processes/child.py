"""An engine's process: an engine loop whose inbox and answers are sockets.

The main thread takes the engine's steps and sends what they give. A second thread receives and
answers pings. A third one ends the process when the door's process has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import zmq

from nanovllm_core.api import EngineConfig, EngineError
from nanovllm_core.frontend import (
    Answer,
    Close,
    Ended,
    EngineLoop,
    EngineStats,
    GetStats,
    Refused,
    ResetPrefixCache,
    Started,
    WaitIdle,
)
from nanovllm_engine_processes import wire
from nanovllm_engine_processes.held_folder import sweep

PARENT_SECONDS = 0.5
"""How often an engine's process looks whether the door's is still there."""
LINGER_MS = 1000
ENGINES_PREFIX = "nanovllm-engines-"
"""Of the names of the folders in which engines have their sockets."""
SHARE_PREFIX = "nanovllm-share-"
"""Of the names of the folders of `EngineShare`."""
REQUESTS = 0
"""The subscriber of all requests; each question has one of its own."""


def inbox_of(folder: str, number: int) -> str:
    """The address at which an engine receives."""
    return f"ipc://{folder}/{number}"


def outbox_of(folder: str) -> str:
    """The address to which all engines send."""
    return f"ipc://{folder}/answers"


def check_path(address: str) -> None:
    """Raises EngineError for an address whose path is longer than a socket's may be."""
    path = address.removeprefix("ipc://")
    size = len(os.fsencode(path))
    if size > zmq.IPC_PATH_MAX_LEN:
        raise EngineError(
            f"the path of a socket in the temporary folder {os.path.dirname(path)} has {size} "
            f"bytes, and may have {zmq.IPC_PATH_MAX_LEN}; set TMPDIR to a shorter folder"
        )


def main() -> None:
    """Serve an engine; `argv` has a name, the folder, its number, and the door's process."""
    # The door's to handle: Ctrl-C, and what a service manager or a closing terminal sends to all.
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    folder, number, parent = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    EngineServer(folder, number, parent).run()


class EngineServer:
    """One engine, served to the process that has started this one."""

    def __init__(self, folder: str, number: int, parent: int) -> None:
        self._folder = folder
        self._number = number
        self._parent = parent
        self._context = zmq.Context()
        self._out = self._connect(outbox_of(folder))
        self._loop: EngineLoop  # the door sends messages to a started engine only
        self._first: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def run(self) -> None:
        """Until the door closes the engine."""
        Thread(target=self._watch_parent, daemon=True).start()
        receiver = Thread(target=self._receive, daemon=True)
        receiver.start()
        start = self._first.get()
        logging.basicConfig(format=f"engine {self._number}: %(levelname)s %(name)s: %(message)s")
        logging.getLogger("nanovllm_core").setLevel(start["log_level"])
        config = EngineConfig.model_validate_json(start["config"])
        loop = self._loop = EngineLoop(config, start["name"])
        loop.subscribers[REQUESTS] = self._deliver
        loop.started.add_done_callback(self._report_start)
        loop.run()
        if loop.started.exception() is None:
            error = None if loop.close_error is None else self._error_row(loop.close_error)
            self._send(wire.CLOSED, [wire.stats_row(loop.last_stats), error])
            receiver.join()  # it ends with `Close`
        self._out.close(linger=LINGER_MS)
        self._context.term()  # what was sent last has arrived, or nobody takes it

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(address)
        return socket

    # -- answers, on the engine's thread

    def _send(self, name: str, content: object) -> None:
        """What no message can hold, such as a plugin's own types in the facts, ends the engine."""
        try:
            message = wire.encode(self._number, name, content)
        except Exception as error:
            message = wire.encode(self._number, wire.ENDED, self._error_row(error))
        self._out.send(message)

    def _error_row(self, error: BaseException) -> wire.ErrorRow:
        return wire.error_row(error, f"engine {self._number} (process {os.getpid()}): ")

    def _report_start(self, started: Future[Started]) -> None:
        error = started.exception()
        if error is not None:
            self._send(wire.FAILED, self._error_row(error))
            return
        facts = started.result()
        tokenizer = None if facts.tokenizer is None else str(facts.tokenizer.folder)
        self._send(wire.STARTED, [wire.info_row(facts.info), tokenizer, facts.sampling_defaults])

    def _deliver(self, answer: Answer) -> None:
        """Questions have subscribers of their own."""
        if isinstance(answer, Ended):
            self._send(wire.ENDED, self._error_row(answer.error))
        else:
            self._send(*wire.answer_row(answer))

    def _answer(self, number: int, answer: Answer) -> None:
        """A question was answered; an engine that ended says so by `_deliver`."""
        self._loop.subscribers.pop(number, None)
        if isinstance(answer, EngineStats):
            self._send(wire.STATS, [number, wire.stats_row(answer)])

    # -- messages, on a thread of their own

    def _receive(self) -> None:
        """Until `Close`, or the end of a start that failed."""
        with (
            suppress(zmq.ContextTerminated),
            self._context.socket(zmq.PULL) as inbox,
            self._connect(outbox_of(self._folder)) as out,
        ):
            inbox.linger = out.linger = 0
            inbox.set_hwm(0)
            inbox.bind(inbox_of(self._folder, self._number))
            self._pass_on(inbox, out)

    def _pass_on(self, inbox: zmq.Socket[bytes], out: zmq.Socket[bytes]) -> None:
        while True:
            name, content = wire.decode(inbox.recv())
            if name == wire.PING:
                out.send(wire.encode(self._number, wire.PONG, self._pulse()))
            elif name == wire.START:
                self._first.put(content)
            else:
                message = wire.read_message(name, content)
                if isinstance(message, Refused):
                    out.send(wire.encode(self._number, *wire.answer_row(message)))
                    continue
                if isinstance(message, GetStats | WaitIdle | ResetPrefixCache):
                    number = message.subscriber
                    self._loop.subscribers[number] = partial(self._answer, number)
                self._loop.inbox.put(message)
                if isinstance(message, Close):
                    return

    def _pulse(self) -> tuple[int, bool]:
        """How often the loop has turned, and whether it works; (0, False) before the start."""
        loop = getattr(self, "_loop", None)
        return (0, False) if loop is None else (loop.turns, not loop.is_idle)

    # -- the end of the door's process, on a thread of its own

    def _watch_parent(self) -> None:
        """Until this process ends, so a step or a close that hangs does not outlive the door."""
        while os.getppid() == self._parent:
            time.sleep(PARENT_SECONDS)
        try:  # Nobody else is left to remove what it has made.
            sweep(ENGINES_PREFIX)
            sweep(SHARE_PREFIX)
        finally:
            os.killpg(0, signal.SIGKILL)
