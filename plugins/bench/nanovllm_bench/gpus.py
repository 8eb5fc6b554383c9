"""GPUs by name: memory, rates and links, from their vendor's data sheets, or measured here.

`gpus.json` is the table. A data sheet's link bandwidth counts both directions; its bf16 rate here
is the dense one.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

import torch

from nanovllm_bench.rates import measure_rates
from nanovllm_bench.roofline import Rates
from nanovllm_core.errors import DeviceError, did_you_mean, shown
from nanovllm_core.selection import resolve_device

LOCAL = "local"

USABLE = 139.8 / 141
"""CUDA's GiB of memory by the data sheet's GB, as measured on an H200. The driver has the rest."""

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The facts of a GPU that a plan needs.

    `link_bytes_per_s` is what the GPU can send, and can receive at the same time; None where it is
    unknown. `all_reduce_points` are (bytes, seconds) measured by the number of GPUs.
    """

    name: str
    memory_bytes: int
    rates: Rates
    compute_capability: tuple[int, int]
    link_bytes_per_s: float | None
    source: str
    all_reduce_points: Mapping[int, Points]
    all_reduce_source: str | None = None

    def all_reduce_is_measured(self, num_gpus: int) -> bool:
        """Whether `all_reduce_seconds` interpolates measurements, or is arithmetic."""
        return num_gpus in self.all_reduce_points

    def all_reduce_seconds(self, num_bytes: int, num_gpus: int) -> float | None:
        """A sum over GPUs: between measured sizes where there are some, else by the links alone.

        Each GPU must send and receive 2 (n - 1) / n of the bytes. None where links are unknown.
        """
        if num_gpus == 1:
            return 0.0
        if points := self.all_reduce_points.get(num_gpus):
            return _between(points, num_bytes)
        if self.link_bytes_per_s is None:
            return None
        return 2 * (num_gpus - 1) / num_gpus * num_bytes / self.link_bytes_per_s


def find_gpu(name: str) -> Gpu:
    """A GPU of the table by its name in any case, or the one that is here (`local`).

    Raises DeviceError for an unknown name, and for `local` where there is no GPU.
    """
    if name == LOCAL:
        return _local_gpu()
    for gpu in known_gpus():
        if gpu.name.lower() == name.lower():
            return gpu
    names = [gpu.name for gpu in known_gpus()]
    raise DeviceError(
        f"--gpu: {shown(name)} is not in the table{did_you_mean(name, names)}; known are "
        f"{', '.join(names)}, and {LOCAL} for the GPU of this machine"
    )


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """The table of the package, in its order."""
    return tuple(_read(name, entry) for name, entry in _table().items())


def _table() -> dict[str, Any]:
    text = (files("nanovllm_bench") / "gpus.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _read(name: str, entry: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=int(entry["memory_gb"] * USABLE * 2**30),
        rates=Rates(entry["memory_tb_per_s"] * 1e12, entry["bf16_tflops"] * 1e12),
        compute_capability=tuple(entry["compute_capability"]),
        link_bytes_per_s=entry["link_gb_per_s"] * 1e9 / 2,
        source=entry["source"],
        all_reduce_points={
            int(num_gpus): tuple((size, us * 1e-6) for size, us in points)
            for num_gpus, points in entry.get("all_reduce_us", {}).items()
        },
        all_reduce_source=entry.get("all_reduce_source"),
    )


def _local_gpu() -> Gpu:
    """This machine's first GPU with its measured rates; its links, where the table knows it."""
    try:
        device = torch.device(resolve_device("cuda"))
    except DeviceError as error:
        names = ", ".join(gpu.name for gpu in known_gpus())
        raise DeviceError(f"--gpu {LOCAL}: there is no GPU here; name one: {names}") from error
    properties = torch.cuda.get_device_properties(device)
    table_names = {entry["cuda_name"]: name for name, entry in _table().items()}
    known = table_names.get(properties.name)
    here = Gpu(
        name=properties.name,
        memory_bytes=properties.total_memory,
        rates=measure_rates(device, torch.bfloat16),
        compute_capability=(properties.major, properties.minor),
        link_bytes_per_s=None,
        source="measured now: a large copy, and a large product in bf16",
        all_reduce_points={},
    )
    if known is None:
        return here
    entry = find_gpu(known)
    return replace(
        here,
        link_bytes_per_s=entry.link_bytes_per_s,
        all_reduce_points=entry.all_reduce_points,
        all_reduce_source=entry.all_reduce_source,
        source=f"{here.source}; links: {entry.source}",
    )


def _between(points: Points, num_bytes: int) -> float:
    """Linear between the points; the first one's time below it, the last one's rate beyond it."""
    first, last = points[0], points[-1]
    if num_bytes <= first[0]:
        return first[1]
    if num_bytes >= last[0]:
        return last[1] * num_bytes / last[0]
    index = bisect_left([size for size, _ in points], num_bytes)
    (low, fast), (high, slow) = [*pairwise(points)][index - 1]
    return fast + (slow - fast) * (num_bytes - low) / (high - low)
