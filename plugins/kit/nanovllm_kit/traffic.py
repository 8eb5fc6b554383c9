"""Random traffic for an engine on the fake worker: arrivals, prefixes, aborts, sizes, depths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from nanovllm_core.interfaces.cache_groups import SequenceNeed
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.engine_harness import Harness, Letters, Setting
from nanovllm_kit.scheduler_views import request_labels

_FIRST = [7 * i % 50 for i in range(60)]
BASES = [_FIRST, [11 * i % 50 for i in range(60)], [49, *_FIRST[1:]]]
"""Prompts start as one of these, so that prefixes meet; two of them differ in one id alone."""


@dataclass(frozen=True)
class Arrival:
    """A request, and what happens around it."""

    base: int
    shared: int
    own: tuple[int, ...]
    max_tokens: int
    temperature: float
    priority: int
    n: int
    stream: bool
    stop: str | None
    salt: bytes
    labels: Mapping[str, str]
    steps_before: int
    abort_after: int | None

    def prompt(self) -> list[int]:
        """A prefix that others may have too, and some ids of its own."""
        return BASES[self.base][: self.shared] + list(self.own)


@dataclass(frozen=True)
class Traffic:
    """An engine's sizes, and the requests that arrive there."""

    setting: Setting
    arrivals: Sequence[Arrival]


def arrivals(max_prompt: int, max_output: int) -> st.SearchStrategy[Arrival]:
    """One request that fits."""
    return st.builds(
        Arrival,
        base=st.integers(0, len(BASES) - 1),
        shared=st.integers(0, max_prompt - 3),
        own=st.lists(st.integers(0, 49), min_size=1, max_size=3).map(tuple),
        max_tokens=st.integers(1, max_output),
        temperature=st.sampled_from([0.0, 0.7]),
        priority=st.sampled_from([0, 0, -1, 2]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        stream=st.booleans(),
        stop=st.sampled_from([None, None, "q"]),
        salt=st.sampled_from([b"", b"", b"tenant"]),
        labels=request_labels(),
        steps_before=st.integers(0, 3),
        abort_after=st.none() | st.none() | st.integers(0, 12),
    )


def cache_windows() -> st.SearchStrategy[tuple[int | None, ...]]:
    """One to three groups of any windows."""
    window = st.none() | st.integers(1, 4) | st.integers(1, 40)
    return st.lists(window, min_size=1, max_size=3).map(tuple)


MOSTLY_ONE = st.sampled_from([(None,), (None,), (None,), (None,), (None, 6), (9, None, 2)])
"""Cache groups as most models have them; blocks run out less often where windows let them go."""


@st.composite
def engine_settings(
    draw: st.DrawFn, windows: st.SearchStrategy[tuple[int | None, ...]] = MOSTLY_ONE
) -> tuple[Setting, int, int]:
    """An engine's sizes with the longest prompt and output that it must take."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    max_prompt, max_output = (60, 10) if block_size == 16 else (24, 12)
    longest = max_prompt + max_output
    max_num_seqs = draw(st.integers(1, 8))
    max_num_batched_tokens = max_num_seqs + draw(st.sampled_from([0, 1, 7, 30, 200]))
    cache_windows = draw(windows)
    need = SequenceNeed(cache_windows, block_size, max_num_batched_tokens)
    enough = need.blocks(longest - 1)
    setting = Setting(
        # From so few blocks that every second request is preempted, to plenty.
        num_blocks=enough + draw(st.sampled_from([0, 0, 1, 2, enough, 3 * enough])),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=longest,
        prefix_caching=draw(st.booleans()),
        steps_ahead=draw(st.integers(0, 3)),
        eos_token_ids=draw(st.sampled_from([(), (3,), (3, 17, 40)])),
        cache_windows=cache_windows,
    )
    return setting, max_prompt, max_output


@st.composite
def traffic(draw: st.DrawFn, most: int = 16) -> Traffic:
    """An engine and up to `most` requests for it."""
    setting, max_prompt, max_output = draw(engine_settings())
    requests = draw(st.lists(arrivals(max_prompt, max_output), min_size=1, max_size=most))
    return Traffic(setting, requests)


def drive(harness: Harness, requests: Sequence[Arrival]) -> None:
    """Let requests arrive and be aborted between steps, then run all to the end and check them."""
    __tracebackhide__ = True
    for _ in play(harness, requests):
        pass


def play(harness: Harness, requests: Sequence[Arrival]) -> Iterator[None]:
    """As `drive`, a step at a time: others may run between."""
    __tracebackhide__ = True
    aborts: dict[int, list[str]] = {}
    step = 0
    for i, arrival in enumerate(requests):
        for _ in range(arrival.steps_before):
            step = _step(harness, aborts, step)
            yield
        params = SamplingParams(
            temperature=arrival.temperature,
            max_tokens=arrival.max_tokens,
            priority=arrival.priority,
            n=arrival.n,
            stop=arrival.stop,
        )
        harness.add(
            f"r{i}",
            arrival.prompt(),
            params,
            stream=arrival.stream,
            detokenizer=Letters if arrival.stop else None,
            cache_salt=arrival.salt,
            labels=arrival.labels,
        )
        if arrival.abort_after is not None:
            aborts.setdefault(step + arrival.abort_after, []).append(f"r{i}")
    while aborts and harness.engine.has_unfinished():
        step = _step(harness, aborts, step)
        yield
    yield from harness.steps()
    harness.check_all()


def _step(harness: Harness, aborts: dict[int, list[str]], step: int) -> int:
    __tracebackhide__ = True
    for request_id in aborts.pop(step, []):
        harness.engine.abort(request_id)
        harness.engine.abort(request_id)  # twice is fine
        harness.engine.assert_consistent()
    if harness.engine.has_unfinished():
        harness.step()
    return step + 1
