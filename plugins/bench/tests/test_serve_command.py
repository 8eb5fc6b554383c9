"""`nanovllm bench serve` with client processes of its own, on the real clock."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from nanovllm_bench.latency import percentiles
from nanovllm_bench.serve import measure, processes
from nanovllm_bench.serve.client import Endpoint, Request
from nanovllm_bench.serve.compare import by_load
from nanovllm_bench.serve.load import Share
from nanovllm_bench.serve.measure import EndpointError
from nanovllm_bench.serve.processes import ClientError, carry
from nanovllm_bench.serve.summary import values_of
from nanovllm_bench.serve.timed import Script, Served, TimedEndpoint
from nanovllm_bench.workloads import fixed_workload
from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import ConfigError

GAP = 0.03


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["bench", *arguments])


def words(result: Result) -> str:
    return " ".join(result.output.replace("│", "").split())


@pytest.fixture(scope="module")
def timed() -> Iterator[tuple[str, list[Served]]]:
    """An endpoint on a thread: URL, and what it did. Requests for one token are refused."""

    def script(_index: int, body: Any) -> Script:
        length = body["max_tokens"]
        return Script(0.06, [GAP] * (length - 1), status=429 if length == 1 else 200)

    endpoint, ready = TimedEndpoint(script), threading.Event()
    said: dict[str, Any] = {}

    async def main() -> None:
        async with endpoint.listen() as said["url"]:
            said["loop"], said["over"] = asyncio.get_running_loop(), asyncio.Event()
            ready.set()
            await said["over"].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(30)
    yield said["url"], endpoint.served
    said["loop"].call_soon_threadsafe(said["over"].set)
    thread.join(30)


@dataclass(frozen=True)
class Measured:
    """A result file, and what the endpoint did meanwhile."""

    file: Path
    served: list[Served]


@pytest.fixture(scope="module")
def measured(timed: tuple[str, list[Served]], tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Two processes, a closed and an open loop."""
    url, served = timed
    served.clear()
    out = tmp_path_factory.mktemp("serve") / "timed.json"
    result = bench(
        *("serve", "--url", url, "--clients", "4", "--rate", "40", "--num-seqs", "8"),
        *("--input-len", "16", "--output-len", "12", "--processes", "2", "--ttft-limit", "5000"),
        *("--warm-up", "2", "--out", str(out)),
    )
    assert result.exit_code == 0, (result.output, result.exception)
    assert "4 clients" in result.output
    assert "40 requests/s" in result.output
    return Measured(out, [*served])


def test_the_record_holds_both_loads_and_what_they_follow_from(measured: Measured) -> None:
    record = json.loads(measured.file.read_text(), parse_constant=pytest.fail)
    assert (record["benchmark"], record["workload"]) == ("serve", "8 x 16/12")
    assert record["endpoint"]["model"] == "timed"
    assert record["environment"].keys() >= {"commit", "clean_tree", "python"}
    assert [(run["load"], run["clients"], run["rate"]) for run in record["runs"]] == [
        ("closed", 4, None),
        ("open", None, 40.0),
    ]
    for run in record["runs"]:
        assert (run["completed"], run["errors"], run["output_tokens"]) == (8, {}, 96)
        assert run["prompt_tokens"] == 8 * 16
        assert run["client"]["processes"] == 2
        assert run["goodput"]["share"] == 1.0
        assert run["ttft_ms"] == percentiles(run["raw_ttft_ms"])
        assert run["inter_token_ms"] == percentiles(values_of(run["raw_inter_token_ms"]))
        rate = run["output_tokens"] / run["seconds"]
        assert run["tokens_per_second"] == pytest.approx(rate, rel=1e-2)


def test_the_times_are_the_endpoint_s(measured: Measured) -> None:
    """The median within 3 % of what the endpoint noted itself, on a machine that others use."""
    runs = json.loads(measured.file.read_text())["runs"]
    gaps = [1e3 * (b - a) for one in measured.served for a, b in pairwise(one.written)]
    between = np.concatenate([values_of(run["raw_inter_token_ms"]) for run in runs])
    assert float(np.median(between)) == pytest.approx(float(np.median(gaps)), rel=0.03)


def test_no_two_loads_and_no_warm_up_share_a_prompt(measured: Measured) -> None:
    prompts = [tuple(one.body["prompt"]) for one in measured.served]
    assert len(prompts) == 2 * (8 + 2)
    assert len({prompt[:4] for prompt in prompts}) == len(prompts)


