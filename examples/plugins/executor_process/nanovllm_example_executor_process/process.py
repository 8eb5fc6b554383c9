"""The spawned process: a worker that handles the messages of a pipe."""

from __future__ import annotations

import os
import pickle
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from traceback import format_exception

from nanovllm_core.api import ExecutorError, NanoVLLMError, TokenMasks, WorkerSetup
from nanovllm_core.worker import Worker

COLLECT = "collect"


def serve(pipe: Connection, setup: WorkerSetup) -> None:
    """Handle messages in order, until None, an error, or the end of the engine's process.

    A message is a plan, masks, or `COLLECT`. The start is answered by its `WorkerInfo`, `COLLECT`
    by a `StepResult`, any error by itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    worker = Worker(setup)
    try:
        pipe.send(worker.start())
        for message in iter(pipe.recv, None):
            if message == COLLECT:
                pipe.send(worker.collect())
            elif isinstance(message, TokenMasks):
                worker.sample(message)
            else:
                worker.submit(message)
    except Exception as error:
        with suppress(OSError):
            pipe.send(portable(error))
    finally:
        worker.close()


def portable(error: Exception) -> Exception:
    """The error with its rank, process and traceback, as one that survives the journey."""
    copy: Exception = ExecutorError(f"{type(error).__name__}: {error}")
    if isinstance(error, NanoVLLMError):
        with suppress(Exception):  # a plugin's own type may not survive it
            copy = pickle.loads(pickle.dumps(error))
    copy.args = (f"rank 0 (process {os.getpid()}): {copy}",)
    copy.add_note("".join(format_exception(error)))
    return copy
