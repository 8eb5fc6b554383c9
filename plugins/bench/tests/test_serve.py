"""Load on an endpoint whose times are known, mostly on a clock that passes only while all wait."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm_bench.latency import arrival_times, percentiles
from nanovllm_bench.serve.client import Endpoint, Request, tokens_of
from nanovllm_bench.serve.events import EventReader, allot_tokens
from nanovllm_bench.serve.load import LongPrompts, Outcome, Share, run_share, watched_lag
from nanovllm_bench.serve.processes import divide
from nanovllm_bench.serve.summary import Objectives, summarise, values_of
from nanovllm_bench.serve.timed import MODEL, Script, Served, TimedEndpoint, steady
from nanovllm_bench.workloads import fixed_workload, nano_workload, text_of

TURN_SECONDS = 1e-4


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def skip(timeout: float | None) -> Any:
            events = select(0) or (timeout != 0 and select(2e-4 if timeout else 5))
            if not events:
                self._now += timeout or TURN_SECONDS
            return events or []

        selector.select = skip

    def time(self) -> float:
        return self._now


def simulate(
    script: Callable[[int, Mapping[str, Any]], Script],
    requests: Sequence[Request],
    clients: int | None = None,
    **settings: Any,
) -> tuple[Outcome, list[Served]]:
    """Carry a load against a scripted endpoint, both on one simulated clock."""
    long_prompts = settings.pop("long_prompts", None)

    async def main() -> tuple[Outcome, list[Served]]:
        endpoint = TimedEndpoint(script)
        async with endpoint.listen() as url:
            to = Endpoint(url, MODEL, **settings)
            async with to.open_session() as session:
                share = Share(to, requests, clients, long_prompts=long_prompts)
                start = asyncio.get_running_loop().time() + 1.0
                outcome = await asyncio.wait_for(run_share(share, session, start), 3600)
        return outcome, endpoint.served

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main())


def summary(outcome: Outcome, objectives: Objectives | None = None) -> dict[str, Any]:
    return summarise([outcome], objectives or Objectives(), exact_lengths=True)


def requests_of(count: int, output_len: int = 8, times: Sequence[float] | None = None) -> Any:
    return [Request([1, 2, 3], output_len, times and times[i]) for i in range(count)]


def random_scripts(seed: int) -> Callable[[int, Mapping[str, Any]], Script]:
    """Every request has its own first token and its own times between tokens."""

    def script(index: int, body: Mapping[str, Any]) -> Script:
        rng = random.Random(f"{seed} {index}")
        gaps = [rng.lognormvariate(-4, 0.7) for _ in range(body["max_tokens"] - 1)]
        return Script(rng.uniform(0.02, 0.4), gaps)

    return script


@pytest.mark.parametrize("clients", [None, 7])
@pytest.mark.parametrize("prompts", ["ids", "chat"])
def test_the_percentiles_are_those_of_the_endpoint(clients: int | None, prompts: Any) -> None:
    """Within 3 %, for Poisson arrivals and for clients that wait."""
    times = None if clients else arrival_times(40, 20.0, "poisson", seed=5)
    script = random_scripts(3)
    requests = requests_of(40, 20, times)
    outcome, served = simulate(script, requests, clients, prompts=prompts)
    scripts = [script(index, one.body) for index, one in enumerate(served)]
    truth = {
        "ttft_ms": [one.first for one in scripts],
        "inter_token_ms": [gap for one in scripts for gap in one.gaps],
        "tpot_ms": [sum(one.gaps) / len(one.gaps) for one in scripts],
        "e2e_ms": [one.first + sum(one.gaps) for one in scripts],
    }
    record = summary(outcome)
    for name, seconds in truth.items():
        assert record[name] == pytest.approx(percentiles([1e3 * s for s in seconds]), rel=0.03)
    assert record["output_tokens"] == 40 * 20
    assert record["invalid"] == []


def test_an_open_loop_sends_at_the_scheduled_times_whatever_the_answers_take() -> None:
    times = arrival_times(40, 50.0, "poisson", seed=1)
    _, served = simulate(steady(3.0, 0.001), requests_of(40, 2, times))
    received = [one.received - 1.0 for one in served]
    assert received == pytest.approx(times, abs=2e-3)


def test_a_closed_loop_has_as_many_requests_at_once_as_clients() -> None:
    outcome, served = simulate(steady(0.1, 0.01), requests_of(20, 5), clients=4)
    ends = [answer.ended for answer in outcome.answers]
    at_once = [
        sum(a.received <= b.received < end for a, end in zip(served, ends, strict=True))
        for b in served
    ]
    assert max(at_once) == 4
    assert len(outcome.answers) == 20


def test_tokens_of_one_chunk_come_together() -> None:
    """Four tokens in each chunk: three of four times between tokens are zero."""
    outcome, _ = simulate(
        lambda _index, _body: Script(0.05, [0.02] * 4, tokens=4), requests_of(3, 20), clients=1
    )
    record = summary(outcome)
    assert (record["output_tokens"], record["tokens_per_chunk"]) == (60, 4.0)
    between = values_of(record["raw_inter_token_ms"])
    assert len(between) == 3 * 19
    assert sorted(between)[: 3 * 15] == [0.0] * 45
    assert record["inter_chunk_ms"]["p50"] == pytest.approx(20, rel=0.03)
    assert record["tpot_ms"]["p50"] == pytest.approx(80 / 19, rel=0.03)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(0.01, status=429), "http 429"),
        (Script(0.01, [0.01], ending="cut"), "cut off"),
        (Script(0.01, [0.01], ending="close"), "cut off"),
        (Script(0.01, [0.01], ending="error"), "error event"),
        (Script(0.01, [0.01], ending="garbage"), "malformed event"),
        (Script(0.01, [0.01], ending="hang"), "timeout"),
        (Script(99.0), "timeout"),
    ],
)
def test_errors_are_counted_by_kind_and_spoil_no_figure(script: Script, kind: str) -> None:
    """Every second request fails; the others are measured as if alone."""
    good = steady(0.05, 0.01)
    outcome, _ = simulate(
        lambda index, body: script if index % 2 else good(index, body),
        requests_of(6, 4),
        clients=1,
        timeout=1.0,
    )
    record = summary(outcome)
    assert {name: one["count"] for name, one in record["errors"].items()} == {kind: 3}
    assert record["errors"][kind]["first"]
    assert (record["completed"], record["output_tokens"]) == (3, 12)
    assert record["ttft_ms"]["p99"] == pytest.approx(50, rel=0.03)


def test_a_request_that_takes_too_long_is_left() -> None:
    """The endpoint sees the client go, so that it can end the request."""
    outcome, served = simulate(
        lambda _index, _body: Script(0.1, [0.1] * 100), requests_of(1), clients=1, timeout=2.0
    )
    assert outcome.answers[0].error == "timeout"
    assert len(served[0].written) < 25


def test_goodput_counts_answers_that_keep_every_limit() -> None:
    slow = {1: 0.5, 3: 0.4, 4: 0.3}
    outcome, _ = simulate(
        lambda index, _body: Script(slow.get(index, 0.1), [0.01] * 7), requests_of(10), clients=1
    )
    record = summary(outcome, Objectives(ttft_ms=350, tpot_ms=20))
    assert record["goodput"]["share"] == 0.8
    assert record["goodput"]["limits"] == {"ttft_ms": 350, "tpot_ms": 20}
    assert summary(outcome)["goodput"] is None


def test_long_prompts_arrive_steadily_until_the_others_are_over() -> None:
    outcome, served = simulate(
        lambda _index, body: Script(0.5, [0.01] * (body["max_tokens"] - 1)),
        requests_of(6, 52),
        clients=2,
        long_prompts=LongPrompts(rate=2.0, length=100, output_len=3),
    )
    long = [one for one in served if len(one.body["prompt"]) == 100]
    assert [one.received - 1.0 for one in long] == pytest.approx(
        [0, 0.5, 1, 1.5, 2, 2.5, 3], abs=0.01
    )
    assert len({tuple(one.body["prompt"]) for one in long}) == 7, "none is another's prefix"
    record = summary(outcome)
    assert record["num_seqs"] == 6, "they are counted apart"
    assert record["long_prompts"]["ttft_ms"]["p50"] == pytest.approx(500, rel=0.03)


def test_answers_shorter_than_asked_make_a_load_invalid() -> None:
    outcome, _ = simulate(lambda _index, _body: Script(0.05, [0.01]), requests_of(3, 8), clients=1)
    assert "3 of 3 answers do not have the number of tokens" in summary(outcome)["invalid"][0]
    assert summarise([outcome], Objectives(), exact_lengths=False)["invalid"] == []


def test_a_client_that_is_itself_late_makes_a_load_invalid() -> None:
    """On the real clock: something holds the event loop for 60 ms at a time."""

    async def busy(lag_ms: list[float]) -> None:
        async with watched_lag(lag_ms):
            for _ in range(3):
                await asyncio.sleep(0.015)
                time.sleep(0.06)

    outcome, _ = simulate(steady(0.05, 0.01), requests_of(3), clients=1)
    assert summary(outcome)["invalid"] == []
    lag_ms: list[float] = []
    asyncio.run(busy(lag_ms))
    (reason,) = summary(replace(outcome, lag_ms=lag_ms))["invalid"]
    assert "event loop was" in reason
    (reason,) = summary(replace(outcome, cpu_share=0.97))["invalid"]
    assert "97% of a core" in reason


def test_requests_say_what_is_measured_and_who_asks() -> None:
    _, served = simulate(
        steady(0.01, 0.01),
        requests_of(1),
        clients=1,
        prompts="chat",
        body={"temperature": 0.5, "ignore_eos": True},
        api_key="a key",
    )
    assert served[0].headers["authorization"] == "Bearer a key"
    assert served[0].body == {
        "model": MODEL,
        "messages": [{"role": "user", "content": text_of([1, 2, 3])}],
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "ignore_eos": True,
    }
    assert "a key" not in repr(Endpoint("http://x", MODEL, api_key="a key"))


@given(cuts=st.lists(st.integers(0, 60), max_size=8), end=st.sampled_from([b"\n", b"\r\n"]))
@settings(max_examples=50)
def test_events_are_the_same_wherever_the_network_cuts(cuts: list[int], end: bytes) -> None:
    stream = end.join(
        [b"data: one", b"", b": ping", b"event: x", b"data:two", b"", b"data: [DONE]", b""]
    )
    reader, edges = EventReader(), [0, *sorted(cuts), len(stream)]
    parts = [stream[a:b] for a, b in pairwise(edges)]
    assert [event for part in parts for event in reader.feed(part)] == [b"one", b"two", b"[DONE]"]


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12), extra=st.integers(-12, 40))
@settings(max_examples=100)
def test_every_token_is_allotted_to_one_chunk(lengths: list[int], extra: int) -> None:
    total = max(0, len(lengths) + extra)
    allotted = allot_tokens(total, lengths)
    assert sum(allotted) == total
    assert len(allotted) == len(lengths)
    if extra >= 0:
        assert min(allotted) >= 1


@pytest.mark.parametrize(
    ("total", "counted", "lengths", "tokens"),
    [
        (6, [1, 3, 6], [4, 4, 4], [1, 2, 3]),
        (7, [1, 3, 6], [4, 4, 4], [1, 2, 4]),  # the last token had no text
        (6, [1, 3], [4, 4, 4], [2, 2, 2]),
        (6, [3, 1, 2], [4, 4, 4], [2, 2, 2]),  # of several choices by turns
        (3, [], [], []),  # tokens that all have no text
        (None, [], [4, 4], [1, 1]),
    ],
)
def test_tokens_are_those_of_the_usage(
    total: int | None, counted: list[int], lengths: list[int], tokens: list[int]
) -> None:
    """Of every chunk where each has one that fits, else of the stream; one each without."""
    assert tokens_of(total, counted, lengths) == tokens


@given(
    count=st.integers(1, 40), clients=st.none() | st.integers(1, 50), processes=st.integers(1, 9)
)
@settings(max_examples=50)
def test_processes_share_the_whole_load(count: int, clients: int | None, processes: int) -> None:
    endpoint = Endpoint("http://x", MODEL)
    requests = [Request([i], 1) for i in range(count)]
    shares = divide(Share(endpoint, requests, clients, requests[:8]), processes)
    assert sorted(r.prompt[0] for s in shares for r in s.requests) == [*range(count)]
    assert sum(len(share.warm_up) for share in shares) == min(count, 8)
    assert min(len(share.requests) for share in shares) >= 1
    if clients is not None:
        assert sum(s.clients or 0 for s in shares) == clients
        assert min(s.clients or 0 for s in shares) >= 1


def test_relabelled_prompts_keep_their_lengths_and_share_no_prefix() -> None:
    workload = nano_workload(8)
    other = workload.relabelled(3)
    assert other.lengths == workload.lengths
    assert all(a[0] != b[0] for a, b in zip(workload.prompts, other.prompts, strict=True))
    assert workload.relabelled(0) is workload
    small = fixed_workload(2, 5, 5).within(7).relabelled(6)
    assert max(map(max, small.prompts)) < 7


def test_percentiles_follow_from_the_raw_values() -> None:
    outcome, _ = simulate(random_scripts(1), requests_of(10, 12), clients=3)
    record = summary(outcome)
    for name in ("inter_token_ms", "inter_chunk_ms"):
        assert record[name] == percentiles(values_of(record[f"raw_{name}"]))
