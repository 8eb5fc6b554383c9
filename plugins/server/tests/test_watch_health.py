"""Health that tells the truth: of an engine that works, hangs, ends, and is replaced."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import pytest

from nanovllm_core import AsyncLLM, SamplingParams
from nanovllm_core.api import ConfigError, ExecutorError
from nanovllm_core.engine import EngineStats
from nanovllm_server.settings import parse_settings
from nanovllm_server.watch import facts
from nanovllm_server.watch.health import EngineMonitor
from nanovllm_server.watch.settings import HealthSettings

QUICK = HealthSettings(ping_s=0.02, stuck_after_s=0.3)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until a condition holds; fail where it does not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come true in {seconds} s"
        time.sleep(0.005)


@contextmanager
def small_engine() -> Iterator[AsyncLLM]:
    """An engine that a test may break."""
    llm = AsyncLLM("demo", device="cpu", limits={"max_num_seqs": 2}, cache={"num_blocks": 256})
    yield llm
    llm.close()


@contextmanager
def watched(
    llm: AsyncLLM, settings: HealthSettings = QUICK, **calls: Any
) -> Iterator[EngineMonitor]:
    monitor = EngineMonitor(llm, settings, **calls)
    monitor.start()
    yield monitor
    monitor.stop()


class Requests:
    """Requests that run on an event loop of their own thread; `errors` are how they ended."""

    def __init__(self, llm: AsyncLLM, count: int) -> None:
        self.tokens = 0
        self.errors: list[BaseException] = []
        self._llm, self._count = llm, count
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._run())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _run(self) -> None:
        answers = await asyncio.gather(
            *(self._one() for _ in range(self._count)), return_exceptions=True
        )
        self.errors = [answer for answer in answers if isinstance(answer, BaseException)]

    async def _one(self) -> None:
        async with aclosing(self._llm.generate([5, 6, 7], LONG)) as outputs:
            async for output in outputs:
                self.tokens += len(output.new_token_ids)

    def wait(self) -> list[BaseException]:
        """Until all have ended by themselves; the errors."""
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.errors

    def leave(self) -> None:
        """Abort what still runs."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self.wait()


def test_a_healthy_engine_is_ready_after_its_first_request_and_stays_healthy_under_load(
    llm: AsyncLLM,
) -> None:
    """The questions are answered between steps: the age stays small while requests run."""
    sampled: list[Any] = []
    with watched(llm, sample=sampled.append) as monitor:
        assert monitor.not_ready == "the first request has not run yet"
        wait_for(lambda: monitor.is_warm)
        assert monitor.not_ready is None
        requests = Requests(llm, 1)
        wait_for(lambda: requests.tokens > 20)
        seen = len(sampled)
        wait_for(lambda: len(sampled) > seen + 3)
        assert monitor.problem is None
        assert monitor.stats is not None
        assert monitor.stats.running == 1
        monitor.is_draining = lambda: True
        assert "draining" in (monitor.not_ready or "")
        assert monitor.problem is None
        requests.leave()


def test_a_step_that_hangs_is_seen_within_the_bound_and_its_end_too() -> None:
    """While a step hangs the reason says for how long and what waits; afterwards all is well."""
    with small_engine() as llm:
        go_on = threading.Event()
        collect = llm.engine._executor.collect

        def hang() -> Any:
            assert go_on.wait(30)
            return collect()

        with watched(llm) as monitor:
            wait_for(lambda: monitor.is_warm)
            requests = Requests(llm, 1)
            wait_for(lambda: monitor.stats is not None and monitor.stats.running)
            llm._client._loop.engine._executor.collect = hang  # type: ignore[method-assign]
            began = time.monotonic()
            wait_for(lambda: monitor.problem)
            assert time.monotonic() - began < QUICK.stuck_after_s + 1
            assert "the engine has not answered for" in (monitor.problem or "")
            assert "1 requests ran then, 0 waited" in (monitor.problem or "")
            go_on.set()
            wait_for(lambda: monitor.problem is None)
            written = requests.tokens
            wait_for(lambda: requests.tokens > written)
            requests.leave()


def test_a_first_request_that_waits_for_a_row_is_no_hung_engine(llm: AsyncLLM) -> None:
    """Other requests may come before it, as after a restart: the engine answers meanwhile, and
    stopping need not wait for them."""
    sampled: list[Any] = []
    requests = Requests(llm, 64)
    wait_for(lambda: requests.tokens)
    with watched(llm, sample=sampled.append) as monitor:
        wait_for(lambda: len(sampled) > 10)
        assert monitor.not_ready == "the first request has not run yet"
        assert monitor.problem is None
        monitor.stop()
        assert not monitor._thread.is_alive()
    requests.leave()


def break_engine(llm: AsyncLLM) -> None:
    """The next step raises, as when a worker is lost."""

    def fail() -> Any:
        raise RuntimeError("the device is gone: secret prompt")

    llm._client._loop.engine._executor.collect = fail  # type: ignore[method-assign]


def test_the_end_of_an_engine_is_seen_though_it_still_answers() -> None:
    """The running requests get the error; health has its kind, and not its text; `end` is called.

    An engine that ended answers questions as before. It takes no step for its requests.
    """
    ends: list[BaseException] = []
    with small_engine() as llm, watched(llm, end=ends.append) as monitor:
        wait_for(lambda: monitor.is_warm)
        requests = Requests(llm, 3)
        wait_for(lambda: requests.tokens)
        break_engine(llm)
        wait_for(lambda: ends)
        assert monitor.problem == "the engine ended with RuntimeError"
        assert "device is gone" in str(ends[0])
        assert [type(error) for error in requests.wait()] == [RuntimeError] * 3


