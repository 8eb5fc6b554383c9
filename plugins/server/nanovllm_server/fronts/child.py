"""A front process: a server whose engine belongs to the process that started it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread

from nanovllm_core import AsyncLLM, EngineConfig
from nanovllm_core.errors import NanoVLLMError
from nanovllm_server.fronts.facts import FrontFacts
from nanovllm_server.fronts.process import BEAT, DRAIN, LISTENING, FrontStart
from nanovllm_server.guard.drain import DrainingServer
from nanovllm_server.guard.ledger import PROCESS_ID, Ledger
from nanovllm_server.guard.logs import configure_logging
from nanovllm_server.server import make_watched_server
from nanovllm_server.settings import ServerSettings
from nanovllm_server.watch.health import close_within

BEAT_TICKS = 5
"""uvicorn has ten ticks a second."""


def main() -> None:
    """Serve until the starting process says so; `argv` has a name and the control's file."""
    # The starting process's to handle: Ctrl-C, and what a service manager sends to every process.
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    try:
        is_well = Front(socket.socket(fileno=int(sys.argv[2]))).run()
    except NanoVLLMError as error:
        sys.exit(f"error: {error}")
    sys.exit(not is_well)


class FrontServer(DrainingServer):
    """It ends by orders, and not by signals."""

    control: socket.socket

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % BEAT_TICKS == 0:
            self.say(BEAT)
        return await super().on_tick(counter)

    def say(self, what: bytes) -> None:
        """Tell the starting process; it never waits."""
        with suppress(OSError):
            self.control.send(what, socket.MSG_DONTWAIT)


class Front:
    """One front process. `control` is its end of the pair of sockets."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._orders = control.makefile("rb")
        self._server: FrontServer | None = None

    def run(self) -> bool:
        """Serve; False where the engine's end ended it."""
        if not (line := self._orders.readline()):
            return False  # the starting process has ended already
        start = FrontStart.model_validate_json(line)
        Thread(target=self._obey, name="nanovllm-orders", daemon=True).start()
        settings = ServerSettings.model_validate_json(start.settings)
        configure_logging(settings.log.format, settings.log.level)
        ledger = Ledger(start.ledger, start.columns, start.column)
        ledger.put(PROCESS_ID, os.getpid())
        facts = FrontFacts(
            ledger,
            http_folder=start.http_folder,
            process_ids=lambda: (os.getppid(), *filter(None, ledger.each(PROCESS_ID))),
            clients=tuple(start.clients),
        )
        llm = AsyncLLM.from_config(EngineConfig.model_validate_json(start.config))
        try:
            server, watch = make_watched_server(llm, settings, facts, FrontServer)
            assert isinstance(server, FrontServer)
            server.control = self._control
            server.announce = partial(server.say, LISTENING)
            self._server = server
            server.run([socket.socket(fileno=one) for one in start.sockets])
        finally:
            close_within(llm, settings.health.stuck_after_s)
        return watch.monitor.failure is None

    def _obey(self) -> None:
        """Follow orders until the starting process has ended: then nobody is served any more."""
        with suppress(OSError):  # a reset, where that process has not read the last beat
            while order := self._orders.read(1):
                server = self._server
                if server is None:
                    os._exit(1)  # it has promised nobody anything
                elif order == DRAIN:
                    server.handle_exit(signal.SIGTERM, None)
                else:
                    server.should_exit = True
        os.killpg(0, signal.SIGKILL)
