"""An engine that ends, stops or hangs: others go on with its requests; the last one ends calls."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import zmq

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import (
    CheckpointNotFoundError,
    EngineClosedError,
    EngineConfig,
    EngineError,
    InvalidSamplingError,
)
from nanovllm_engine_processes import engines, process, wire
from nanovllm_engine_processes.child import ENGINES_PREFIX, EngineServer, inbox_of, outbox_of
from nanovllm_engine_processes.engines import Engines
from nanovllm_engine_processes.plugin import ProcessesOptions
from nanovllm_engine_processes.process import EngineProcess

Folders = Callable[[], list[Path]]
PROMPTLY = 3.0
"""Seconds in which the end of an engine is noticed."""
LENGTH = 60
ASKED = [
    SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, seed=11, max_tokens=LENGTH, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=12, n=2, max_tokens=LENGTH, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, seed=13, max_tokens=LENGTH, min_tokens=40, stop=["e"]),
]
PROMPTS = ["Once upon a time", "The", "What is 27 + 15?", "Hello", "A cat", "My"]
REQUESTS = [(prompt, params) for prompt in PROMPTS for params in ASKED]


def pids(llm: LLM) -> dict[int, int]:
    found: dict[int, int] = llm._client.pids  # type: ignore[attr-defined]
    return found


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def streamed(
    llm: LLM, prompt: str, params: SamplingParams, note: Callable[[], None] = int
) -> list[tuple[list[int], str, str | None]]:
    """Ids, text and finish reason of each sample, put together from what was new each time."""
    ids: list[list[int]] = [[] for _ in range(params.n)]
    texts = [""] * params.n
    reasons: list[str | None] = [None] * params.n
    for output in llm.stream(prompt, params):
        ids[output.index] += output.new_token_ids
        texts[output.index] += output.new_text
        reasons[output.index] = output.finish_reason
        if params.logprobs is not None:
            assert output.logprobs is not None
            assert len(output.logprobs) == output.num_token_ids
        note()
    return [*zip(ids, texts, reasons, strict=True)]


def test_requests_of_an_engine_that_is_killed_go_on_elsewhere_and_then_the_last_one_ends_all(
    settings: dict[str, Any], thread: LLM, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    """None is lost, nothing comes twice: greedy, seeded, penalised and searched streams are those
    of an engine that lives; so are calls that stream nothing."""
    with ThreadPoolExecutor(64) as pool:
        expected = [*pool.map(lambda one: streamed(thread, *one), REQUESTS)]
    whole = [one.token_ids for one in thread.generate(PROMPTS, ASKED[1], use_tqdm=False)]
    seen = 0
    with LLM(**settings, data_parallel_size=2) as llm, ThreadPoolExecutor(64) as pool:
        processes = pids(llm)
        assert len(folders()) == 1

        def note() -> None:
            nonlocal seen
            seen += 1

        calls = [pool.submit(streamed, llm, *one, note) for one in REQUESTS]
        call = pool.submit(llm.generate, PROMPTS, ASKED[1], False)
        wait_for(lambda: seen >= 10 * len(REQUESTS))
        with caplog.at_level(logging.ERROR):
            os.kill(processes[0], signal.SIGKILL)
            assert [call.result(60) for call in calls] == expected
        assert [one.token_ids for one in call.result(60)] == whole
        [record] = caplog.records
        assert f"engine 0 (process {processes[0]}) ended with signal SIGKILL" in record.message
        assert "1 of 2 engines left" in record.message
        assert (llm.info.device, len(pids(llm))) == ("1 of 2 engines x cpu", 1)
        assert len(llm.stats.engines) == 1
        assert llm.stats.running == 0

        def ask_for_more() -> None:
            llm.generate(["x"], SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)

        waiting = [pool.submit(ask_for_more) for _ in range(3)]
        wait_for(lambda: llm.stats.running == 3)
        killed = time.monotonic()
        os.kill(processes[1], signal.SIGKILL)
        for one in waiting:
            with pytest.raises(EngineError, match=rf"engine 1 \(process {processes[1]}\) ended wi"):
                one.result(PROMPTLY)
        assert time.monotonic() - killed < PROMPTLY
        with pytest.raises(EngineClosedError, match=r"no engine is left: engine 1 .* make a new"):
            ask_for_more()
        for _ in range(2):
            with pytest.raises(EngineClosedError, match=r"no engine is left: .*SIGKILL"):
                _ = llm.stats
    assert all(map(is_gone, processes.values()))
    assert folders() == []


def test_the_error_of_a_start_is_that_of_the_engine(
    settings: dict[str, Any], folders: Folders, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its type, and the engine that raised it; nothing is left, and nothing else is said."""
    with pytest.raises(CheckpointNotFoundError, match=r"^engine \d \(process \d+\): .*nowhere"):
        LLM(**{**settings, "model": "./nowhere"}, engine_client="processes")
    assert folders() == []
    assert "Traceback" not in capfd.readouterr().err


