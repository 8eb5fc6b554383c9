"""Several engines as one: their counters, and the facts of their start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from nanovllm_core.api import DeviceError, EngineConfig, WorkerInfo
from nanovllm_core.frontend import EngineStats


@dataclass(slots=True)
class Question:
    """A question to all engines; `waiting` are those that have not answered."""

    subscriber: int
    waiting: set[int]
    answers: dict[int, EngineStats] = field(default_factory=dict)


def sum_stats(each: Iterable[EngineStats], is_one: bool) -> EngineStats:
    """The counters of several engines together, with those of each; of the only one, its own."""
    stats = tuple(each)
    if is_one and stats:
        return stats[0]
    names = [one.name for one in fields(EngineStats) if one.name != "engines"]
    sums = {name: sum(getattr(one, name) for one in stats) for name in names}
    return EngineStats(**sums, engines=stats)


def common_info(
    infos: dict[int, WorkerInfo], size: int, seconds: float, before: WorkerInfo | None = None
) -> WorkerInfo:
    """The state of the first engine, which stands for all; the device says how many run.

    The time of the start that no part of the engine's own is in goes to `processes`.
    """
    first, *_ = infos.values()
    own = first.start_seconds
    timed = {"processes": max(0.0, seconds - sum(own.values())), **own}
    return replace(
        first,
        device=first.device if size == 1 else f"{len(infos)} of {size} engines x {first.device}",
        max_model_len=min(info.max_model_len for info in infos.values()),
        start_seconds=timed if before is None else before.start_seconds,
    )


def check_devices(infos: dict[int, WorkerInfo], config: EngineConfig) -> None:
    """DeviceError where some engines found a GPU, and others took the CPU."""
    on_cpu = [number for number, info in infos.items() if info.device.endswith("cpu")]
    if on_cpu and len(on_cpu) < len(infos):
        raise DeviceError(
            f"engines {', '.join(map(str, on_cpu))} found no GPU; data_parallel_size: "
            f"{config.data_parallel_size} x tensor_parallel_size: {config.tensor_parallel_size} "
            f"needs {config.data_parallel_size * config.tensor_parallel_size} GPUs: lower one of "
            "them, or see CUDA_VISIBLE_DEVICES"
        )
