"""The engine client `shared`: the engine of another process, which an `EngineShare` lends out."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import zmq

from nanovllm_core.api import (
    EngineClosedError,
    EngineConfig,
    EngineError,
    NanoVLLMError,
    Plugins,
    WorkerInfo,
)
from nanovllm_core.frontend import (
    AddRequests,
    Close,
    Deliver,
    Ended,
    EngineClient,
    EngineStats,
    Message,
    Refused,
    Started,
    Tokenizer,
)
from nanovllm_engine_processes import wire
from nanovllm_engine_processes.plugin import SharedOptions
from nanovllm_engine_processes.sharing import LINGER_MS, LOOK_MS, door_of, is_running, share_of

_lines = count()


class SharedClient(EngineClient):
    """Sends messages to an engine that belongs to another process, by way of a thread of this one.

    Closing it aborts its own requests; the engine goes on for others. `info` is as it was when the
    client started.
    """

    options: SharedOptions

    def __init__(
        self, options: SharedOptions, config: EngineConfig, name: str, plugins: Plugins
    ) -> None:
        super().__init__(options, config, name, plugins)
        self._subscribers = count()
        self._line = Line(options.folder, name, config.chat_template_kwargs)
        self._thread = threading.Thread(target=self._line.run, name="nanovllm-shared", daemon=True)

    def start(self) -> None:
        """Waits for as long as there is no engine, and the process that is to share it runs."""
        self._thread.start()
        try:
            started = self._line.started.result()
        except BaseException:
            self._line.post(Close())
            self._thread.join()
            raise
        self.tokenizer = started.tokenizer
        self.sampling_defaults = started.sampling_defaults
        self._info = started.info
        self._closing = weakref.finalize(self, _close, self._line, self._thread, self._pid)

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def new_request_id(self) -> str:
        """Of no other client of any process: the name of this one's line stands in front."""
        return f"{self._line.door}-{super().new_request_id()}"

    def subscribe(self, deliver: Deliver) -> int:
        number = next(self._subscribers)
        self._line.subscribers[number] = deliver
        self._line.put(wire.SUBSCRIBE, number)
        return number

    def unsubscribe(self, number: int) -> None:
        if self._line.subscribers.pop(number, None) is not None:
            self._line.put(wire.UNSUBSCRIBE, number)

    def post(self, message: Message) -> None:
        self._line.post(message)

    def stats(self) -> EngineStats:
        """The counters of the whole engine; those of the last answer where this is closed.

        Raises EngineClosedError where a fault has ended the way to the engine, and not `close()`.
        """
        if (error := self._line.error) is not None:
            raise EngineClosedError(f"{error}; create a new {self._name}") from error
        return super().stats() if self._line.is_open else self._line.last_stats

    @property
    def is_open(self) -> bool:
        return self._line.is_open and self._closing.alive

    def close(self) -> None:
        self._closing()
        if os.getpid() == self._pid:
            self._thread.join()  # where another thread closes at the same time


