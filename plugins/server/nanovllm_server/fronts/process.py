"""A front process as the process sees it that starts, watches and ends it.

Both hold an end of a pair of sockets. One line of JSON, a `FrontStart`, is the first that the front
gets; then each byte is an order. What it sends are bytes too. The end of either is the end of the
pair, which the other one hears at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from nanovllm_core.api import EngineError
from nanovllm_server.watch.used_plugins import UsedPlugin

DRAIN, EXIT = b"d", b"e"
"""Orders: what a signal asks of a server, the second time too; to end at once."""
LISTENING, BEAT = b"l", b"b"
"""The front listens; its event loop turns."""
PROGRAM = """\
import sys
sys.path[:] = sys.argv[3:]
from nanovllm_server.fronts.child import main
main()
"""


class FrontStart(BaseModel):
    """What a front process starts with. The files are open in it, under the same numbers."""

    config: str
    """Of its door, as JSON."""
    settings: str
    """Of the server, as JSON."""
    sockets: list[int]
    """Bound ones, on which it is to listen."""
    ledger: int
    columns: int
    column: int
    """Its own, in the ledger."""
    http_folder: Path
    clients: list[UsedPlugin]


class FrontProcess:
    """One front. It leads a process group: Ctrl-C in a terminal does not reach it."""

    def __init__(self, start: FrontStart) -> None:
        self.column = start.column
        self.is_listening = False
        self.silence = 0.0
        """Seconds since it was heard."""
        self._control, theirs = socket.socketpair()
        arguments = [f"nanovllm front {start.column}", str(theirs.fileno()), *sys.path]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *arguments],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(start.http_folder)},
                    pass_fds=[theirs.fileno(), start.ledger, *start.sockets],
                    process_group=0,
                )
            except OSError as error:
                self._control.close()
                raise EngineError(f"a front process cannot be started: {error}") from error
        with suppress(OSError):  # it has ended already
            self._control.sendall(start.model_dump_json().encode() + b"\n")
        self._control.setblocking(False)

    def __str__(self) -> str:
        return f"front {self.column} (process {self.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def control(self) -> socket.socket:
        """For `select`."""
        return self._control

    @property
    def status(self) -> int | None:
        """As `subprocess` has it: None while the process runs, below 0 a signal."""
        return self._process.poll()

    def hear(self) -> bool:
        """Read what it says; False once it has closed its end."""
        try:
            said = self._control.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.is_listening |= LISTENING in said
        self.silence = 0.0
        return bool(said)

    def tell(self, order: bytes) -> None:
        """Send an order, to one that has ended too."""
        with suppress(OSError):
            self._control.send(order)

    def kill(self) -> None:
        """End it with what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def release(self, until: float) -> None:
        """Wait for its end until a time of `monotonic`; then kill it."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._control.close()