def test_the_end_of_an_engine_without_requests_is_seen_before_the_next_one() -> None:
    """It looks after its workers, and its counters say that one has ended."""

    def check() -> None:
        raise ExecutorError("worker 3 has ended")

    with small_engine() as llm, watched(llm) as monitor:
        wait_for(lambda: monitor.is_warm)
        llm._client._loop.engine._executor.check = check  # type: ignore[attr-defined]
        wait_for(lambda: monitor.problem)
        assert monitor.problem == "the engine ended with ExecutorError"


def test_an_engine_that_ended_is_replaced_where_that_is_set() -> None:
    """By one of the same configuration, which is ready after a request and serves."""
    restart = QUICK.model_copy(update={"on_engine_death": "restart"})
    made: list[AsyncLLM] = []
    ends: list[BaseException] = []
    with (
        small_engine() as llm,
        watched(llm, restart, replace=made.append, end=ends.append) as monitor,
    ):
        wait_for(lambda: monitor.is_warm)
        requests = Requests(llm, 1)
        wait_for(lambda: requests.tokens)
        break_engine(llm)
        wait_for(lambda: made)
        wait_for(lambda: monitor.not_ready is None)
        assert len(requests.wait()) == 1
        [other] = made
        assert other.config == llm.config
        again = Requests(other, 2)
        wait_for(lambda: again.tokens > 4)
        again.leave()
        assert ends == []
    other.close()


def test_an_engine_that_ends_at_its_first_request_is_not_replaced() -> None:
    """Else a server whose every engine ends would start them for ever."""
    restart = QUICK.model_copy(update={"on_engine_death": "restart"})
    ends: list[BaseException] = []
    with small_engine() as llm:
        break_engine(llm)
        with watched(llm, restart, end=ends.append) as monitor:
            wait_for(lambda: ends)
            assert monitor.problem == "the engine ended with RuntimeError"


def test_metrics_that_cannot_be_read_are_logged_once_and_the_engine_stays_well(
    llm: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the process has no file left to open."""
    failed: list[None] = []

    def fail(stats: EngineStats) -> None:
        failed.append(None)
        raise OSError(24, "Too many open files")

    with watched(llm, sample=fail) as monitor:
        wait_for(lambda: monitor.is_warm)
        wait_for(lambda: len(failed) > 5)
        assert monitor.not_ready is None
    lines = [one.getMessage() for one in caplog.records if "metrics" in one.getMessage()]
    assert len(lines) == 1
    assert "Too many open files" in lines[0]


@pytest.mark.parametrize("health", [{"ping_s": 30}, {"ping_s": 0.5, "stuck_after_s": 0.5}])
def test_an_engine_cannot_count_as_stuck_between_two_questions(health: dict[str, float]) -> None:
    """Else /health would answer 503 for an engine that is well."""
    with pytest.raises(ConfigError, match=r"serve\.health\.stuck_after_s.*ping_s"):
        parse_settings({"health": health})


# ------------------------------------------------------------------------------ over HTTP


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_health_ready_and_facts_answer(server_url: str) -> None:
    """With what an orchestrator, a proxy and the page read."""
    wait_for(lambda: get(f"{server_url}/ready")[0] == 200)
    status, health = get(f"{server_url}/health")
    assert (status, health["status"]) == (200, "ok")
    assert health["last_answer_age_s"] < 10
    assert set(get(f"{server_url}/version")[1]) == {"version", "server", "torch"}
    plugins = get(f"{server_url}/plugins")[1]
    used = {(plugin["kind"], plugin["name"]) for plugin in plugins["plugins"]}
    assert {("model", "Qwen3ForCausalLM"), ("scheduler", "fcfs"), ("executor", "single")} <= used
    assert any(line.startswith("attention decode: ") for line in plugins["choices"])


def test_live_rates_end_with_the_answers_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window in which it did not answer has none; `running` is as it answered last."""
    times = iter([1.0, 2.0, 2.0, 30.0])
    monkeypatch.setattr(facts, "monotonic", lambda: next(times))
    live = facts.LiveFacts(None)
    live.sample(EngineStats(output_tokens=0, running=3, blocks=4))
    live.sample(EngineStats(output_tokens=100, running=3, blocks=4))
    assert live.now()["tokens_per_second"] == 100
    later = live.now()
    assert (later["tokens_per_second"], later["running"]) == (None, 3)


def test_live_facts_follow_the_requests(llm: AsyncLLM, server_url: str) -> None:
    """Running requests, tokens and times, as the page draws them."""
    requests = Requests(llm, 2)
    wait_for(lambda: get(f"{server_url}/live")[1]["running"] == 2)
    wait_for(lambda: get(f"{server_url}/live")[1]["inter_token_ms"]["p50"])
    live = get(f"{server_url}/live")[1]
    assert live["tokens_per_second"] > 0
    assert live["step_ms"] > 0
    assert 0 < live["kv_usage"] <= 1
    assert list(live["inter_token_ms"]) == ["p50", "p90", "p99"]
    times = list(live["inter_token_ms"].values())
    assert times == sorted(times)
    requests.leave()