def _close(line: Line, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # The thread is the parent's.
    line.post(Close())
    if thread is not threading.current_thread():
        thread.join()


class Line:
    """The sockets between one client and the share. `run` is the body of the thread that has them.

    It holds no client, so that one that nobody holds can close it.
    """

    def __init__(self, folder: Path, name: str, template_kwargs: Mapping[str, Any]) -> None:
        self.door = f"{os.getpid()}.{next(_lines)}"
        """Its name: none that a later line of any process has."""
        self.started: Future[Started] = Future()
        self.subscribers: dict[int, Deliver] = {}
        self.is_open = True
        self.error: NanoVLLMError | None = None
        """What ended the line, where `Close` did not."""
        self.last_stats = EngineStats()
        self._folder = folder
        self._name = name
        self._template_kwargs = template_kwargs
        self._inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._bell, self._rope = socket.socketpair()
        """Rung by other threads: a socket of zmq is for one thread alone."""
        self._bell.setblocking(False)
        self._rope.setblocking(False)

    def post(self, message: Message) -> None:
        """Send a message of a door; never waits."""
        self.put(type(message).__name__, message)

    def put(self, name: str, content: Any) -> None:
        """Send anything; a finaliser may call it between any two lines."""
        self._inbox.put((name, content))
        with suppress(OSError):  # it rings already, or is closed
            self._rope.send(b"!")

    def run(self) -> None:
        """Start, pass on until `Close` or the end of the share, and tell everybody of the end."""
        try:
            with zmq.Context() as context:
                inbox, out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
                with inbox, out:
                    self._connect(inbox, out)
                    self.error = self._pass_on(inbox, out)
        except NanoVLLMError as fault:
            self.error = fault
        except Exception as fault:
            self.error = EngineError(f"the way to the shared engine failed: {fault!r}")
            self.error.__cause__ = fault
        self.is_open = False
        closed = EngineClosedError(f"this {self._name} is closed; create a new one")
        error = self.error or closed
        if not self.started.done():
            self.started.set_exception(error)
        for deliver in tuple(self.subscribers.values()):
            with suppress(Exception):  # such as an event loop that is closed
                deliver(Ended(error))
        self._bell.close()
        self._rope.close()
        (self._folder / self.door).unlink(missing_ok=True)

    def _connect(self, inbox: zmq.Socket[bytes], out: zmq.Socket[bytes]) -> None:
        try:
            self._share = int((self._folder / "pid").read_text())
        except (OSError, ValueError) as error:
            raise EngineError(
                f"no engine is shared in the folder {str(self._folder)!r} ({error}); give "
                "engine_client.options.folder that of a process which shares one"
            ) from error
        inbox.set_hwm(0)
        out.set_hwm(0)
        inbox.linger, out.linger = 0, LINGER_MS
        inbox.bind(door_of(self._folder, self.door))
        out.connect(share_of(self._folder))
        out.send(wire.encode(self.door, wire.OPEN, os.getpid()))

    def _pass_on(self, inbox: zmq.Socket[bytes], out: zmq.Socket[bytes]) -> NanoVLLMError | None:
        """Until `Close` (None), or the end of the share (the error)."""
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        looked = time.monotonic()
        while True:
            ready = dict(poller.poll(LOOK_MS))
            if inbox in ready:
                name, subscriber, content = wire.decode(inbox.recv())
                if name == wire.CLOSED:
                    return wire.read_error(content)
                self._hand_out(name, subscriber, content)
            elif time.monotonic() - looked > LOOK_MS / 1000:
                looked = time.monotonic()
                if not is_running(self._share):
                    return EngineError(
                        f"the process {self._share} that shares the engine has ended"
                    )
            if self._bell.fileno() in ready:
                with suppress(BlockingIOError):
                    self._bell.recv(4096)
            while not self._inbox.empty():
                name, content = self._inbox.get()
                self._send(out, name, content)
                if name == Close.__name__:
                    return None

    def _send(self, out: zmq.Socket[bytes], name: str, content: Any) -> None:
        """What no message can hold is refused here."""
        if isinstance(content, AddRequests):
            packed: list[wire.PackedRequest] = []
            try:
                for new in content.requests:
                    packed.append(wire.pack_request(new))
            except NanoVLLMError as error:
                names = tuple(one.request_id for one in content.requests)
                self._deliver(content.subscriber, Refused(error, names, len(packed)))
                return
            content = wire.PackedRequests(content.subscriber, packed)
        out.send(wire.encode(self.door, name, content))

    def _hand_out(self, name: str, subscriber: int, content: Any) -> None:
        if name == wire.STARTED:
            info, folder, defaults = content
            tokenizer = None if folder is None else Tokenizer.find(folder, self._template_kwargs)
            self.started.set_result(Started(wire.read_info(info), tokenizer, defaults))
            return
        answer = wire.read_answer(name, content)
        if isinstance(answer, EngineStats):
            self.last_stats = answer
        self._deliver(subscriber, answer)

    def _deliver(self, subscriber: int, answer: Any) -> None:
        """A subscriber that cannot take an answer is forgotten, and its requests are aborted."""
        deliver = self.subscribers.get(subscriber)
        if deliver is None:
            return
        try:
            deliver(answer)
        except Exception:  # such as an event loop that is closed
            del self.subscribers[subscriber]
            self.put(wire.LOST, subscriber)
