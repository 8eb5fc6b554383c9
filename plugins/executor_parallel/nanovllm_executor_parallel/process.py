"""A rank as the engine's process sees it: its process, its two sockets, what was heard of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nanovllm_core.api import ExecutorError
from nanovllm_executor_parallel.messages import Channel, Failure, Status

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Of each rank, whatever the user's own is: all ranks are on this host, and no NVLink multicast."""

PING = b"?"

PROGRAM = """\
import sys
sys.path[:] = sys.argv[5:]
from nanovllm_executor_parallel.rank import main
main()
"""
"""No main module is imported again: scripts need no guard, and stdin and notebooks work."""


class RankProcess:
    """One rank. It is spawned, because CUDA does not survive a fork.

    It is the leader of a process group of its own: Ctrl-C in a terminal does not reach it, and what
    it has started, such as a compiler, ends with it.
    """

    def __init__(self, rank: int, inherited: Sequence[int], num_threads: int | None) -> None:
        self.rank = rank
        self.inbox: deque[Any] = deque()
        self.failure: Failure | None = None
        self.status: Status | None = None
        self.unanswered = 0
        """The pings since it was heard last, if it should have answered."""
        self.is_ready = False
        """It has imported everything: from then on it answers in time."""
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        environment = os.environ | ENVIRONMENT
        if rank > 0:
            environment["TERM"] = "dumb"  # one rank's progress bars are enough
        if num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(num_threads)
        descriptors = [one.fileno() for one in theirs]
        name = f"nanovllm rank {rank}"  # for `ps`
        arguments = [name, *map(str, descriptors), str(os.getpid()), *sys.path]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments],
                pass_fds=[*descriptors, *inherited],
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,
            )
        except OSError as error:
            for one in ours:
                one.close()
            raise ExecutorError(f"rank {rank} cannot be started: {error}") from error
        finally:
            for one in theirs:  # the process alone holds them, so that its end is theirs
                one.close()
        self.messages, self.watch = map(Channel, ours)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def listen(self) -> None:
        """Begin to watch it; what was heard before does not count."""
        self.status, self.unanswered = None, 0

    def ping(self) -> None:
        """Ask what it is doing. While it imports, silence counts only if its process is stopped."""
        if self.is_ready or self._wait(os.WSTOPPED):
            self.unanswered += 1
        self.watch.send(PING)

    @property
    def has_failed(self) -> bool:
        """True once it has sent a failure, or has ended."""
        return self.failure is not None or self.messages.has_ended

    def read(self) -> bool:
        """Take what it has sent; False where that is nothing."""
        try:
            messages = self.messages.read()
        except Exception as error:  # unpickling runs the code of plugins
            what = f"{self} sent what cannot be read: {type(error).__name__}: {error}"
            messages = [Failure(ExecutorError(what), lost_peer=False)]
        for message in messages:
            if isinstance(message, Failure):
                self.failure = message
            else:
                self.is_ready = True
                self.inbox.append(message)
        if messages:
            self.unanswered = 0
        return bool(messages)

    def read_status(self) -> bool:
        """Take its answers; True where it has moved since the one before."""
        before, answers = self.status, self.watch.read()
        if answers:
            self.status, self.unanswered = answers[-1], 0
        return before not in (None, self.status)

    def notice_end(self) -> None:
        """Where the process has ended, read its last messages.

        A process that it has forked may hold its sockets open, so that reading finds no end.
        """
        if not self.messages.has_ended and self.has_ended():
            self.read()
            self.messages.has_ended = True

    def has_ended(self) -> bool:
        """True once the process has ended. Until `release`, nothing else gets its process id."""
        return self._wait(os.WEXITED) is not None or self._process.returncode is not None

    def how_it_ended(self) -> str:
        """An exit code or a signal, of a process whose sockets are closed."""
        until = time.monotonic() + 1
        while (end := self._wait(os.WEXITED)) is None:
            if time.monotonic() > until:
                return "closed its sockets"
            time.sleep(0.005)
        if end.si_code == os.CLD_EXITED:
            return f"ended with exit code {end.si_status}"
        return f"ended with signal {_signal(end.si_status)}"

    def kill(self) -> None:
        """End the process, and those that it has started: they may outlive it."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS: nobody but a zombie
                os.killpg(self.pid, signal.SIGKILL)

    def release(self, seconds: float) -> bool:
        """Wait for the end and close the sockets; False where the end does not come in time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.messages.close()
        self.watch.close()
        return self._process.returncode is not None

    def _wait(self, change: int) -> os.waitid_result | None:
        """What `waitid` says if the process has ended (WEXITED) or is stopped (WSTOPPED)."""
        try:
            return os.waitid(os.P_PID, self.pid, change | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this program reaps all its processes, or ignores SIGCHLD
            self._process.poll()
            return None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
