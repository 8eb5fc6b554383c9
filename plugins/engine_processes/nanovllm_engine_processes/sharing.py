"""A started engine for doors in other processes: the side of the process that has the engine.

A door sends what its callers post, and gets what the engine answers: all deltas of a step that are
for one subscriber in one message, as an engine's process sends them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from nanovllm_core.api import EngineClosedError, EngineError, NanoVLLMError
from nanovllm_core.frontend import (
    Abort,
    AddRequests,
    Answer,
    Close,
    EndAt,
    Ended,
    EngineClient,
    GetStats,
    Message,
    Refused,
    ResetPrefixCache,
    WaitIdle,
)
from nanovllm_engine_processes import wire
from nanovllm_engine_processes.child import SHARE_PREFIX, check_path
from nanovllm_engine_processes.held_folder import HeldFolder

logger = logging.getLogger(__name__)

LINGER_MS = 1000
LOOK_MS = 200
"""How often doors are looked for whose processes have ended."""


def share_of(folder: str | Path) -> str:
    """The address to which all doors send."""
    return f"ipc://{folder}/share"


def door_of(folder: str | Path, door: str) -> str:
    """The address at which a door receives."""
    return f"ipc://{folder}/{door}"


LONGEST_DOOR = "4194304.999999"
"""The name of a door of the highest process id, and of as many doors as no process opens."""


def is_running(pid: int) -> bool:
    """Whether a process is there; one that has ended is, until its parent has reaped it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@dataclass(slots=True, eq=False)
class UnderWay:
    """A request that is not over."""

    subscriber: int
    samples: int
    """That have not ended."""
    is_searched: bool
    """It has stop strings: a sample ends when the door says where, and not with its last delta."""


