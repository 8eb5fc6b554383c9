"""A rank's process: a worker that handles the engine's messages.

Importing this module imports no torch, so that a rank answers before torch is imported.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from socket import socket
from threading import Thread
from traceback import format_exception
from typing import TYPE_CHECKING

from nanovllm_core.api import ExecutorError, NanoVLLMError, PluginLoadError, TokenMasks, WorkerSetup
from nanovllm_executor_parallel.messages import (
    CLOSE,
    COLLECT,
    READY,
    Failure,
    LostPeerError,
    Start,
    Status,
    encode,
    receive,
)

if TYPE_CHECKING:
    from nanovllm_executor_parallel.group import Progress

logger = logging.getLogger(__name__)

PARENT_SECONDS = 1.0
"""How often a rank looks whether the engine's process is still there."""

DEVICE_SHARE = 0.9
"""Of the engine's bound of a step: the wait on a device ends first, because its error says more."""


def main() -> None:
    """Serve the engine: `argv` has the rank's name, its two sockets, and the engine's process."""
    messages, watch, parent = map(int, sys.argv[2:5])
    for descriptor in messages, watch:  # what this process starts must not hold them open
        os.set_inheritable(descriptor, False)
    # The engine's to handle: Ctrl-C, and what a service manager or a closing terminal sends to all.
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    watcher = Watcher(socket(fileno=watch), parent)
    Thread(target=watcher.run, daemon=True).start()
    serve(socket(fileno=messages), watcher)


class Watcher:
    """Answers the engine on a thread of its own, and ends this process with the engine's."""

    def __init__(self, sock: socket, parent: int) -> None:
        self.progress: Progress | None = None
        self._socket = sock
        self._parent = parent
        sock.settimeout(PARENT_SECONDS)

    def run(self) -> None:
        """Forever. A process that the engine's has forked may hold the sockets open, hence both."""
        with suppress(OSError):
            while os.getppid() == self._parent:
                with suppress(TimeoutError):
                    if not self._socket.recv(1):
                        break
                    status = Status() if self.progress is None else self.progress.status
                    self._socket.sendall(encode(status))
        end_group()


def end_group() -> None:
    """End this process and those that it has started, which are in its process group."""
    os.killpg(0, signal.SIGKILL)


def serve(sock: socket, watcher: Watcher) -> None:
    """Handle messages in order, until `CLOSE` or an error, which is sent before all is closed."""
    start: Start = receive(sock)
    logging.basicConfig(format=f"rank {start.rank}: %(levelname)s %(name)s: %(message)s")
    for name in ("nanovllm_core", __package__):
        logging.getLogger(name).setLevel(start.log_level)
    with ExitStack() as stack:
        try:
            run(sock, start, watcher, stack)
        except Exception as error:
            try:
                sock.sendall(encode(failure(error, start.rank)))
            except OSError:  # the engine has gone
                end_group()


def run(sock: socket, start: Start, watcher: Watcher, stack: ExitStack) -> None:
    """Start the worker and take its steps. All ranks compute all results; rank 0 sends its own."""
    gc.disable()  # during the start, as in the engine's process
    setup = load_setup(start)

    from nanovllm_core.worker import Worker
    from nanovllm_executor_parallel.group import Progress, TensorParallelGroup, connect, disconnect

    progress = watcher.progress = Progress()
    sock.sendall(encode(READY))
    stack.callback(disconnect)
    context = connect(start, setup.device, progress)
    worker = Worker(setup, context)
    stack.callback(worker.close)
    info = worker.start()
    gc.collect()
    gc.freeze()
    gc.enable()
    group = context.tensor_parallel
    if isinstance(group, TensorParallelGroup):  # there is more than one rank
        group.bound(DEVICE_SHARE * start.stall_seconds)
        info = replace(info, choices=(*info.choices, group.all_reduces))
    sock.sendall(encode(info))
    submitted = collected = 0
    while True:
        progress.begin(f"idle behind step {submitted}")
        message = receive(sock)
        if message == CLOSE:
            late, overlapped = worker.late_steps
            logger.info("the device was idle before %d of %d overlapped steps", late, overlapped)
            return
        if message == COLLECT:
            collected += 1
            progress.begin(f"waits for the result of step {collected}")
            result = worker.collect()
            if isinstance(group, TensorParallelGroup):
                group.check()
            if start.rank == 0:
                sock.sendall(encode(result))
        elif isinstance(message, TokenMasks):
            progress.begin(f"samples step {submitted}")
            worker.sample(message)
        else:
            submitted += 1
            progress.begin(f"launches step {submitted}")
            worker.submit(message)


def load_setup(start: Start) -> WorkerSetup:
    """Read the set-up, and import the plugins that rank 0 chose; the worker checks them."""
    try:
        setup: WorkerSetup = pickle.loads(start.setup)
    except Exception as error:
        raise PluginLoadError(
            f"the set-up cannot be read here: {type(error).__name__}: {error}; its plugins must "
            "be installed modules that every process can import"
        ) from error
    attention = setup.prefill_attention, setup.decode_attention
    for plugin in (setup.model, *attention, setup.kernels, setup.sampler, *setup.logits_processors):
        with suppress(Exception):  # the worker says what is wrong with it
            importlib.import_module(plugin.impl.partition(":")[0])
    return setup


def failure(error: Exception, rank: int) -> Failure:
    """The error with its rank, process and traceback, as one that survives the journey."""
    where = f"rank {rank} (process {os.getpid()})"
    copy: Exception = ExecutorError(f"{where}: {type(error).__name__}: {error}")
    if isinstance(error, NanoVLLMError):
        with suppress(Exception):  # a plugin's own type may not survive it
            own = pickle.loads(pickle.dumps(error))
            own.args = (f"{where}: {error}",)
            copy = pickle.loads(pickle.dumps(own))
    copy.add_note("".join(format_exception(error)))
    return Failure(copy, isinstance(error, LostPeerError))
