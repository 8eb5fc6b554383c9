"""The messages between the engine and a rank: frames of a length and a pickle.

Two sockets lead to each rank. On the first the engine sends a `Start`, then plans, masks, `COLLECT`
and `CLOSE`, the same to every rank; a rank sends `READY`, its `WorkerInfo`, rank 0's results, and a
`Failure`. On the second a rank answers each byte with its `Status`.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass, field
from socket import MSG_WAITALL, socket
from time import monotonic
from typing import Any

from nanovllm_core.api import ExecutorError
from nanovllm_executor_parallel.plugin import AllReduce

HOST = "127.0.0.1"
"""All ranks are on one host."""

COLLECT = "collect"
CLOSE = "close"
READY = "ready"
"""The rank has imported everything: from here on it answers in time, whatever it does."""

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 16


class LostPeerError(ExecutorError):
    """A collective failed: another rank has ended, or did not come in time."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message.

    `setup` is a pickled WorkerSetup: reading it imports plugins, which may fail. The ranks meet at
    `port` of this host, where rank 0 listens on the socket `listening`, which it inherits. They
    wait for each other for `timeout_seconds`; on devices, after the start, for `stall_seconds`.
    """

    rank: int
    world_size: int
    setup: bytes
    port: int
    listening: int | None
    timeout_seconds: float
    stall_seconds: float
    all_reduce: AllReduce
    log_level: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank has ended with this error; `lost_peer`: because another one has."""

    error: Exception
    lost_peer: bool
    time: float = field(default_factory=monotonic)
    """Of the host's clock, which all its processes read."""


@dataclass(frozen=True, slots=True)
class Status:
    """The work of a rank: `doing` in words, and `waiting_in` the collective that it waits in.

    `collectives` counts those that have ended, on GPUs those that have been launched: there
    `waiting_in` is empty while the device waits. Captured ones are not seen.
    """

    doing: str = "starting"
    collectives: int = 0
    waiting_in: str = ""

    def __str__(self) -> str:
        if self.waiting_in:
            return f"{self.doing}, waits in {self.waiting_in} {self.collectives + 1}"
        return f"{self.doing}, after {self.collectives} collectives"


def encode(message: object) -> bytes:
    """A message as one frame."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive(sock: socket) -> Any:
    """The next message of a blocking socket; EOFError where the other side has ended."""
    return pickle.loads(_read(sock, *_LENGTH.unpack(_read(sock, _LENGTH.size))))


def _read(sock: socket, size: int) -> bytes:
    data = sock.recv(size, MSG_WAITALL)
    while len(data) < size:  # a signal may cut it short
        more = sock.recv(size - len(data), MSG_WAITALL)
        if not more:
            raise EOFError
        data += more
    return data


class Channel:
    """The engine's end of a socket: no call waits for the rank.

    An interrupt within a call could lose bytes. None comes: Python interrupts the main thread
    alone, and the engine's own thread is the one that calls.
    """

    def __init__(self, sock: socket) -> None:
        sock.setblocking(False)
        self.has_ended = False
        self._socket = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """For `poll`."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while the socket does not take all that is to be sent."""
        return bool(self._outgoing)

    def add(self, frame: bytes) -> None:
        """`flush` sends it, behind those before it."""
        self._outgoing += frame

    def send(self, frame: bytes) -> None:
        """Send a frame as far as the socket takes it; `flush` sends the rest."""
        self.add(frame)
        self.flush()

    def flush(self) -> None:
        """Send more of what is left. Nothing is left for a rank that has ended."""
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # reading says so too, and in order
            self._outgoing.clear()

    def read(self) -> list[Any]:
        """The messages that have come; `has_ended` is set behind the last one."""
        try:
            while chunk := self._socket.recv(_CHUNK):
                self._incoming += chunk
            self.has_ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
        return [pickle.loads(frame) for frame in iter(self._take, None)]

    def _take(self) -> bytes | None:
        start = _LENGTH.size
        if len(self._incoming) < start:
            return None
        end = start + _LENGTH.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        frame = bytes(self._incoming[start:end])
        del self._incoming[:end]
        return frame

    def close(self) -> None:
        """Close the socket; to the rank it is the engine's end."""
        self._socket.close()
