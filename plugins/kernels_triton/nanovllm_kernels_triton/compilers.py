"""Processes that compile Triton kernels: threads share Python's lock, which Triton mostly holds."""

from __future__ import annotations

import gc
import io
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from threading import Thread
from typing import Any

import triton
from triton import JITFunction, knobs
from triton.language import constexpr
from triton.runtime.cache import triton_key

logger = logging.getLogger(__name__)

PROGRAM = """\
import sys
sys.path[:] = sys.argv[3:]
from nanovllm_kernels_triton.compilers import serve
serve(int(sys.argv[2]))
"""
"""No main module is imported again: scripts need no guard, and stdin and notebooks work."""

IMPORT_SECONDS = 60
COMPILE_SECONDS = 300
"""Bounds; a kernel of ours takes 5 at most."""
IDLE_SECONDS = 300
"""A process that was started early ends if it has no job by then."""
MOST = 16
"""Processes that compile at once: each takes some 100 MB."""
NUM_HERE = 4
"""The first kernels, which threads of the engine's process compile while the processes import. For
more at once Python's lock has no room."""

_waiting: list[Compilers] = []
"""The process that `wake` has started, until it is taken or discarded."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """The arguments of `triton.compile` for one variant of a kernel."""

    source: Any
    target: Any
    options: Mapping[str, Any]
    env_vars: Mapping[str, Any]

    def run(self, source_hash: str, code: str) -> None:
        """Compile it into Triton's cache on disk, for the process in which the two are these.

        The hash is a part of the key in the cache. Triton's own depends on which kernels a process
        has hashed before, so `code` says whether they are the same: a file may have been edited.
        """
        if code_of(self.source.fn) != code:
            raise RuntimeError(f"{self.source.name} is another one in the process that asks")
        self.source.hash = lambda: source_hash
        triton.compile(self.source, self.target, self.options, _env_vars=self.env_vars)


def code_of(kernel: Any) -> str:
    """A digest of a kernel, and of the functions and constants that it and those use by name."""
    found: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        if str(function) not in found:
            names = sorted(function.fn.__code__.co_names)
            used = [(name, function.__globals__.get(name)) for name in names]
            constants = [pair for pair in used if isinstance(pair[1], constexpr)]
            found[str(function)] = f"{function.src}{constants}"
            waiting += (value for _, value in used if isinstance(value, JITFunction))
    return sha256(repr(sorted(found.items())).encode()).hexdigest()


def count_processes() -> int:
    """How many may compile at once: one for each processor up to MOST, 0 where these are few."""
    num_processors = len(os.sched_getaffinity(0))
    return min(num_processors, MOST) if num_processors > NUM_HERE else 0


def wake() -> None:
    """Start the process early where every kernel will be missing: where Triton's cache is empty.

    A start calls it beside its own import of torch (`KernelSetSpec.wake`).
    """
    cache = Path(knobs.cache.dir)
    is_empty = not (cache.is_dir() and any(cache.iterdir()))
    if is_empty and count_processes() > 0 and not any(one.is_running for one in _waiting):
        with suppress(OSError):  # `take` will raise it again
            _waiting.append(Compilers())


def take() -> Compilers:
    """The process that was started early, if it still runs; else a new one, or its OSError."""
    with suppress(IndexError):
        while not (compilers := _waiting.pop()).is_running:
            compilers.close()
        return compilers
    return Compilers()


def discard() -> None:
    """End a process that was started early and that no start has taken."""
    with suppress(IndexError):
        while True:
            _waiting.pop().close()


class Compilers:
    """A process that has imported torch and Triton, and forks one for each job.

    It starts at once, and ends when it is closed or this process has ended. Its children hold no
    GPU: CUDA would not survive a fork. OSError where it cannot be started.
    """

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(IMPORT_SECONDS)
        self._is_closed = self._has_warned = False
        name = "nanovllm compilers"  # for `ps`
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, name, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a kernel that fails is compiled again, and says why
                env=os.environ | {"TRITON_CACHE_DIR": knobs.cache.dir, "PYTHONWARNINGS": "ignore"},
                process_group=0,  # Ctrl-C in a terminal does not reach it
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once it has ended."""
        return self._process.poll() is None

    def __str__(self) -> str:
        return f"the process that compiles kernels (process {self.pid})"

    def compile(self, job: CompileJob) -> bool:
        """Have a process put it into Triton's cache; False where none could. Threads may call.

        Raises CancelledError where they are closed meanwhile: the kernel is not wanted any more.
        """
        with suppress(OSError, AttributeError, TypeError, pickle.PicklingError):
            if self._has_started() and self._ask(job):
                return True
        if self._is_closed:
            raise CancelledError
        if not (self.is_running or self._has_warned):
            self._has_warned = True
            logger.warning("%s has ended: threads compile the kernels, which takes longer", self)
        return False

    def _has_started(self) -> bool:
        """Wait until it has imported everything; False where it has ended."""
        if self._requests.recv(1, socket.MSG_PEEK):  # stays there, for all threads
            return True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return False

    def _ask(self, job: CompileJob) -> bool:
        module = job.source.fn.fn.__module__.encode()
        data = _dumps(job)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._requests, [module], [theirs.fileno()])
            ours.settimeout(COMPILE_SECONDS)
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)
            return ours.recv(1) == b"!"

    def close(self) -> None:
        """End all of its processes; threads that wait for one get CancelledError."""
        self._is_closed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.shutdown(socket.SHUT_RDWR)
        self._requests.close()


def serve(descriptor: int) -> None:
    """Fork a process for each job, until the socket's other end is closed.

    They share what is imported here, and run when the process that waits for them has no work.
    Without a job within IDLE_SECONDS it ends, too.
    """
    hashing = Thread(target=triton_key)  # reads many files, once for all
    hashing.start()
    import torch  # noqa: F401

    hashing.join()
    gc.disable()  # a child lives for one kernel
    os.nice(5)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended do not stay
    with socket.socket(fileno=descriptor) as requests, suppress(OSError):
        requests.send(b"!")
        requests.settimeout(IDLE_SECONDS)
        while (request := socket.recv_fds(requests, 1000, 1))[1]:
            requests.settimeout(None)
            with socket.socket(fileno=request[1][0]) as job:
                with suppress(Exception):  # it is the child's
                    import_module(request[0].decode())
                if os.fork() == 0:
                    requests.close()
                    _answer(job)
    os.killpg(0, signal.SIGKILL)


def _answer(connection: socket.socket) -> None:
    """In a child: compile what the connection says."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ptxas is waited for
        with connection.makefile("rb") as file:
            job, source_hash, code = pickle.load(file)
            job.run(source_hash, code)
        connection.send(b"!")
    finally:
        os._exit(0)


class _Pickler(pickle.Pickler):
    """Kernels travel as the names of their modules and themselves."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, JITFunction):
            return _find, (value.fn.__module__, value.fn.__qualname__)
        return NotImplemented


def _dumps(job: CompileJob) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump((job, job.source.hash(), code_of(job.source.fn)))
    return file.getvalue()


def _find(module: str, name: str) -> Any:
    kernel = attrgetter(name)(import_module(module))
    while not isinstance(kernel, JITFunction):  # autotuned, for example
        kernel = kernel.fn
    return kernel
