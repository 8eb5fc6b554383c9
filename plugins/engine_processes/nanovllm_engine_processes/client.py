"""The engine client `processes`."""

from __future__ import annotations

import os
import threading
import weakref
from itertools import count

from nanovllm_core.api import EngineClosedError, EngineConfig, Plugins, WorkerInfo
from nanovllm_core.frontend import Close, Deliver, EngineClient, EngineStats, Message
from nanovllm_engine_processes.hub import Hub
from nanovllm_engine_processes.plugin import ROUTER, ProcessesOptions
from nanovllm_engine_processes.routing import Router


class ProcessClient(EngineClient):
    """Sends messages to engines in processes, by way of a thread of this one."""

    options: ProcessesOptions

    def __init__(
        self, options: ProcessesOptions, config: EngineConfig, name: str, plugins: Plugins
    ) -> None:
        super().__init__(options, config, name, plugins)
        self._subscribers = count()
        choice = options.router
        resolved = plugins.resolve(
            ROUTER.name, choice.name, choice.options, path="engine_client.options.router.options"
        )
        router: Router = plugins.make(resolved, config.data_parallel_size)
        self._hub = Hub(config, name, options, router)
        self._thread = threading.Thread(target=self._hub.run, name="nanovllm-engines", daemon=True)

    def start(self) -> None:
        self._thread.start()
        try:
            started = self._hub.started.result()
        except BaseException:
            self._hub.post(Close())
            self._thread.join()
            raise
        self.tokenizer = started.tokenizer
        self.sampling_defaults = started.sampling_defaults
        self._closing = weakref.finalize(self, _close, self._hub, self._thread, self._pid)

    @property
    def info(self) -> WorkerInfo:
        """That of the first engine that runs; `device` says how many do."""
        return self._hub.info

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the engines that run, by their number."""
        return {} if self._hub.engines is None else self._hub.engines.pids()

    def subscribe(self, deliver: Deliver) -> int:
        number = next(self._subscribers)
        self._hub.subscribers[number] = deliver
        return number

    def unsubscribe(self, number: int) -> None:
        self._hub.subscribers.pop(number, None)

    def post(self, message: Message) -> None:
        self._hub.post(message)

    def stats(self) -> EngineStats:
        """Raises EngineClosedError where a fault has ended the hub, and not `close()`."""
        if (error := self._hub.error) is not None:
            raise EngineClosedError(
                f"the thread between door and engines ended with {type(error).__name__}; create "
                "a new door"
            ) from error
        return super().stats() if self._hub.is_open else self._hub.last_stats

    @property
    def is_open(self) -> bool:
        return self._hub.is_open and self._closing.alive

    def close(self) -> None:
        self._closing()
        if os.getpid() == self._pid:
            self._thread.join()  # where another thread closes at the same time


def _close(hub: Hub, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # The thread and the engines are the parent's.
    hub.post(Close())
    if thread is not threading.current_thread():
        thread.join()
    if hub.close_error is not None:
        raise hub.close_error
