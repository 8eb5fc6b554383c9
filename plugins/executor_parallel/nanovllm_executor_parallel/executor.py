"""The engine's side: it starts the ranks, sends every plan to all of them, and asks for results."""

from __future__ import annotations

import logging
import pickle
import socket
import time
from dataclasses import replace

import torch

from nanovllm_core.api import (
    DeviceError,
    Executor,
    ExecutorError,
    StepPlan,
    StepResult,
    TokenMasks,
    WorkerInfo,
    WorkerSetup,
)
from nanovllm_executor_parallel.messages import COLLECT, HOST, Start, encode
from nanovllm_executor_parallel.plugin import ParallelOptions
from nanovllm_executor_parallel.process import RankProcess
from nanovllm_executor_parallel.ranks import Ranks


class ParallelExecutor(Executor):
    """Every rank gets the same messages; see `nanovllm_core.api.Executor` for the contract."""

    def __init__(self, options: ParallelOptions) -> None:
        super().__init__(options)
        self._bounds = options
        self._ranks: Ranks | None = None
        self._has_started = False
        self._is_asked = False  # for a result; Ctrl-C may have left the wait for it

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        began = time.monotonic()
        size = setup.config.tensor_parallel_size
        check_devices(setup.device, size)
        ranks = self._ranks = Ranks(self._bounds)
        spawn(ranks, setup, size, self._bounds)
        until = began + self._bounds.start_seconds
        for one in ranks:
            ranks.receive(one.rank, until)
        imported = time.monotonic() - began
        info: WorkerInfo
        info, *_ = [ranks.receive(one.rank, until) for one in ranks]
        self._has_started = True
        return replace(
            info,
            device=info.device if size == 1 else f"{size} x {info.device}",
            start_seconds={"processes": imported, **info.start_seconds},
        )

    def submit(self, plan: StepPlan) -> None:
        self._running().send(plan)

    def sample(self, masks: TokenMasks) -> None:
        self._running().send(masks)

    def collect(self) -> StepResult:
        ranks = self._running()
        if not self._is_asked:
            self._is_asked = True
            ranks.send(COLLECT)
        result: StepResult = ranks.receive(0)
        self._is_asked = False
        return result

    def check(self) -> None:
        self._running().check()

    def close(self) -> None:
        if self._ranks is None or not self._ranks.are_running:
            return
        if self._has_started:
            self._ranks.close()
        else:  # Ctrl-C has ended the start, and the ranks would not listen before its end
            self._ranks.kill()

    def _running(self) -> Ranks:
        if self._ranks is None or not self._ranks.are_running:
            raise ExecutorError("the ranks are not running; make a new LLM")
        return self._ranks


def check_devices(device: str, size: int) -> None:
    """DeviceError where there is no GPU for each rank, from the first rank's on."""
    kind, _, first = device.partition(":")
    if kind != "cuda":
        return
    last, count = int(first or 0) + size - 1, torch.cuda.device_count()
    if last >= count:
        raise DeviceError(
            f"tensor_parallel_size: {size} from device {device} on needs the GPUs up to "
            f"cuda:{last}, but torch sees {count}; lower one of the two, or see "
            "CUDA_VISIBLE_DEVICES"
        )


def spawn(ranks: Ranks, setup: WorkerSetup, size: int, bounds: ParallelOptions) -> None:
    """Start the processes. Rank 0 inherits the socket at whose port, a free one, all ranks meet."""
    # The engine's own bounds come first, and its errors say more.
    timeout_seconds = bounds.start_seconds + bounds.stall_seconds
    num_threads = max(1, torch.get_num_threads() // size) if setup.device == "cpu" else None
    data = pickle.dumps(setup, pickle.HIGHEST_PROTOCOL)
    with socket.create_server((HOST, 0)) as listening:
        for rank in range(size):
            inherited = listening.fileno() if rank == 0 else None
            one = RankProcess(rank, () if inherited is None else (inherited,), num_threads)
            ranks.add(one)
            start = Start(
                rank=rank,
                world_size=size,
                setup=data,
                port=listening.getsockname()[1],
                listening=inherited,
                timeout_seconds=timeout_seconds,
                stall_seconds=bounds.stall_seconds,
                all_reduce=bounds.all_reduce,
                log_level=logging.getLogger("nanovllm_core").getEffectiveLevel(),
            )
            one.messages.send(encode(start))
