"""Which kernels a call launches on a GPU, and with what grids, as torch's profiler records them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel: its name, its grid of thread blocks, and its time on the device."""

    name: str
    grid: tuple[int, ...]
    microseconds: float


def count_launches(call: Callable[[], object], device: torch.device) -> list[Launch] | None:
    """The kernels of one call in order; None on a CPU, which launches none."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return read_launches(trace)


def read_launches(trace: Path) -> list[Launch]:
    """The kernel events of a trace in Chrome's format, in the order of their start."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"]))
    return [
        Launch(event["name"], tuple(event["args"].get("grid", ())), float(event["dur"]))
        for event in kernels
    ]
