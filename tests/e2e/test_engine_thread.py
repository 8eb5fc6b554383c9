"""The thread that owns an engine: messages, errors, Ctrl-C, and the end of a program."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.errors import EngineClosedError, ExecutorError, RequestError
from nanovllm_core.frontend.loop import EngineLoop
from nanovllm_core.interfaces.plan import StepResult

from .tiny import open_tiny

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5] * 20]


def greedy(max_tokens: int = 6, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


class EncodingQueue(SimpleQueue):  # type: ignore[type-arg]  # no base class where it has one
    """Encodes and decodes what is put in, as if a process lay between."""

    def put(self, item: Any, *_: Any, **__: Any) -> None:
        super().put(pickle.loads(pickle.dumps(item)))


def test_messages_and_answers_survive_encoding(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, texts and stops over an engine whose every message is encoded."""
    biased = greedy(12, logit_bias={3: 1.0}, logprobs=1, n=2)
    stopping = greedy(24, stop=["e", "."], min_tokens=6)

    def answers(llm: LLM) -> list[Any]:
        outputs = llm.generate(["Once upon", "The"], [biased, stopping], labels={"a": "b"})
        parts = list(llm.stream("Once upon", stopping))
        llm.reset_prefix_cache()
        return [
            (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs)
            for one in (*outputs, *parts)
        ]

    expected = answers(demo)
    answer = EngineLoop._answer
    monkeypatch.setattr("nanovllm_core.frontend.loop.SimpleQueue", EncodingQueue)
    monkeypatch.setattr(
        EngineLoop,
        "_answer",
        lambda loop, number, what: answer(loop, number, pickle.loads(pickle.dumps(what))),
    )
    with LLM("demo", device="cpu", attention="sdpa", max_model_len=256) as llm:
        assert isinstance(llm._client._loop.inbox, EncodingQueue)
        assert answers(llm) == expected


def test_an_error_that_ends_the_engine_reaches_every_caller_that_waits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with the error itself; who calls later learns of it as the cause."""
    with open_tiny(tiny) as llm:
        executor = llm.engine._executor
        collect, steps = executor.collect, iter(range(12))

        def failing() -> StepResult:
            if next(steps, None) is None:
                raise OSError("the device is gone")
            time.sleep(0.01)
            return collect()

        monkeypatch.setattr(executor, "collect", failing)
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(llm.generate, [one], greedy(200)) for one in PROMPTS]
            for call in calls:
                with pytest.raises(OSError, match="the device is gone"):
                    call.result(timeout=60)
        with pytest.raises(EngineClosedError, match="ended with OSError: the device is") as raised:
            llm.generate(PROMPTS)
        assert isinstance(raised.value.__cause__, OSError)


def test_closing_wakes_a_caller_that_waits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread, in the middle of its requests."""
    with open_tiny(tiny) as llm, ThreadPoolExecutor(1) as pool:
        executor = llm.engine._executor
        collect = executor.collect
        monkeypatch.setattr(executor, "collect", lambda: (time.sleep(0.01), collect())[1])
        call = pool.submit(llm.generate, PROMPTS, greedy(200))
        while not llm.stats.running:
            time.sleep(0.01)
        llm.close()
        with pytest.raises(EngineClosedError, match="this LLM is closed; create a new one"):
            call.result(timeout=60)
        assert llm.stats.steps > 0, "the last counters"