@dataclass(slots=True, eq=False)
class Door:
    """A door in another process, and what it has under way."""

    socket: zmq.Socket[bytes]
    pid: int
    client: EngineClient | None = None
    """The engine that it was opened with; None while it waits for one."""
    numbers: dict[int, int] = field(default_factory=dict)
    """The client's number of each of its subscribers."""
    unfinished: dict[str, UnderWay] = field(default_factory=dict)

    def note_end(self, request_id: str, by_door: bool) -> None:
        """A sample has ended; its request is over with the last one."""
        request = self.unfinished.get(request_id)
        if request is not None and request.is_searched == by_door:
            request.samples -= 1
            if not request.samples:
                del self.unfinished[request_id]

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are over."""
        for request_id in request_ids:
            self.unfinished.pop(request_id, None)


class EngineShare:
    """Lets doors of other processes use an engine client. They find it by `folder`.

    The client stays its caller's to close. A door that is opened while there is no engine, or after
    its end, waits until `serve` names one. A door whose process ends has its requests aborted, and
    so has one that closes; other doors do not notice. Raises EngineError where the path of the
    temporary folder is too long for sockets.
    """

    def __init__(self) -> None:
        self._held = HeldFolder(SHARE_PREFIX)
        self.folder = self._held.path
        try:
            check_path(door_of(self.folder, LONGEST_DOOR))
        except EngineError:
            self._held.remove()
            raise
        (self.folder / "pid").write_text(str(os.getpid()))
        self._lock = threading.Lock()
        """For the state, and for the doors' sockets: one of zmq is for one thread at a time."""
        self._doors: dict[str, Door] = {}
        self._client: EngineClient | None = None
        self.failure: BaseException | None = None
        """The error that ended the engine; None while there is one, and before."""
        self.has_answered = False
        """The engine has given a token."""
        self._is_closed = False
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(share_of(self.folder))
        self._thread = threading.Thread(target=self._run, name="nanovllm-share", daemon=True)
        self._thread.start()

    def serve(self, client: EngineClient) -> None:
        """Doors that wait, and later ones, use this engine. Open ones keep that which they have."""
        client.subscribe(partial(self._note_end, client))
        with self._lock:
            self._client, self.failure, self.has_answered = client, None, False
            for name, door in self._doors.items():
                if door.client is None:
                    self._tell_start(name, door)

    def close(self) -> None:
        """End all doors, and abort what they have under way. Closing twice is fine."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._thread.join()
        with self._lock:
            for name in tuple(self._doors):
                self._end(name, EngineClosedError("the process that shares the engine closed it"))
        self._inbox.close(linger=0)
        self._context.term()
        self._held.remove()

    # -- from doors, on the share's thread

    def _run(self) -> None:
        while not self._is_closed:
            if self._inbox.poll(LOOK_MS):
                self._receive(self._inbox.recv())
            with self._lock:
                for door in [one for one in self._doors if not is_running(self._doors[one].pid)]:
                    self._drop(door)

    def _receive(self, data: bytes) -> None:
        """Act on a message; a door whose message cannot be read ends, and no other one."""
        door = ""
        try:
            door, name, content = wire.decode(data)
            message = wire.read_message(name, content) if name in wire.MESSAGES else None
            with self._lock:
                self._handle(door, name, content, message)
        except Exception as error:
            logger.exception("a message of the door %r failed", door)
            with self._lock:
                self._end(str(door), EngineError(f"the shared engine failed: {error!r}"))

    def _handle(
        self, name: str, what: str, content: Any, message: Message | Refused | None
    ) -> None:
        if what == wire.OPEN:
            self._open(name, content)
            return
        door = self._doors.get(name)
        if door is None or door.client is None:
            return
        if what == wire.SUBSCRIBE:
            deliver = partial(self._deliver, door, content)
            door.numbers[content] = door.client.subscribe(deliver)
        elif what in (wire.UNSUBSCRIBE, wire.LOST):
            if (number := door.numbers.pop(content, None)) is not None:
                door.client.unsubscribe(number)
            if what == wire.LOST:
                lost = [k for k, one in door.unfinished.items() if one.subscriber == content]
                self._post(door, door.client, Abort(tuple(lost)))
        elif isinstance(message, Refused):
            refused, row = wire.answer_row(message)
            door.socket.send(wire.encode(refused, content["subscriber"], row))
        elif isinstance(message, Close):
            self._drop(name)
        elif message is not None:
            self._post(door, door.client, message)

    def _open(self, name: str, pid: int) -> None:
        if not isinstance(pid, int):
            raise TypeError(f"{pid!r} is no process id")
        if name in self._doors:
            self._drop(name)  # of an earlier process, whose id this one has got
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(door_of(self.folder, name))
        door = self._doors[name] = Door(socket, pid)
        if self._client is not None:
            self._tell_start(name, door)

    def _tell_start(self, name: str, door: Door) -> None:
        client = door.client = self._client
        assert client is not None
        tokenizer = None if client.tokenizer is None else str(client.tokenizer.folder)
        facts = [wire.info_row(client.info), tokenizer, dict(client.sampling_defaults)]
        door.socket.send(wire.encode(wire.STARTED, 0, facts))

    def _post(self, door: Door, client: EngineClient, message: Message) -> None:
        """Pass a message on; where nobody would answer it any more, the answer is the end."""
        match message:
            case Abort():
                door.forget(message.request_ids)
                client.post(message)
            case EndAt():
                door.note_end(message.request_id, by_door=True)
                client.post(message)
            case AddRequests() | GetStats() | WaitIdle() | ResetPrefixCache():
                number = message.subscriber
                if number not in door.numbers:
                    return  # it could take no answer, and was forgotten
                if isinstance(message, AddRequests):
                    for new in message.requests:
                        under_way = UnderWay(number, new.params.n, bool(new.params.stop))
                        door.unfinished[new.request_id] = under_way
                try:
                    client.send(replace(message, subscriber=door.numbers[number]))
                except EngineClosedError as error:
                    row = wire.error_row(error)
                    door.socket.send(wire.encode(wire.ENDED, number, row))

    def _end(self, name: str, error: NanoVLLMError) -> None:
        """Tell a door that nothing more comes, and forget it."""
        if (door := self._doors.get(name)) is not None:
            door.socket.send(wire.encode(wire.CLOSED, 0, wire.error_row(error)))
            self._drop(name, linger=LINGER_MS)

    def _drop(self, name: str, linger: int = 0) -> None:
        """Forget a door, and end what it has under way."""
        door = self._doors.pop(name)
        if door.client is not None:
            for number in door.numbers.values():
                door.client.unsubscribe(number)
            door.client.abort(tuple(door.unfinished))
        door.socket.close(linger=linger)

    # -- from the engine, on its client's thread

    def _deliver(self, door: Door, subscriber: int, answer: Answer) -> None:
        """It raises for a door that was dropped, which makes the client forget the subscriber."""
        name, content = wire.answer_row(answer)
        message = wire.encode(name, subscriber, content)
        with self._lock:
            if isinstance(answer, list):
                self.has_answered = True
                for delta in answer:
                    if delta.finish_reason is not None:
                        door.note_end(delta.request_id, by_door=False)
            elif isinstance(answer, Refused):
                door.forget(answer.request_ids)
            door.socket.send(message)

    def _note_end(self, client: EngineClient, answer: Answer) -> None:
        """The engine has ended: doors that are opened from now on wait for another one."""
        with self._lock:
            if isinstance(answer, Ended) and self._client is client:
                self._client, self.failure = None, answer.error