def test_an_answer_that_no_message_holds_ends_the_engine_with_its_error(tmp_path: Path) -> None:
    """Such as facts that an executor plugin has made of its own types: nobody waits for them."""
    with zmq.Context() as context, context.socket(zmq.PULL) as answers:
        answers.bind(outbox_of(str(tmp_path)))
        server = EngineServer(str(tmp_path), 3, os.getpid())
        server._send(wire.STARTED, object())
        assert answers.poll(5000)
        number, name, error = wire.decode(answers.recv())
        server._out.close(linger=0)
        server._context.term()
    assert (number, name) == (3, wire.ENDED)
    assert "engine 3 (process" in str(wire.read_error(error))
    assert "object object" in str(wire.read_error(error))


@pytest.mark.slow
def test_a_request_that_nests_too_deep_is_refused_and_ends_no_engine(two: LLM) -> None:
    """Whether the door's process finds it or an engine's; another call goes on."""
    before, value = pids(two), [1]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        innocent = pool.submit(two.generate, ["Hello"], params, False)
        for depth in range(sys.getrecursionlimit() + 10):
            value = [value]  # type: ignore[list-item]
            if depth > sys.getrecursionlimit() - 60:
                bad = SamplingParams(max_tokens=3, logits_processors={"a": {"b": value}})
                with pytest.raises(InvalidSamplingError):
                    two.generate(["x"], bad, use_tqdm=False)
        assert innocent.result(60)[0].finish_reason == "length"
    assert pids(two) == before


def test_an_engine_s_process_refuses_a_request_that_it_cannot_read(tmp_path: Path) -> None:
    """It goes on to receive, and answers the ping that comes next."""
    bad = wire.PackedRequests(0, [("a", [1], b"\xc1")])
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as answers,
        context.socket(zmq.PUSH) as inbox,
    ):
        answers.bind(outbox_of(str(tmp_path)))
        server = EngineServer(str(tmp_path), 3, os.getpid())
        Thread(target=server._receive, daemon=True).start()
        inbox.connect(inbox_of(str(tmp_path), 3))
        inbox.send(wire.encode(wire.ADD, bad))
        inbox.send(wire.encode(wire.PING, None))
        heard = []
        while len(heard) < 2:
            assert answers.poll(5000)
            heard.append(wire.decode(answers.recv()))
        server._out.close(linger=0)
        server._context.term()
    [_, refused, (error, names, place)], [_, pong, _] = heard
    assert (refused, names, place, pong) == (wire.REFUSED, ["a"], 0, wire.PONG)
    assert isinstance(wire.read_error(error), InvalidSamplingError)


def test_the_path_of_the_sockets_may_be_as_long_as_a_socket_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond that the error names the folder and the remedy; the limit counts bytes."""

    class NoProcessError(Exception):
        """The sockets are there."""

    def stop(*_: object) -> None:
        raise NoProcessError

    monkeypatch.setattr(engines, "EngineProcess", stop)
    config = EngineConfig(model="x", device="cpu")
    with tempfile.TemporaryDirectory() as place:
        within = len(os.fsencode(f"{place}//{ENGINES_PREFIX}01234567/answers"))
        longest = zmq.IPC_PATH_MAX_LEN - within
        for name, error in (
            ("x" * longest, NoProcessError),
            ("y" * (longest + 1), EngineError),
            ("\u00e9" * longest, EngineError),
        ):
            folder = Path(place, name)
            folder.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(folder))
            with pytest.raises(error):
                Engines(config, ProcessesOptions())
            assert [*folder.iterdir()] == []


def test_an_engine_that_takes_long_to_die_holds_no_other_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one whose GPU memory is being freed: it is reaped later."""
    monkeypatch.setattr(process, "PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(EngineProcess, "kill", lambda _: None)
    few = Engines(EngineConfig(model="x", device="cpu"), ProcessesOptions(close_seconds=3))
    [pid] = few.pids().values()
    began = time.monotonic()
    few.end(0)
    assert time.monotonic() - began < 1
    few.find_ended()
    assert not is_gone(pid)
    os.killpg(pid, signal.SIGKILL)

    def is_reaped() -> bool:
        few.find_ended()
        return is_gone(pid)

    wait_for(is_reaped)
    few.close()


def test_an_end_by_a_signal_without_a_name_has_its_number(tmp_path: Path) -> None:
    """Real-time signals between the first and the last have none."""
    ended = EngineProcess(0, str(tmp_path), {})
    os.kill(ended.pid, signal.SIGRTMIN + 1)
    until = time.monotonic() + 10
    while not ended.has_ended():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert ended.how_it_ended() == f"ended with signal {signal.SIGRTMIN + 1}"
    assert ended.release(time.monotonic() + 10)