def test_the_turns_of_the_loop_stand_still_while_a_step_hangs(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is not idle then; each step and each message is a turn."""
    go_on, hangs = threading.Event(), threading.Event()
    with open_tiny(tiny) as llm, ThreadPoolExecutor(1) as pool:
        loop, step = llm._client._loop, llm.engine.step

        def hang() -> Any:
            hangs.set()
            assert go_on.wait(60)
            return step()

        monkeypatch.setattr(llm.engine, "step", hang)
        call = pool.submit(llm.generate, PROMPTS, greedy())
        assert hangs.wait(60)
        turns = loop.turns
        assert not loop.is_idle
        time.sleep(0.05)
        assert loop.turns == turns
        go_on.set()
        call.result(timeout=60)
        assert loop.turns > turns
        until = time.monotonic() + 60
        while not loop.is_idle:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_an_idle_engine_takes_no_processor_time(tiny: Path) -> None:
    with open_tiny(tiny) as llm:
        llm.generate(PROMPTS, greedy())
        began = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - began < 0.05


def test_a_worker_that_ends_while_no_request_runs_ends_the_engine(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor is asked now and then; not in the thread of an engine that was handed out."""
    monkeypatch.setattr("nanovllm_core.frontend.loop.CHECK_SECONDS", 0.01)
    asked = Event()

    def check() -> None:
        asked.set()
        raise ExecutorError("worker 3 has ended")

    with open_tiny(tiny) as llm, open_tiny(tiny) as lent:
        assert not lent.engine.stats.ended
        for one in (llm, lent):
            executor = one._client._loop.engine._executor  # type: ignore[attr-defined]
            monkeypatch.setattr(executor, "check", check)
        assert asked.wait(60)
        with suppress(ExecutorError):  # which reaches a caller that waits for an answer just then
            assert llm.stats
        assert llm.stats.ended == 1
        with pytest.raises(EngineClosedError, match="ended with ExecutorError: worker 3 has ended"):
            llm.generate(PROMPTS, greedy(), use_tqdm=False)
        asked.clear()
        assert not asked.wait(0.1)
        assert lent.stats.ended == 0


def test_an_answer_that_cannot_be_taken_aborts_the_requests_of_its_caller_alone(
    tiny: Path,
) -> None:
    """As where the event loop of a caller is closed: the others' requests go on."""
    from nanovllm_core.frontend.messages import AddRequests, NewRequest

    with open_tiny(tiny) as llm:
        client = llm._client

        def gone(_: object) -> None:
            raise RuntimeError("Event loop is closed")

        request = NewRequest(
            request_id="gone", prompt_token_ids=[1], params=greedy(300), stream=True
        )
        client.send(AddRequests(client.subscribe(gone), (request,)))
        assert len(llm.generate([[7]], greedy(20, ignore_eos=True))[0].token_ids) == 20
        assert (llm.stats.running, llm.stats.waiting) == (0, 0)


def take_ctrl_c() -> None:
    """A test run in the background of a script ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_script(body: str, interrupt_after: str = "") -> tuple[int, str, str]:
    """Run a program; with `interrupt_after`, SIGINT follows that line of its output."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_ctrl_c,
    )
    head = ""
    if interrupt_after:
        assert process.stdout is not None
        while interrupt_after not in head:
            head += process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
    rest, told = process.communicate(timeout=60)
    return process.returncode, head + rest, told


INTERRUPTED = """
from nanovllm_core import LLM, SamplingParams
llm = LLM("demo", device="cpu", attention="sdpa", max_model_len=2048, max_num_seqs=4)
params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
print("ready")
try:
    llm.generate([[1, 2, 3]] * 8, params)
except KeyboardInterrupt:
    print("interrupted")
stats = llm.stats
print(stats.running, stats.waiting, stats.free_blocks == stats.blocks)
few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
print(len(llm.generate([[1, 2, 3]], few)[0].token_ids))
llm.close()
"""


def test_ctrl_c_in_generate_aborts_its_requests_and_leaves_the_engine_usable() -> None:
    """As Stop in a notebook: the model stays loaded."""
    status, written, told = run_script(INTERRUPTED, interrupt_after="ready")
    assert written.split() == ["ready", "interrupted", "0", "0", "True", "3"], told
    assert (status, told) == (0, "")


ENDINGS = {
    "with an engine that is not closed": "",
    "by an error, with a stream that is not finished": """
stream = llm.stream([1, 2], many)
next(stream)
raise SystemExit(3)
""",
    "while a thread waits for its outputs": """
import threading, time
threading.Thread(target=llm.generate, args=([[1, 2]], many), daemon=True).start()
while not llm.stats.running: time.sleep(0.01)
""",
}


