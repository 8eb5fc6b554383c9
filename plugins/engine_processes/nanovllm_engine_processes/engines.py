"""The processes of all engines and the sockets to them: sending, receiving, noticing an end."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import zmq

from nanovllm_core.api import EngineConfig, EngineError, NanoVLLMError
from nanovllm_engine_processes import wire
from nanovllm_engine_processes.child import ENGINES_PREFIX, check_path, inbox_of, outbox_of
from nanovllm_engine_processes.held_folder import HeldFolder
from nanovllm_engine_processes.plugin import ProcessesOptions
from nanovllm_engine_processes.process import (
    EngineProcess,
    config_of_each,
    environment_of_each,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How often ended processes are looked for."""
MAX_PING_SECONDS = 1.0

Heard = tuple[int, str, Any]
"""Engine, name and content of a message."""


class Engines:
    """Those that run. One thread calls; `ring` may be called on any."""

    def __init__(self, config: EngineConfig, options: ProcessesOptions) -> None:
        self._options = options
        shortest = min(options.stall_seconds, options.step_seconds)
        self._ping_seconds = min(MAX_PING_SECONDS, shortest / 4)
        self._pinged = time.monotonic()
        self._processes: dict[int, EngineProcess] = {}
        self._killed: list[EngineProcess] = []
        """Not reaped yet."""
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._bell, self._rope = socket.socketpair()
        """Rung by other threads: a socket of zmq is for one thread alone."""
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._context = zmq.Context()
        # A program may end before `close` has: a second Ctrl-C interrupts the wait for it.
        self._held = HeldFolder(ENGINES_PREFIX)
        self._folder = str(self._held.path)
        try:
            self._spawn(config)
        except BaseException:
            self.close()
            raise

    def _spawn(self, config: EngineConfig) -> None:
        check_path(outbox_of(self._folder))
        self._answers = self._context.socket(zmq.PULL)
        self._answers.set_hwm(0)
        self._answers.bind(outbox_of(self._folder))
        self._poller = zmq.Poller()
        self._poller.register(self._answers, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)
        environments = environment_of_each(config, os.environ)
        start = {
            "config": config_of_each(config).model_dump_json(),
            "name": "engine",
            "log_level": logging.getLogger("nanovllm_core").getEffectiveLevel(),
        }
        for number, environment in enumerate(environments):
            self._sockets[number] = self._context.socket(zmq.PUSH)
            self._sockets[number].set_hwm(0)
            # The side that connects queues what it sends although nobody receives.
            self._sockets[number].connect(inbox_of(self._folder, number))
            self._processes[number] = EngineProcess(number, self._folder, environment)
            self.send(number, wire.encode(wire.START, start))

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._processes))

    def __len__(self) -> int:
        return len(self._processes)

    def name(self, number: int) -> str:
        """As errors call it: with its process."""
        return str(self._processes[number])

    def pids(self) -> dict[int, int]:
        """The process ids, by engine."""
        return {number: one.pid for number, one in self._processes.items()}

    def mark_ready(self, number: int) -> None:
        """It has started: from now on it must answer in time."""
        self._processes[number].is_ready = True

    def ring(self) -> None:
        """End a wait in `receive`; a finaliser may call it between any two lines."""
        with suppress(OSError):  # it rings already, or is closed
            self._rope.send(b"!")

    def send(self, number: int, message: bytes) -> None:
        """Never waits: what is not sent yet is kept."""
        self._sockets[number].send(message)

    def receive(self) -> list[Heard]:
        """What has come, after at most a short wait; nothing of engines that do not run."""
        ready = dict(self._poller.poll(int(LOOK_SECONDS * 1000)))
        if self._bell.fileno() in ready:
            with suppress(BlockingIOError):
                while self._bell.recv(4096):
                    pass
        return self._read() if self._answers in ready else []

    def _read(self) -> list[Heard]:
        heard: list[Heard] = []
        with suppress(zmq.Again):
            while True:
                number, name, content = wire.decode(self._answers.recv(zmq.NOBLOCK))
                process = self._processes.get(number)
                if process is None:
                    continue
                process.unanswered = 0
                if name == wire.PONG:
                    process.note_pong(*content)
                else:
                    heard.append((number, name, content))
        return heard

    def find_ended(self) -> tuple[list[Heard], dict[int, NanoVLLMError]]:
        """The engines that have ended, or hang, by why, and what they said last."""
        stall, step = self._options.stall_seconds, self._options.step_seconds
        ended: dict[int, NanoVLLMError] = {}
        self._killed = [one for one in self._killed if not (one.has_ended() and one.release(0))]
        for number, one in self._processes.items():
            if one.has_ended():
                how = f"{one.how_it_ended()}; see its stderr and the system's log"
                ended[number] = EngineError(f"{one} {how}")
            elif one.unanswered * self._ping_seconds >= stall:
                ended[number] = EngineError(
                    f"{one} gave no answer for stall_seconds ({stall:g} s): stopped, or stuck; "
                    "look at it with py-spy, or raise stall_seconds"
                )
            elif one.held * self._ping_seconds >= step:
                ended[number] = EngineError(
                    f"{one} was at one step for step_seconds ({step:g} s): the step hangs; raise "
                    "step_seconds if steps may take longer, or to look at the process with py-spy"
                )
        if time.monotonic() - self._pinged >= self._ping_seconds:
            self._pinged = time.monotonic()
            for number, one in self._processes.items():
                one.note_ping()
                self.send(number, wire.encode(wire.PING, None))
        return (self._read() if ended else []), ended

    def end(self, number: int) -> None:
        """Kill an engine's process, and forget it; others do not wait until it is gone."""
        process = self._processes.pop(number)
        process.kill()
        self._killed.append(process)
        self._sockets.pop(number).close(linger=0)

    def await_ends(self) -> list[Heard]:
        """What engines say that were told to close, until all have ended or time is up."""
        until = time.monotonic() + self._options.close_seconds
        heard: list[Heard] = []
        while time.monotonic() < until:
            is_last = all(one.has_ended() for one in self._processes.values())
            heard += self._read()
            if is_last:
                break
            self._answers.poll(10)
        for one in self._processes.values():
            if not one.has_ended():
                logger.error(
                    "%s did not close within close_seconds (%g s) and is killed: a step hangs",
                    one, self._options.close_seconds,
                )  # fmt: skip
        return heard

    def close(self) -> None:
        """End all that is left: processes, sockets, folder."""
        for number in self:
            self.end(number)
        until = time.monotonic() + self._options.close_seconds
        for one in self._killed:
            if not one.release(until):
                logger.warning("%s does not end although it was killed; see the system's log", one)
        self._context.destroy(linger=0)
        self._bell.close()
        self._rope.close()
        self._held.remove()
