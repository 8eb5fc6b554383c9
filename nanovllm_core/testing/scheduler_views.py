"""What keys of policies are asked about: requests of any lengths, at any time of day."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from hypothesis import strategies as st

from nanovllm_core.request_labels import NO_LABELS, check_labels


@dataclass(frozen=True, kw_only=True)
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


def request_labels() -> st.SearchStrategy[Mapping[str, str]]:
    """What callers say of requests: mostly nothing, else names and texts that may be unheard of."""
    names = st.sampled_from(["tenant", "deadline", "user"]) | st.text("ab é_", min_size=1)
    texts = st.sampled_from(["a", "b", "", "soon", "-1", "inf"]) | st.text(max_size=8)
    some = st.dictionaries(names, texts, max_size=3).map(check_labels)
    return (
        st.just(NO_LABELS) | st.sampled_from("ab").map(lambda t: check_labels({"tenant": t})) | some
    )


@st.composite
def views(draw: st.DrawFn) -> View:
    prompt = draw(st.integers(1, 4096))
    known = prompt + draw(st.integers(0, 100))
    index = draw(st.integers(0, 10_000))
    return View(
        request_id=f"r{index}",
        arrival_step=draw(st.integers(0, 10_000)),
        arrival_index=index,
        priority=draw(st.integers(-3, 3)),
        labels=draw(request_labels()),
        num_prompt_tokens=prompt,
        num_tokens=known,
        num_scheduled=draw(st.just(0) | st.integers(0, known)),
        max_length=known + draw(st.integers(0, 100)),
    )


@contextmanager
def hours_pass() -> Iterator[None]:
    """Whoever reads a clock finds it an hour on from the last reading."""
    with ExitStack() as stack:
        for clock in ("time", "monotonic", "perf_counter"):
            readings = itertools.count(getattr(time, clock)() + 3600, 3600)
            stack.enter_context(patch.object(time, clock, partial(next, readings)))
        yield
