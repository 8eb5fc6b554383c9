"""The process that has the engine, where other processes serve it: it starts and watches them."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from threading import Thread

from prometheus_client.multiprocess import mark_process_dead

from nanovllm_core import EngineConfig
from nanovllm_core.api import ConfigError
from nanovllm_core.frontend import EngineClient, open_engine
from nanovllm_core.selection import Decisions
from nanovllm_engine_processes.held_folder import make_again
from nanovllm_engine_processes.sharing import EngineShare
from nanovllm_server.fronts.process import DRAIN, EXIT, FrontProcess, FrontStart
from nanovllm_server.guard.assemble import make_ledger
from nanovllm_server.guard.drain import end_signals, handled
from nanovllm_server.guard.files import within_file_limit
from nanovllm_server.guard.hosts import bound_sockets, claimed
from nanovllm_server.guard.logs import configure_logging
from nanovllm_server.server import announce, settings_name, url_of
from nanovllm_server.settings import ServerSettings
from nanovllm_server.watch.health import close_within
from nanovllm_server.watch.used_plugins import CLIENT, describe
from nanovllm_server.watch.watch import folder_of

logger = logging.getLogger("nanovllm_server")

LOOK_SECONDS = 0.1
END_SECONDS = 5.0
"""So long a front may take for its end, beyond the time of the requests that it lets finish."""
START_SECONDS = 300.0
"""So long a front may take until it listens, once there is an engine."""
MAX_ENDS, ENDS_SECONDS = 5, 60.0
"""A front that ends so often in so many seconds is not started again."""


def check_processes(processes: int) -> None:
    """Raises ConfigError where several processes cannot share one address."""
    if processes > 1 and sys.platform != "linux":
        raise ConfigError(
            f"serve.processes is {processes}, and only Linux spreads connections over several "
            f"processes that listen; set it to 1 ({sys.platform} has no such socket)"
        )


@contextmanager
def counted_signals() -> Iterator[list[int]]:
    """The SIGINT and `end_signals` that came, instead of what they do."""
    came: list[int] = []
    with handled((signal.SIGINT, *end_signals()), lambda number, _: came.append(number)):
        yield came


def is_storm(ends: deque[float], now: float) -> bool:
    """Note an end of a front; whether it was the last of `MAX_ENDS` in `ENDS_SECONDS`."""
    ends.append(now)
    return len(ends) >= MAX_ENDS and now - ends[-MAX_ENDS] <= ENDS_SECONDS


class Fronts:
    """An engine, and `settings.processes` front processes which share it and one address.

    `config` has the observer of the server's metrics. The main thread calls.
    """

    def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        folder = folder_of(config)
        assert folder is not None, "the server's observer is there"
        self._config = config
        self._settings = settings
        self._http_folder = folder / "http"
        self._http_folder.mkdir()
        self._ledger = make_ledger(settings, settings.processes)
        # They never listen: they keep the port while a front is started again.
        self._held = bound_sockets(settings.host, settings.port, is_shared=True)
        self._held += claimed(self._held)
        self._port: int = self._held[0].getsockname()[1]
        self._share = EngineShare()
        self._fronts: dict[int, FrontProcess] = {}
        """By column."""
        self._ends: defaultdict[int, deque[float]] = defaultdict(partial(deque, maxlen=MAX_ENDS))
        """When fronts ended, by column."""
        self._client: EngineClient | None = None
        self._starting: Thread | None = None
        """Of an engine in the place of one that ended."""
        self._start_error: Exception | None = None
        self._is_announced = False

    def run(self) -> bool:
        """Start and serve until a signal; False where something else ended the server."""
        configure_logging(self._settings.log.format, self._settings.log.level)
        self._settings = within_file_limit(self._settings)
        is_well = False
        try:
            for column in range(self._settings.processes):
                self._spawn(column)  # beside the engine's start
            self._open_engine()
            is_well = self._watch()
        finally:
            with counted_signals():  # it ends already, and each of its waits has a bound
                is_closed = self._close()
        return is_well and is_closed

    def _spawn(self, column: int) -> None:
        client = {"name": "shared", "options": {"folder": str(self._share.folder)}}
        config = EngineConfig.model_validate(self._config.model_dump() | {"engine_client": client})
        sockets = bound_sockets(self._settings.host, self._port, is_shared=True)
        try:
            start = FrontStart(
                config=config.model_dump_json(),
                settings=self._settings.model_dump_json(),
                sockets=[one.fileno() for one in sockets],
                ledger=self._ledger.fd,
                columns=self._ledger.columns,
                column=column,
                http_folder=self._http_folder,
                clients=describe(CLIENT, Decisions(self._config).named(CLIENT)),
            )
            self._fronts[column] = FrontProcess(start)
        finally:
            for one in sockets:
                one.close()

    def _open_engine(self) -> None:
        self._client = open_engine(self._config)
        self._share.serve(self._client)

    # -- while it serves

    def _watch(self) -> bool:
        """Until a signal has ended all fronts; False where anything else ends the server."""
        asked, looked = 0, time.monotonic()
        with counted_signals() as signals:
            while self._fronts:
                self._hear()
                for _ in signals[asked:]:
                    for front in self._fronts.values():
                        front.tell(DRAIN)
                asked = len(signals)
                now = time.monotonic()
                # A step that is far longer is the machine's, or a stop of this process.
                self._end_silent(min(now - looked, 5 * LOOK_SECONDS))
                looked = now
                if not self._has_engine():
                    return False
                for front in [one for one in self._fronts.values() if one.status is not None]:
                    if not self._note_end(front, is_draining=asked > 0):
                        return False
        return True

    def _hear(self) -> None:
        """Wait a moment for what fronts say."""
        by_control = {front.control: front for front in self._fronts.values()}
        ready = wait([*by_control], LOOK_SECONDS)
        is_over = [not front.hear() for one, front in by_control.items() if one in ready]
        if any(is_over):
            time.sleep(LOOK_SECONDS / 10)  # its process ends in a moment
        if not self._is_announced and all(one.is_listening for one in self._fronts.values()):
            self._is_announced = True
            name = settings_name(self._settings, self._config.model)
            announce(name, url_of(self._held[0].getsockname(), self._settings.tls is not None))

    def _end_silent(self, seconds: float) -> None:
        """Kill fronts whose event loop does not turn, and those whose start has no end."""
        turn = self._settings.health.stuck_after_s + END_SECONDS
        for front in self._fronts.values():
            if not front.is_listening and self._starting is not None:
                continue  # it waits for an engine
            front.silence += seconds
            bound = turn if front.is_listening else START_SECONDS
            if front.silence > bound:
                what = "turned its event loop" if front.is_listening else "begun to listen"
                logger.error("%s has not %s for %g s: it is killed", front, what, bound)
                front.kill()
                front.silence = 0.0

    def _note_end(self, front: FrontProcess, is_draining: bool) -> bool:
        """A front has ended, and another one takes its place; False where the server ends.

        One that never listened would end again, and so would one that has ended again and again.
        """
        del self._fronts[front.column]
        front.release(0.0)
        self._forget(front)
        if is_draining and front.status == 0:
            return True
        logger.error("%s ended with status %s", front, front.status)
        if is_draining:
            return True
        if not front.is_listening or self._settings.health.on_front_death == "exit":
            return False
        if is_storm(self._ends[front.column], time.monotonic()):
            logger.error(
                "front %d has ended %d times in %g s: the server ends; what ended it stands above",
                front.column, MAX_ENDS, ENDS_SECONDS,
            )  # fmt: skip
            return False
        self._spawn(front.column)
        return True

    def _forget(self, front: FrontProcess) -> None:
        """What it counted stays counted; what it had under way is over."""
        self._ledger.clear(front.column)
        with suppress(OSError):
            mark_process_dead(front.pid, str(self._http_folder))  # type: ignore[no-untyped-call]

    # -- the engine

    def _has_engine(self) -> bool:
        """True while there is an engine, or one takes the place of that which ended.

        One that ended before it gave a token is not replaced.
        """
        if self._starting is not None:
            if not self._starting.is_alive():
                self._starting = None
                if self._start_error is not None:
                    logger.error("a new engine cannot be started", exc_info=self._start_error)
                    return False
            return True
        failure = self._share.failure
        if failure is None:
            return True
        logger.error("the engine ended", exc_info=failure.__cause__ or failure)
        if self._settings.health.on_engine_death != "restart" or not self._share.has_answered:
            return False
        self._starting = Thread(target=self._start_again, name="nanovllm-start", daemon=True)
        self._starting.start()
        return True

    def _start_again(self) -> None:
        try:
            with suppress(Exception):  # It is broken: what it cannot free, it cannot.
                if self._client is not None:
                    self._client.close()
            make_again(self._http_folder.parent)
            self._http_folder.mkdir(exist_ok=True)
            self._open_engine()
        except Exception as error:
            self._start_error = error

    # -- the end

    def _close(self) -> bool:
        """End the fronts, then the engine; False where a step hangs."""
        for front in self._fronts.values():
            front.tell(EXIT)
        until = time.monotonic() + END_SECONDS
        for front in self._fronts.values():
            front.release(until)
        self._share.close()
        for one in self._held:
            one.close()
        seconds = self._settings.health.stuck_after_s
        return self._client is None or close_within(self._client, seconds)
