"""An engine that one process shares: doors, here and in other processes, use it as theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import EngineClosedError, EngineConfig, EngineError, InvalidSamplingError
from nanovllm_core.frontend import AddRequests, Ended, Mailbox, NewRequest
from nanovllm_engine_processes import wire
from nanovllm_engine_processes.plugin import SHARED
from nanovllm_engine_processes.shared import Line
from nanovllm_engine_processes.sharing import EngineShare, share_of
from nanovllm_kit import EngineClientConformance, PluginUnderTest, plugin_under_test

from .test_parity import ASKED, PROMPTS, facts

PROGRAM = """
import sys
from nanovllm_core import LLM, SamplingParams
client = {"name": "shared", "options": {"folder": sys.argv[1]}}
llm = LLM("demo", max_model_len=512, engine_client=client)
params = SamplingParams(max_tokens=400, ignore_eos=True, n=2, stop=["never"])
for _ in llm.stream([5, 6, 7], params):
    print("x", flush=True)
"""


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come true in {seconds} s"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def share(thread: LLM) -> Iterator[EngineShare]:
    """Of the engine on a thread."""
    share = EngineShare()
    share.serve(thread._client)
    yield share
    share.close()
    assert not share.folder.exists()
    share.close()


def door(share: EngineShare, settings: dict[str, Any]) -> LLM:
    client = {"name": "shared", "options": {"folder": share.folder}}
    return LLM(**settings, engine_client=client)


class TestShared(EngineClientConformance):
    @pytest.fixture
    def plugin(self, config: EngineConfig) -> Iterator[PluginUnderTest]:
        with LLM.from_config(config) as llm:
            share = EngineShare()
            share.serve(llm._client)
            yield plugin_under_test(SHARED, folder=share.folder)
            share.close()


@pytest.mark.parametrize("params", ASKED.values(), ids=ASKED)
def test_a_door_of_a_shared_engine_gives_the_outputs_of_its_own_door(
    params: SamplingParams, share: EngineShare, thread: LLM, settings: dict[str, Any]
) -> None:
    """Texts and stop strings are its own work; a closed door is forgotten."""
    expected = [facts(one) for one in thread.generate(PROMPTS, params, use_tqdm=False)]
    with door(share, settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, labels={"tenant": "a"})
        assert [facts(one) for one in outputs] == expected
        assert llm.stats.output_tokens == thread.stats.output_tokens
    wait_for(lambda: not share._doors)
    assert thread._client.is_open


def test_doors_have_ids_of_their_own_and_refusals_reach_the_one_at_fault(
    share: EngineShare, settings: dict[str, Any]
) -> None:
    with door(share, settings) as one, door(share, settings) as other:
        assert one._client.new_request_id() != other._client.new_request_id()
        with pytest.raises(InvalidSamplingError, match=r"^logits_processors cannot be sent"):
            one.generate([[5]], SamplingParams(logits_processors={"x": {"a": object()}}))
        assert len(other.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1


def test_a_request_that_nests_too_deep_ends_no_door(
    share: EngineShare, settings: dict[str, Any]
) -> None:
    """Whether the door or the share finds it, it is refused alone."""
    value = [5]
    with door(share, settings) as llm:
        for depth in range(sys.getrecursionlimit() + 10):
            value = [value]  # type: ignore[list-item]
            if depth > sys.getrecursionlimit() - 60:
                with pytest.raises(InvalidSamplingError):
                    llm.generate([[5]], SamplingParams(logits_processors={"x": {"a": value}}))
        assert len(llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1


def test_a_door_whose_process_is_killed_leaves_nothing_running(
    share: EngineShare, thread: LLM, settings: dict[str, Any]
) -> None:
    """Its requests are aborted, waiting stop strings too; those of another door go on."""
    with door(share, settings) as other:
        expected = [*other.stream("Once", SamplingParams(temperature=0, max_tokens=64))][-1].text
        command = [sys.executable, "-c", PROGRAM, str(share.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"x\n"
            stream = other.stream("Once", SamplingParams(temperature=0, max_tokens=64))
            outputs = [next(stream)]
            assert thread.stats.running == 3
            process.send_signal(signal.SIGKILL)
        outputs += stream
        assert outputs[-1].text == expected
        wait_for(lambda: len(share._doors) == 1)
        wait_for(lambda: thread.stats.free_blocks == thread.stats.blocks)
        assert thread.stats.running == thread.stats.waiting == 0


def test_requests_of_a_caller_that_can_take_no_answer_are_aborted(
    share: EngineShare, thread: LLM, settings: dict[str, Any]
) -> None:
    """As those of an event loop that is closed. Later ones of it are not run, and others go on."""

    def broken(_: object) -> None:
        raise RuntimeError("closed")

    params = SamplingParams(max_tokens=400, ignore_eos=True)
    with door(share, settings) as llm:
        client = llm._client
        number = client.subscribe(broken)
        for name in "ab":
            new = NewRequest(request_id=name, prompt_token_ids=[5], params=params, stream=True)
            client.send(AddRequests(number, (new,)))
        wait_for(lambda: not any(one.numbers for one in share._doors.values()))
        client.send(AddRequests(number, (new,)))
        wait_for(lambda: thread.stats.running == thread.stats.waiting == 0)
        assert len(llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1


def test_a_message_that_cannot_be_read_ends_its_door_alone(
    share: EngineShare, settings: dict[str, Any]
) -> None:
    with door(share, settings) as one, door(share, settings) as other:
        one._client._line.put("AddRequests", {"subscriber": 0})  # type: ignore[attr-defined]
        wait_for(lambda: not one._client.is_open)
        with pytest.raises(EngineClosedError, match="the shared engine failed"):
            _ = one.stats  # the last counters would look like an engine that is well
        with zmq.Context() as context, context.socket(zmq.PUSH) as out:
            out.connect(share_of(share.folder))
            for data in (b"", b"\xc1", wire.encode(1), wire.encode("door", wire.OPEN, "pid")):
                out.send(data)
        with pytest.raises(EngineClosedError):
            one.generate([[5]], use_tqdm=False)
        assert len(other.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1


def test_the_end_of_an_engine_reaches_every_door_and_new_ones_wait_for_another(
    settings: dict[str, Any],
) -> None:
    first, share = LLM(**settings), EngineShare()
    share.serve(first._client)
    llm = door(share, settings)
    client = llm._client
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    with Mailbox(client) as mailbox:
        mailbox.add([NewRequest(request_id="a", prompt_token_ids=[5], params=params, stream=True)])
        next(mailbox.deltas())
        first.close()
        with pytest.raises(EngineClosedError, match="closed"):
            [*iter(lambda: next(mailbox.deltas()), None)]
    answers: list[Any] = []
    client.subscribe(answers.append)
    with pytest.raises(EngineClosedError):
        llm.generate([[5]], use_tqdm=False)
    llm.close()
    waiting: list[LLM] = []
    opening = threading.Thread(target=lambda: waiting.append(door(share, settings)))
    opening.start()
    time.sleep(0.1)
    assert not waiting
    with LLM(**settings) as second:
        share.serve(second._client)
        opening.join(30)
        [llm] = waiting
        assert len(llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1
        share.close()
        with pytest.raises(EngineClosedError):
            llm.generate([[5]], use_tqdm=False)
        llm.close()
    assert [type(one) for one in answers] == [Ended]


def test_a_folder_that_nobody_shares_an_engine_in_is_an_error(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    client = {"name": "shared", "options": {"folder": tmp_path}}
    with pytest.raises(EngineError, match="no engine is shared in the folder"):
        LLM(**settings, engine_client=client)
    (tmp_path / "pid").write_text(str(2**22 - 1))
    with pytest.raises(EngineError, match="process 4194303 that shares the engine has ended"):
        LLM(**settings, engine_client=client)


def test_the_end_of_the_sharing_process_is_noticed_between_calls_that_never_pause(
    tmp_path: Path,
) -> None:
    """A caller that posts ten times in each look would else wait for ever."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "pid").write_text(str(ended.pid))
    line = Line(tmp_path, "LLM", {})
    thread = threading.Thread(target=line.run, daemon=True)
    thread.start()

    def has_ended() -> bool:
        line.put(wire.UNSUBSCRIBE, 0)
        return not thread.is_alive()

    wait_for(has_ended, 5.0)
    with pytest.raises(EngineError, match="has ended"):
        line.started.result()


def test_a_folder_of_sockets_is_this_users_alone_and_its_path_is_not_too_long(
    share: EngineShare, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert share.folder.stat().st_mode & 0o777 == 0o700
    with tempfile.TemporaryDirectory() as short:
        for length in (71, 90):  # the share's socket fits and a door's does not; none does
            place = Path(short, "x" * (length - len(short) - 1))
            place.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(place))
            with pytest.raises(EngineError, match="set TMPDIR to a shorter folder"):
                EngineShare()
            assert not [*place.iterdir()]


def test_a_door_of_the_name_of_one_before_takes_its_place(
    share: EngineShare, thread: LLM, settings: dict[str, Any]
) -> None:
    """A process may get the id of one that has just ended: what that one had is aborted."""
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    with door(share, settings) as llm:
        for _ in range(20):  # on a busy machine an answer may end before it is looked at, or later
            stream = llm.stream([5], params)
            next(stream)
            if thread.stats.running:
                break
        assert thread.stats.running >= 1
        name = llm._client._line.door  # type: ignore[attr-defined]
        with share._lock:
            share._open(name, os.getpid())
        wait_for(lambda: thread.stats.running == 0)
