"""What keys of policies are asked about: requests of any lengths, at any time of day."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from hypothesis import strategies as st


@dataclass(kw_only=True)
class View:
    """A request that only its lengths, its arrival and its priority are known of."""

    request_id: str
    arrival_step: int
    arrival_index: int
    priority: int
    num_prompt_tokens: int
    num_tokens: int
    num_scheduled: int
    max_length: int


def sizes(bits: int) -> st.SearchStrategy[int]:
    """Whole numbers from 1 to 2 ** bits - 1, each length in bits as likely as any other."""
    return st.integers(1, bits).flatmap(lambda b: st.integers(2 ** (b - 1), 2**b - 1))


@st.composite
def views(draw: st.DrawFn, waiting: bool = False) -> View:
    """A request at any time of its life, or one that joins the queue."""
    prompt = draw(sizes(20))
    known = prompt + draw(st.just(0) | sizes(14))
    index = draw(sizes(20))
    return View(
        request_id=f"r{index}",
        arrival_step=draw(sizes(24)),
        arrival_index=index,
        priority=draw(st.integers(-3, 3) | st.integers(-100, 100)),
        num_prompt_tokens=prompt,
        num_tokens=known,
        num_scheduled=0 if waiting else draw(st.just(0) | st.integers(0, known)),
        max_length=known + draw(sizes(14)),
    )


@contextmanager
def hours_pass() -> Iterator[None]:
    """Whoever reads a clock finds it an hour on from the last reading."""
    with ExitStack() as stack:
        for clock in ("time", "monotonic", "perf_counter"):
            readings = itertools.count(getattr(time, clock)() + 3600, 3600)
            stack.enter_context(patch.object(time, clock, partial(next, readings)))
        yield
