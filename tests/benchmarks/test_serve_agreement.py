"""guidellm's figures and ours: what each computes of the same times, and what is refused.

`guidellm_report.json` is a report of guidellm 0.8.1 on `nanovllm serve` with the embedded model,
cut to the fields that are read here: eleven requests of three clients. Of an odd number of equally
long requests, guidellm's percentiles (nearest rank) are ours (interpolated).
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from nanovllm_bench.serve import measure
from nanovllm_bench.serve.client import Answer, Endpoint
from nanovllm_bench.serve.load import Outcome, Share
from nanovllm_bench.serve.summary import Objectives, summarise
from nanovllm_bench.workloads import text_of

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "serve_agreement.py"))
FILE = Path(__file__).with_name("guidellm_report.json")
LOAD = SCRIPT["Load"](clients=3, requests=11, output_len=12)


@pytest.fixture
def report() -> Any:
    return json.loads(FILE.read_text(encoding="utf-8"))


def answer(request: dict[str, Any]) -> Answer:
    """What our client would have noted at the times that guidellm noted."""
    times, tokens = request["info"]["timings"], request["output_tokens"]
    start = times["request_start"]
    seen = [times["first_token_iteration"], times["last_token_iteration"]]
    return Answer(tokens, start, start, times["request_end"], seen, [1, tokens - 1])


def test_of_the_same_times_both_compute_the_same_figures(report: Any) -> None:
    """First token, time per token, end to end and the rate, over the same span of time."""
    answers = [answer(one) for one in report["benchmarks"][0]["requests"]["successful"]]
    run = summarise([Outcome(answers)], Objectives(), exact_lengths=True)
    ours = SCRIPT["figures_of_run"](run)
    del ours[SCRIPT["LATE"]]
    assert ours == pytest.approx(SCRIPT["figures_of_report"](report, LOAD), rel=2e-4)


@pytest.mark.parametrize(
    ("metric", "field", "said"),
    [
        ("request_latency", "count", "10 of 11 answers, and 132 of 132 tokens"),
        ("output_token_count", "total_sum", "11 of 11 answers, and 131 of 132 tokens"),
    ],
)
def test_failed_and_short_answers_are_no_measurement(
    report: Any, metric: str, field: str, said: str
) -> None:
    report["benchmarks"][0]["metrics"][metric]["successful"][field] -= 1
    with pytest.raises(SystemExit, match=said):
        SCRIPT["figures_of_report"](report, LOAD)


def test_neither_tool_sends_a_prompt_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a comparison, and in comparisons with other seeds: a prefix cache helps nobody."""
    sent: list[str] = []

    def carried(load: Share, _processes: int) -> list[Any]:
        sent.extend(text_of(one.prompt) for one in [*load.requests, *load.warm_up])
        return []

    monkeypatch.setattr(measure, "carry", carried)
    monkeypatch.setattr(measure, "summarise", lambda *_, **__: {})
    monkeypatch.setattr(measure, "describe_endpoint", lambda _: {})
    loads = [SCRIPT["Load"](clients=2, requests=4, output_len=4, seed=seed) for seed in (0, 1, 7)]
    for load, turn in product(loads, range(SCRIPT["MAX_TURNS"])):
        sent += load.texts(turn)
        measure.measure_endpoint(Endpoint("http://127.0.0.1:9", "none"), load.plan(turn))
    assert len({text[:40] for text in sent}) == len(sent) == 3 * 10 * (4 + 4 + 4)


def tool(name: str, figures: list[float], order: list[str]) -> Callable[[int], dict[str, float]]:
    def measure_turn(turn: int) -> dict[str, float]:
        order.append(name)
        return {"output tok/s": figures[turn]}

    return measure_turn


def test_differences_are_of_the_medians() -> None:
    """Of the tools' own turns, which take place in changing order."""
    order: list[str] = []
    tools = {"a": tool("a", [9.0, 102.0, 500.0], order), "b": tool("b", [100.0] * 3, order)}
    by_turns = SCRIPT["by_turns"](tools, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    result = SCRIPT["compare"](by_turns)
    assert result["differences"] == {"output tok/s": pytest.approx(0.02)}


def test_a_turn_beside_the_server_is_told_in_the_server_s_own_means() -> None:
    """Of the requests between the two looks at `/metrics`."""
    before = {"http_first_byte_seconds_sum": 7.0, "http_first_byte_seconds_count": 3.0}
    before |= {"http_request_duration_seconds_sum": 8.0, "http_request_duration_seconds_count": 3.0}
    after = {name: value + 2.0 for name, value in before.items()}
    figures = {"first token mean, ms": 1010.0, "end to end mean, ms": 990.0}
    assert SCRIPT["over_server"](figures, before, after) == {
        "first token / server's": pytest.approx(1.01),
        "end to end / server's": pytest.approx(0.99),
    }


def test_the_sums_of_the_server_are_found_in_its_metrics() -> None:
    line = 'nanovllm:http_first_byte_seconds_sum{handler="/v1/completions",method="POST"} 0.25'
    found = SCRIPT["SAMPLE"].match(line)
    assert (found["name"], found["value"]) == ("http_first_byte_seconds_sum", "0.25")
