"""What all front processes of a server have under way, so that limits hold for them together.

The counts lie in a file that every front maps. Each front adds to a column of its own: if it dies,
`clear` takes away what it had, and nothing else. A lock of the file, which the system releases when
its holder ends, makes a look and an addition one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

QUEUE, REQUESTS, CONNECTIONS, PROCESS_ID = range(4)
"""The server's own rows: samples that run or wait; requests, without those of safe methods; open
connections; the process id of each front, 0 where there is none."""
NUM_OWN = 4
MAX_CLIENTS = 10_000
"""Clients that are remembered; beyond it, those are forgotten that have used nothing lately."""


class Ledger:
    """A row for each count and each client, with a column for each front. Used on one thread.

    `fd` is an open file, which `create` makes and front processes inherit. A client's `full_at` is
    the time (of `time.monotonic`) at which it may use all of its burst again.
    """

    def __init__(self, fd: int, columns: int, column: int = 0) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        self.columns = columns
        self._column = column
        row = np.dtype([("name", "u8"), ("full_at", "f8"), ("held", "i8", (columns,))])
        # Any: numpy's types do not know the fields of a row.
        self._rows: Any = np.frombuffer(mmap.mmap(fd, 0), row)
        self._held = self._rows["held"]
        self._clients = self._rows[NUM_OWN:]

    @classmethod
    def create(cls, columns: int = 1, max_connections: int = 0) -> Ledger:
        """A new one. It has rows for so many clients with a request under way, and for others."""
        if sys.platform == "linux":
            # No file on a disk: to write to the map of one ends a process once the disk is full.
            fd = os.memfd_create("nanovllm-ledger")
        else:
            fd, path = tempfile.mkstemp(prefix="nanovllm-ledger-")
            os.unlink(path)
        os.ftruncate(fd, (NUM_OWN + MAX_CLIENTS + max_connections) * (16 + 8 * columns))
        return cls(fd, columns)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """No other front is in here meanwhile. Never wait inside."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def total(self, row: int) -> int:
        """The sum over all fronts."""
        return int(self._held[row].sum())

    def each(self, row: int) -> list[int]:
        """The counts of all fronts."""
        return [int(one) for one in self._held[row]]

    def add(self, row: int, amount: int) -> None:
        """Change the count of this front."""
        self._held[row, self._column] += amount

    def put(self, row: int, count: int) -> None:
        """Set the count of this front."""
        self._held[row, self._column] = count

    def clear(self, column: int) -> None:
        """Forget everything that a front had under way, once it has ended."""
        self._held[:, column] = 0

    def client(self, name: str, now: float) -> int:
        """The row of a client, by name; call it under the lock, where rows may change hands."""
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1
        names = self._clients["name"]
        found = np.flatnonzero(names == key)
        if found.size:
            return NUM_OWN + int(found[0])
        free = np.flatnonzero(names == 0)
        # Requests hold fewer rows than there are: else the one whose burst is whole the soonest.
        is_busy = self._clients["held"].any(axis=1)
        idle = np.where(is_busy, np.inf, self._clients["full_at"])
        index = free[0] if free.size else idle.argmin()
        self._clients[index]["name"] = key
        self._clients[index]["full_at"] = now
        return NUM_OWN + int(index)

    def full_at(self, row: int) -> float:
        return float(self._rows[row]["full_at"])

    def set_full_at(self, row: int, seconds: float) -> None:
        self._rows[row]["full_at"] = seconds
