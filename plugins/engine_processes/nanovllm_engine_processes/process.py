"""An engine's process as the door's sees it: how it is started, watched and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from nanovllm_core.api import DeviceError, EngineConfig, EngineError

PROGRAM = """\
import sys
sys.path[:] = sys.argv[5:]
from nanovllm_engine_processes.child import main
main()
"""
"""No main module is imported again: scripts need no guard, and stdin and notebooks work."""


class EngineProcess:
    """The process of one engine. It is spawned, because CUDA does not survive a fork.

    It leads a process group of its own: Ctrl-C in a terminal does not reach it, and what it has
    started, such as a compiler, ends with it.
    """

    def __init__(self, number: int, folder: str, environment: Mapping[str, str]) -> None:
        self.number = number
        self.unanswered = 0
        """The pings since it was heard last, if it should have answered."""
        self.held = 0
        """The pings that were answered while its loop was at one and the same turn."""
        self._turns = 0
        self.is_ready = False
        """Its engine has started: from then on it answers in time."""
        variables = os.environ | environment
        if number > 0:
            variables["TERM"] = "dumb"  # one engine's progress bars are enough
        # The name is for `ps`.
        arguments = [f"nanovllm engine {number}", folder, str(number), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments, *sys.path],
                stdin=subprocess.DEVNULL,
                env=variables,
                process_group=0,
            )
        except OSError as error:
            raise EngineError(f"engine {number} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def __str__(self) -> str:
        return f"engine {self.number} (process {self.pid})"

    def note_ping(self) -> None:
        """It was asked. During a start, silence counts only if the process is stopped."""
        if self.is_ready or self._wait(os.WSTOPPED):
            self.unanswered += 1

    def note_pong(self, turns: int, works: bool) -> None:
        """It has answered: how often its loop has turned, and whether it waits for no message."""
        self.held = self.held + 1 if works and turns == self._turns else 0
        self._turns = turns

    def has_ended(self) -> bool:
        """True once the process has ended. Until `release`, nothing else gets its process id."""
        return self._wait(os.WEXITED) is not None or self._process.returncode is not None

    def how_it_ended(self) -> str:
        """An exit code or a signal."""
        end = self._wait(os.WEXITED)
        if end is None:
            return "ended"
        if end.si_code == os.CLD_EXITED:
            return f"ended with exit code {end.si_status}"
        number = end.si_status
        known = number in {one.value for one in signal.Signals}  # real-time signals have no name
        return f"ended with signal {signal.Signals(number).name if known else number}"

    def kill(self) -> None:
        """End the process, and those of its group: they may outlive it."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS: nobody but a zombie
                os.killpg(self.pid, signal.SIGKILL)

    def release(self, until: float) -> bool:
        """Wait for the end, until a time of `monotonic`; False where it does not come."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.1, until - time.monotonic()))
        return self._process.returncode is not None

    def _wait(self, change: int) -> os.waitid_result | None:
        """What `waitid` says if the process has ended (WEXITED) or is stopped (WSTOPPED)."""
        try:
            return os.waitid(os.P_PID, self.pid, change | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this program reaps all its processes, or ignores SIGCHLD
            self._process.poll()
            return None


def config_of_each(config: EngineConfig) -> EngineConfig:
    """The configuration of one of the engines: on a thread of its process, with its own GPUs."""
    changes: dict[str, object] = {"data_parallel_size": 1, "engine_client": {"name": "thread"}}
    if config.data_parallel_size > 1 and config.device.startswith("cuda"):
        changes["device"] = "cuda"  # the first of those that it sees
    return EngineConfig.model_validate(config.model_dump() | changes)


def environment_of_each(
    config: EngineConfig, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """The variables of each engine's process beside `environment`: its GPUs, its share of cores.

    Engine i gets the GPUs from `device` + i x tensor_parallel_size on, of those that
    CUDA_VISIBLE_DEVICES lists. DeviceError where it lists too few; an engine whose GPU is not there
    says so itself.
    """
    count, width = config.data_parallel_size, config.tensor_parallel_size
    if count == 1:
        return [{}]
    shared: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in environment:
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // count))
    first, needed = int(config.device.partition(":")[2] or 0), count * width
    given = environment.get("CUDA_VISIBLE_DEVICES")
    listed = given.split(",") if given else [str(gpu) for gpu in range(first + needed)]
    if config.device == "cpu" or (given == "" and config.device == "auto"):
        return [shared] * count
    if first + needed > len(listed):
        raise DeviceError(
            f"data_parallel_size: {count} x tensor_parallel_size: {width} from device "
            f"{config.device} on needs {first + needed} GPUs, but CUDA_VISIBLE_DEVICES lists "
            f"{len(listed)} ({given}); lower one of the sizes"
        )
    starts = range(first, first + needed, width)
    return [
        shared | {"CUDA_VISIBLE_DEVICES": ",".join(listed[start : start + width])}
        for start in starts
    ]
