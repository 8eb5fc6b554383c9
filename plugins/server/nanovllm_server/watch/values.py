"""Counters and histograms as an array of float64 in a shared file, with one writer each.

An engine's observer adds to its own file; the process that serves HTTP reads all files and sums
them. The two may be the same process or not, and an engine that ended leaves its sums behind.
Prometheus' own client has a mode for several processes, but it takes a lock and writes two fields
for each change and counts a histogram one value at a time. A step changes some thirty numbers.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".values"


@dataclass(frozen=True, slots=True)
class Counter:
    """A sum that only grows; with a `label`, one for each of its `label_values`."""

    name: str
    help: str
    label: str = ""
    label_values: tuple[str, ...] = ("",)

    @property
    def size(self) -> int:
        """How many numbers it takes."""
        return len(self.label_values)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values up to each of `bounds`, of all larger ones, and the sum of the values."""

    name: str
    help: str
    bounds: tuple[float, ...]

    @property
    def size(self) -> int:
        """A count for each bucket, one for the values above the last bound, and the sum."""
        return len(self.bounds) + 2


Metric = Counter | Histogram


class Layout:
    """Where each metric's numbers stand in a file. Writer and reader share one."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        self._starts: dict[str, int] = {}
        self.size = 0
        """Of a file, in numbers."""
        for metric in self.metrics:
            self._starts[metric.name] = self.size
            self.size += metric.size

    def start(self, metric: Metric) -> int:
        """The index of the metric's first number."""
        return self._starts[metric.name]

    def part(self, values: Sequence[float], metric: Metric) -> Sequence[float]:
        """The numbers of one metric."""
        start = self.start(metric)
        return values[start : start + metric.size]


class ValuesFile:
    """A new file of zeros in `folder`, which this object alone adds to."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._layout = layout
        handle, name = tempfile.mkstemp(SUFFIX, f"{os.getpid()}-", folder)
        with os.fdopen(handle, "r+b") as file:
            file.truncate(8 * layout.size)
            self._map = mmap.mmap(file.fileno(), 8 * layout.size)
        self.path = Path(name)
        self._bytes = memoryview(self._map)
        self._values: memoryview[float] = self._bytes.cast("d")

    def counter(self, metric: Counter) -> CounterValues:
        return CounterValues(self._values, self._layout.start(metric), metric)

    def histogram(self, metric: Histogram) -> HistogramValues:
        return HistogramValues(self._values, self._layout.start(metric), metric)

    def close(self) -> None:
        """Unmap the file and leave it where it is. Closing twice is fine."""
        self._values.release()
        self._bytes.release()
        self._map.close()


class CounterValues:
    """Adds to a counter."""

    __slots__ = ("_index", "_values")

    def __init__(self, values: memoryview[float], start: int, metric: Counter) -> None:
        self._values = values
        self._index = {value: start + at for at, value in enumerate(metric.label_values)}

    def add(self, amount: float, label_value: str = "") -> None:
        self._values[self._index[label_value]] += amount


class HistogramValues:
    """Adds to a histogram."""

    __slots__ = ("_bounds", "_start", "_sum", "_values")

    def __init__(self, values: memoryview[float], start: int, metric: Histogram) -> None:
        self._values = values
        self._bounds = metric.bounds
        self._start = start
        self._sum = start + metric.size - 1

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._values[self._start + bisect_left(self._bounds, value)] += times
        self._values[self._sum] += value * times


def read_values(folder: Path, layout: Layout) -> array[float]:
    """The sums over all files of a folder."""
    total = array("d", bytes(8 * layout.size))
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        found = path.read_bytes()
        if len(found) == 8 * layout.size:  # else its writer has not given it its size yet
            total = array("d", map(float.__add__, total, array("d", found)))
    return total


def quantile(counts: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """The value below which `share` of a histogram's values lie; None where there are none.

    Linear within a bucket, as Prometheus' `histogram_quantile` computes it; the last bound where
    the value lies above it. `counts` are those of the buckets, without the sum.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0.0
    for lower, upper, count in zip((0.0, *bounds), bounds, counts, strict=False):
        if count and below + count >= wanted:
            return lower + (upper - lower) * (wanted - below) / count
        below += count
    return bounds[-1]


def bounds_between(
    first: float, last: float, digits: Sequence[float] = (1, 1.5, 2, 3, 5, 7)
) -> tuple[float, ...]:
    """Bounds from `first` to `last`: the digits of each power of ten."""
    values = (float(f"{digit}e{power}") for power in range(-6, 8) for digit in digits)
    return tuple(value for value in values if first <= value <= last)
