"""The engine client `thread`: an engine on a thread of this process."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from itertools import count

from pydantic import BaseModel

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.engine import Engine, EngineStats
from nanovllm_core.frontend.client import EngineClient
from nanovllm_core.frontend.loop import EngineLoop
from nanovllm_core.frontend.messages import Close, Deliver, Message, WaitIdle
from nanovllm_core.interfaces.plan import WorkerInfo
from nanovllm_core.interfaces.plugins import Plugins

EXIT_SECONDS = 10.0
"""A program that ends waits at most so long for a step that is under way."""


class ThreadClient(EngineClient):
    """An engine that shares this process with its callers, and whose steps a thread takes."""

    def __init__(
        self, options: BaseModel, config: EngineConfig, name: str, plugins: Plugins
    ) -> None:
        super().__init__(options, config, name, plugins)
        self._subscribers = count()
        self._loop = EngineLoop(config, name)
        self._thread = threading.Thread(target=self._loop.run, name="nanovllm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()
        try:
            started = self._loop.started.result()
        except BaseException:
            _interrupt_start(self._loop, self._thread)
            raise
        self.tokenizer = started.tokenizer
        self.sampling_defaults = started.sampling_defaults
        self._closing = weakref.finalize(self, _close, self._loop, self._thread, self._pid)
        self._closing.atexit = False  # A program that ends frees the device in any case.
        atexit.unregister(_stop_at_exit)
        atexit.register(_stop_at_exit)  # It comes before what the start has registered.
        _running[self._thread] = self._loop, self._pid

    @property
    def info(self) -> WorkerInfo:
        return self._loop.started.result().info

    @property
    def engine(self) -> Engine:
        """Its thread takes steps only for requests by messages, so the caller may take others."""
        if self._loop.is_open:
            self.ask(WaitIdle)
        return self._loop.engine

    def subscribe(self, deliver: Deliver) -> int:
        number = next(self._subscribers)
        self._loop.subscribers[number] = deliver
        return number

    def unsubscribe(self, number: int) -> None:
        self._loop.subscribers.pop(number, None)

    def post(self, message: Message) -> None:
        self._loop.inbox.put(message)

    def stats(self) -> EngineStats:
        return super().stats() if self._loop.is_open else self._loop.last_stats

    @property
    def is_open(self) -> bool:
        return self._loop.is_open and self._closing.alive

    def close(self) -> None:
        self._closing()
        if os.getpid() == self._pid:
            self._thread.join()  # where another thread closes at the same time


def _close(loop: EngineLoop, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # The thread is the parent's.
    loop.inbox.put(Close())
    if thread is not threading.current_thread():  # where the engine's own code dropped the last
        thread.join()
    _running.pop(thread, None)
    if loop.close_error is not None:
        raise loop.close_error


_running: dict[threading.Thread, tuple[EngineLoop, int]] = {}
"""The engines that are not closed, and the process of each."""


def _stop_at_exit() -> None:
    """Let no thread be at a step when Python takes itself down: what a step calls would crash."""
    for thread, (loop, pid) in tuple(_running.items()):
        if os.getpid() == pid:
            loop.inbox.put(Close(free=False))
            thread.join(EXIT_SECONDS)


def _interrupt_start(loop: EngineLoop, thread: threading.Thread) -> None:
    """End a start that nobody waits for any more: Ctrl-C reaches the main thread alone."""
    loop.inbox.put(Close())
    while thread.is_alive():
        if loop.is_starting:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), interrupt)
        thread.join(1.0)
