"""What keys of policies are asked about: requests of any lengths, at any time of day."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from hypothesis import strategies as st

from nanovllm_core.interfaces.request_labels import (
    MAX_LABELS,
    MAX_NAME_LENGTH,
    NO_LABELS,
    check_labels,
)


@dataclass(kw_only=True)
class View:
    """A request that only its lengths, its arrival, its priority and labels are known of."""

    request_id: str
    arrival_step: int
    arrival_index: int
    priority: int
    labels: Mapping[str, str]
    num_prompt_tokens: int
    num_tokens: int
    num_scheduled: int
    max_length: int


UNEXPECTED_TEXTS = ("", "soon", "-1", "inf", "nan", "1e400", "0x1f", "9" * 256, "é" * 256, "\0\n")
"""Of labels: whatever a caller may write where a scheduler expects a number, a date or a name."""


def any_labels(asked: Iterable[str]) -> list[dict[str, str]]:
    """No labels, unheard-of ones, and every unexpected text under the names that are looked for."""
    names = sorted(name for name in asked if 1 <= len(name) <= MAX_NAME_LENGTH)[:MAX_LABELS]
    alone = [{name: text} for name in names for text in UNEXPECTED_TEXTS]
    together = [dict.fromkeys(names, text) for text in UNEXPECTED_TEXTS]
    return [{}, {"unheard of": "x"}, *alone, *together, {}]


def request_labels() -> st.SearchStrategy[Mapping[str, str]]:
    """What callers say of requests: mostly nothing, else names and texts that may be unheard of."""
    names = st.sampled_from(["tenant", "deadline", "user"]) | st.text("ab é_", min_size=1)
    texts = st.sampled_from(["a", "b", *UNEXPECTED_TEXTS])
    some = st.dictionaries(names, texts, max_size=3).map(check_labels)
    return (
        st.just(NO_LABELS) | st.sampled_from("ab").map(lambda t: check_labels({"tenant": t})) | some
    )


def a_view(labels: Mapping[str, str]) -> View:
    """A request of which only the labels matter."""
    return View(
        request_id="r",
        arrival_step=5,
        arrival_index=7,
        priority=0,
        labels=labels,
        num_prompt_tokens=9,
        num_tokens=9,
        num_scheduled=0,
        max_length=20,
    )


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
        labels=draw(request_labels()),
        num_prompt_tokens=prompt,
        num_tokens=known,
        num_scheduled=0 if waiting else draw(st.just(0) | st.integers(0, known)),
        max_length=known + draw(sizes(14)),
    )


@contextmanager
def hours_pass() -> Iterator[None]:
    """A clock that is an hour on at each reading."""
    with ExitStack() as stack:
        for clock in ("time", "monotonic", "perf_counter"):
            readings = itertools.count(getattr(time, clock)() + 3600, 3600)
            stack.enter_context(patch.object(time, clock, partial(next, readings)))
        yield