def test_commands_with_other_seeds_share_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many loads each has: what a prefix cache kept of the first helps none of the next."""
    sent: list[Request] = []

    def carried(load: Share, _processes: int) -> list[Any]:
        sent.extend([*load.requests, *load.warm_up])
        return []

    monkeypatch.setattr(measure, "carry", carried)
    monkeypatch.setattr(measure, "summarise", lambda *_, **__: {})
    monkeypatch.setattr(measure, "describe_endpoint", lambda _: {})
    for seed, clients in enumerate([[1, 2, 3], [1], [1, 2]]):
        plan = measure.Plan(fixed_workload(2, 16, 4), clients, seed=seed)
        measure.measure_endpoint(Endpoint("http://127.0.0.1:9", "none"), plan)
    assert len({tuple(one.prompt[:4]) for one in sent}) == len(sent) == 6 * (2 + 2)


def test_results_are_compared_load_by_load(measured: Measured, tmp_path: Path) -> None:
    other = tmp_path / "peer.json"
    record = json.loads(measured.file.read_text())
    for run in record["runs"]:
        run["tokens_per_second"] /= 2
    other.write_text(json.dumps(record))
    result = bench("compare", str(measured.file), str(other))
    assert result.exit_code == 0, result.output
    assert result.output.count("2.00 × as fast") == 2
    other.write_text('{"benchmark": "table"}')
    assert isinstance(
        error := bench("compare", str(measured.file), str(other)).exception, ConfigError
    )
    assert "peer is no result of `nanovllm bench serve`" in str(error)


def served_record(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """What is compared of a result: an open and a closed load of the same requests."""
    facts = {"num_seqs": 16, "tokens_per_second": 1.0, "long_prompts": None}
    runs = [
        {"load": "closed", "clients": 4, "rate": None, "arrivals": None, **facts},
        {"load": "open", "clients": None, "rate": 10.0, "arrivals": "poisson", **facts},
    ]
    of_loads = {key: changes.pop(key) for key in ("num_seqs", "long_prompts") if key in changes}
    runs = [{**run, **of_loads} for run in runs]
    if arrivals := changes.pop("arrivals", None):
        runs[1]["arrivals"] = arrivals
    record = {"benchmark": "serve", "workload": "nano", "prompts": "ids", "seed": seed}
    return {**record, "body": {"temperature": 0.6, "ignore_eos": True}, "runs": runs, **changes}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workload": "16 x 8/8"}, "workload of ours: 'nano'; theirs: '16 x 8/8'"),
        ({"prompts": "chat"}, "prompts of ours: 'ids'; theirs: 'chat'"),
        ({"num_seqs": 256}, "num_seqs of ours, 4 clients: 16; theirs, 4 clients: 256"),
        ({"arrivals": "fixed"}, "arrivals of ours, 10 requests/s: 'poisson'; theirs, 10 requests"),
        ({"body": {"temperature": 0.0, "ignore_eos": True}}, "body of ours: {'temperature': 0.6}"),
        ({"long_prompts": {"num_seqs": 3}}, "long prompts of ours, 4 clients: False; theirs"),
    ],
    ids=str,
)
def test_results_of_different_requests_are_not_compared(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="different requests") as refused:
        by_load({"ours": served_record(), "theirs": served_record(**change)})
    assert said in str(refused.value)


def test_endpoints_may_need_other_fields_and_seeds_for_the_same_requests() -> None:
    """One knows `ignore_eos`, another has to be told a least number of tokens."""
    theirs = served_record(seed=7, body={"temperature": 0.6, "min_tokens": 1024})
    loads = by_load({"ours": served_record(), "theirs": theirs})
    assert {load: [*runs] for load, runs in loads.items()} == {
        "4 clients": ["ours", "theirs"],
        "10 requests/s": ["ours", "theirs"],
    }


def test_a_load_that_only_one_result_has_is_compared_with_none() -> None:
    """So each may have as many requests as its load needs."""
    few = served_record(num_seqs=4)
    del few["runs"][1]
    many = served_record(num_seqs=256)
    del many["runs"][0]
    loads = by_load({"few": few, "many": many})
    assert [[*runs] for runs in loads.values()] == [["few"], ["many"]]


def test_results_are_drawn(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs nanovllm-bench[plot]")
    result = bench("plot", str(measured.file), "--out", str(tmp_path / "a.svg"))
    assert result.exit_code == 0, result.output
    assert "timed, open loop" in (tmp_path / "a.svg").read_text()


def test_an_endpoint_that_refuses_is_told_before_the_measurement(
    timed: tuple[str, list[Served]],
) -> None:
    lengths = ("--input-len", "4", "--output-len", "1", "--num-seqs", "2")
    result = bench("serve", "--url", timed[0], "--clients", "2", *lengths)
    assert isinstance(result.exception, ClientError)
    assert "2 of 2 requests of the warm-up failed" in str(result.exception)
    assert "http 429" in str(result.exception)


def test_where_no_endpoint_is_the_error_says_so() -> None:
    result = bench("serve", "--url", "http://127.0.0.1:9", "--clients", "1")
    assert isinstance(result.exception, EndpointError)
    assert "http://127.0.0.1:9/v1/models lists no model" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --clients for a closed loop"),
        (["--rate", "0"], "must be above 0"),
        (["--rate", "a"], "no list of numbers"),
        (["--clients", "0"], "no list of whole numbers"),
        (["--clients", "1", "--input-len", "3"], "go together"),
        (["--clients", "1", "--body", "[]"], "no JSON object"),
    ],
)
def test_a_load_that_cannot_be_is_refused(arguments: list[str], said: str) -> None:
    result = bench("serve", *arguments)
    assert result.exit_code == 2, result.output
    assert said in words(result)


def test_a_client_process_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes._Child, "start", _exiting)
    load = Share(Endpoint("http://127.0.0.1:9", "none"), [Request([1], 1)], clients=1)
    with pytest.raises(ClientError, match="ended before it was ready, with exit status 3"):
        carry(load, 1)


def _exiting(context: Any, share: Share, stack: Any) -> Any:
    """A client process that is gone at once."""
    ours, theirs = context.Pipe()
    process = context.Process(target=os._exit, args=(3,), daemon=True)
    process.start()
    theirs.close()
    return processes._Child(share, process, ours)