@pytest.mark.parametrize("body", ENDINGS.values(), ids=ENDINGS)
def test_no_program_hangs_at_its_end(body: str) -> None:
    """It ends at once and in silence, whatever the engine is at."""
    begin = """
from nanovllm_core import LLM, SamplingParams
llm = LLM("demo", device="cpu", attention="sdpa", max_model_len=2048, max_num_seqs=4)
many = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
"""
    status, _, told = run_script(begin + body)
    assert (status, told) == (3 if "SystemExit" in body else 0, "")


STARTING = """
import os, signal, threading, time
from nanovllm_core import LLM
from nanovllm_core.worker.executor import SingleProcessExecutor
start = SingleProcessExecutor.start
closed = []
def slow(executor, setup):
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    for _ in range(600):
        time.sleep(0.1)
SingleProcessExecutor.start = slow
SingleProcessExecutor.close = lambda executor: closed.append(executor)
try:
    LLM("demo", device="cpu", attention="sdpa", max_model_len=64)
except KeyboardInterrupt:
    print("interrupted", len(closed))
"""


def test_ctrl_c_ends_a_start_and_closes_what_it_had_opened() -> None:
    """Though the start runs on a thread, which Ctrl-C does not reach by itself."""
    status, written, told = run_script(STARTING)
    assert (status, written.split(), told) == (0, ["interrupted", "1"], "")


def test_the_engine_is_handed_out_once_the_door_has_no_unfinished_request(tiny: Path) -> None:
    """Its thread takes steps for those, and two threads must never be in a step together."""
    with open_tiny(tiny) as llm:
        stream = llm.stream(PROMPTS[0], greedy(40))
        next(stream)
        engine = llm.engine
        assert not engine.has_unfinished()
        engine.add_request("own", PROMPTS[1], greedy(3))
        own = [delta for _ in range(10) for delta in engine.step()]
        assert [len(delta.new_token_ids) for delta in own] == [3]
        assert sum(len(output.new_token_ids) for output in stream) == 39


@pytest.mark.parametrize("known", [1, 7, 39])
def test_a_request_goes_on_behind_outputs_that_another_engine_gave(
    known: int, shared_engine: LLM
) -> None:
    """As after a preemption: noise, penalties and the length count from the request's beginning."""
    params = SamplingParams(
        seed=5, max_tokens=40, min_tokens=40, frequency_penalty=1.0, logprobs=1, ignore_eos=True
    )
    engine = shared_engine.engine

    def run(*outputs: int, stream: bool) -> list[int]:
        engine.add_request("a", [3, 1, 4], params, stream=stream, output_token_ids=outputs)
        ids: list[int] = []
        while engine.has_unfinished():
            for delta in engine.step():
                ids += delta.new_token_ids
                assert len(delta.new_logprobs or ()) == len(delta.new_token_ids)
                assert delta.num_cached_tokens <= 3, "of the prompt"
        return ids

    whole = run(stream=True)
    assert len(whole) == 40
    for stream in (True, False):
        assert run(*whole[:known], stream=stream) == whole[known:]
    with pytest.raises(RequestError, match="2 output_token_ids for n=3 samples"):
        engine.add_request("b", [1], greedy(n=3), output_token_ids=(1, 2))


def test_outputs_that_this_engine_cannot_hold_are_refused(shared_engine: LLM) -> None:
    """Such as those of an engine with a longer max_model_len: they would end this one in a step."""
    engine = shared_engine.engine
    size, length = engine.limits.vocab_size, engine.limits.max_model_len
    wrong = {"outside the vocabulary": [size], "max_model_len is": [1] * (length - 3)}
    for match, outputs in wrong.items():
        with pytest.raises(RequestError, match=match):
            engine.add_request("a", [3, 1, 4], greedy(), output_token_ids=outputs)
    assert not engine.has_unfinished()


def test_a_searched_stream_that_is_left_at_its_first_end_leaves_nothing(demo: LLM) -> None:
    """Both samples end in one step; the caller has not searched the second one's last id."""
    stream = demo.stream("hello", greedy(3, n=2, stop=["no such text"]))
    next(output for output in stream if output.finished)
    stream.close()
    demo.generate(["a"], greedy(1), use_tqdm=False)
    assert not demo.engine._samples
