"""Steps of work, counted: the same on every machine, however fast it is.

A step is a call or a line of Python that runs, or one operation on what a request's view gave: a
comparison, a hash, a sum. So a loop inside a built-in (`in`, `sorted`, `min`, `list.remove`) counts
as one that is written out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nanovllm_core.interfaces.scheduler import RequestView

STEPS_PER_REQUEST = 32
"""The contract's factor: of `n log2 n` steps a call."""
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "hash")
SUMS = ("add", "radd", "sub", "rsub", "mul", "rmul", "neg")
OPERATIONS = (*COMPARISONS, *SUMS)
"""Of numbers and texts; each counts one step."""


class TooMuchWorkError(AssertionError):
    """A call went on for more steps than the contract allows."""


def work_limit(requests: int) -> int:
    """Steps that one look at so many requests may take: a sort of them, with room to spare."""
    return int(STEPS_PER_REQUEST * requests * math.log2(requests + 2)) + 1_000


class Meter:
    """Counts steps, and ends a call that takes too many."""

    def __init__(self) -> None:
        self.steps = 0
        self._limit = math.inf
        self._what = ""
        self._counted = {int: _counted(int, self), str: _counted(str, self)}

    def count(self, steps: int = 1) -> None:
        """So many more steps; TooMuchWorkError beyond the limit of the call that is metered."""
        self.steps += steps
        if self.steps > self._limit:
            limit, self._limit = self._limit, math.inf
            raise TooMuchWorkError(
                f"{self._what} took more than {limit:,.0f} steps of work; look at each request a "
                f"bounded number of times, or sort them"
            )

    @contextmanager
    def at_most(self, limit: float, what: str) -> Iterator[None]:
        """Count what runs within; a tracer that is active (of coverage, of a debugger) pauses."""
        self.steps, self._limit, self._what = 0, limit, what
        paused = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(paused)
            self._limit = math.inf

    def value(self, value: Any) -> Any:
        """A number or a text of a view, whose operations count; anything else as it is."""
        kind = self._counted.get(type(value))
        return value if kind is None else kind(value)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        """A tracer as of `sys.settrace`: calls and lines, but those of this file."""
        if frame.f_code.co_filename == __file__:
            return None
        if event in ("call", "line"):
            self.count()
        return self._trace


def _counted(base: type, meter: Meter) -> type:
    """A subclass of int or str whose operations count, and give values that count."""

    def counting(name: str) -> Callable[..., Any]:
        plain = getattr(base, name)

        def operation(self: Any, *others: Any) -> Any:
            meter.count()
            result = plain(self, *others)
            return kind(result) if type(result) is base and name != "__hash__" else result

        return operation

    names = [f"__{name}__" for name in OPERATIONS if hasattr(base, f"__{name}__")]
    kind = type(f"Counted{base.__name__}", (base,), {name: counting(name) for name in names})
    return kind


class CountedRequest:
    """A request's view. Reading it counts, and so does all that is done with what it gives."""

    __slots__ = ("__meter", "__request")

    def __init__(self, request: RequestView, meter: Meter) -> None:
        self.__request = request
        self.__meter = meter

    def __getattr__(self, name: str) -> Any:
        self.__meter.count()
        return self.__meter.value(getattr(self.__request, name))

    def __eq__(self, other: object) -> bool:
        self.__meter.count()
        return self is other

    def __hash__(self) -> int:
        self.__meter.count()
        return id(self)


class CountedQueue(Sequence[RequestView]):
    """`SchedulerState.waiting` as an engine gives it: an index walks from the start."""

    def __init__(self, requests: Sequence[RequestView], meter: Meter) -> None:
        self._requests = requests
        self._meter = meter

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        for request in self._requests:
            self._meter.count()
            yield request

    def __getitem__(self, index: int) -> RequestView:  # type: ignore[override]  # no slices
        self._meter.count(1 + index % max(1, len(self._requests)))
        return self._requests[index]
