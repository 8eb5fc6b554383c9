"""The processes of engines: no main guard, ended with the door's process, out of Ctrl-C's reach."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import EngineError

SCRIPT = """
import os, signal, sys, threading
from nanovllm_core import LLM, SamplingParams
from nanovllm_engine_processes import hub

# It is ignored where the tests were started in the background of a shell.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings = dict(device="cpu", attention="sdpa", max_model_len=1024, max_num_seqs=4)
if sys.argv[1] == "starting":
    class Engines(hub.Engines):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            print(*self.pids().values(), flush=True)
            os.killpg(0, signal.SIGINT)
    hub.Engines = Engines
llm = LLM("demo", data_parallel_size=int(sys.argv[2]), engine_client="processes", **settings)
print(*llm._client.pids.values(), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "forked":
    if os.fork() == 0:
        print("child", os.getpid(), flush=True)
        try:
            llm.generate(["x"])
        except Exception as error:
            print(type(error).__name__, flush=True)
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "interrupted":
    threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()
    try:
        llm.generate(["Write a story."] * 4, SamplingParams(ignore_eos=True, max_tokens=900))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    # A service manager may send these to every process of a service.
    for pid in llm._client.pids.values():
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGHUP)
    # The engines are alive: all signals are this process's to handle.
    [output] = llm.generate(["What is 27 + 15?"], use_tqdm=False)
    print(output.finish_reason, flush=True)
"""
"""Read from stdin, without `if __name__ == "__main__":`. It does not close the engines."""

Folders = Callable[[], list[Path]]

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def run(how: str, engines: int = 1) -> tuple[int, list[str]]:
    """The exit code of the script, and what it printed. It leads a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-", how, str(engines)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(SCRIPT)
    process.stdin.close()
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith("EngineClosedError"):
            break
    return process.wait(60), lines


def has_ended(pid: int) -> bool:
    """Gone, or a zombie that its new parent has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_nothing_is_left(pids: str, folders: Folders, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not all(has_ended(int(pid)) for pid in pids.split()) or folders():
        assert time.monotonic() < until, "engines go on without their door, or left their sockets"
        time.sleep(0.05)


def test_engines_end_when_the_door_s_process_is_killed(folders: Folders) -> None:
    """And remove the folder of the sockets, which nobody else is left to do."""
    code, [pids] = run("killed")
    assert code == -signal.SIGKILL
    assert_nothing_is_left(pids, folders)


@pytest.mark.slow
def test_engines_end_although_a_fork_of_the_door_s_process_lives(folders: Folders) -> None:
    """The fork itself may not use the door."""
    code, [pids, child, said] = run("forked", 2)
    try:
        assert (code, said) == (-signal.SIGKILL, "EngineClosedError")
        assert_nothing_is_left(pids, folders)
    finally:
        os.kill(int(child.split()[1]), signal.SIGKILL)


@pytest.mark.slow
def test_the_engines_leave_signals_to_the_program(folders: Folders) -> None:
    """Ctrl-C interrupts the call, the engines go on, and end with the program."""
    code, [pids, interrupted, reason] = run("interrupted", 2)
    assert (code, interrupted, reason) == (0, "interrupted", "stop")
    assert_nothing_is_left(pids, folders)


@pytest.mark.slow
def test_ctrl_c_ends_a_start_and_its_engines(folders: Folders) -> None:
    code, [pids] = run("starting", 2)
    assert code == -signal.SIGINT
    assert_nothing_is_left(pids, folders)


@pytest.mark.slow
def test_an_engine_that_is_stopped_is_ended_after_the_bound(
    settings: dict[str, Any], folders: Folders
) -> None:
    """Not before, and the others take over; with the last one all calls end."""
    client = {"name": "processes", "options": {"stall_seconds": 2, "router": "prefix"}}
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with LLM(**settings, data_parallel_size=2, engine_client=client) as llm:
        [expected] = llm.generate(["Once"], params, use_tqdm=False)
        pids: dict[int, int] = llm._client.pids  # type: ignore[attr-defined]
        streams = [llm.stream("Once", params) for _ in range(2)]
        ids = [[*next(stream).new_token_ids] for stream in streams]
        began = time.monotonic()
        os.kill(pids[0], signal.SIGSTOP)
        for one, stream in zip(ids, streams, strict=True):
            one += [token for output in stream for token in output.new_token_ids]
            assert one == expected.token_ids
        _ = llm.stats
        assert time.monotonic() - began < 10
        assert llm.info.device == "1 of 2 engines x cpu"
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"engine 1 .*no answer for stall_seconds \(2 s\)"):
            llm.generate(["Once"], params, use_tqdm=False)
    assert_nothing_is_left(" ".join(map(str, pids.values())), folders)


@pytest.mark.slow
def test_each_of_two_engines_may_have_two_ranks(settings: dict[str, Any], folders: Folders) -> None:
    """Data and tensor parallel together; a rank that is killed ends its engine, and no request."""
    pytest.importorskip("nanovllm_executor_parallel", reason="needs the plugin executor_parallel")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = ["Once upon a time", "The", "Hello", "A cat"]
    with LLM(**settings) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(**settings, data_parallel_size=2, tensor_parallel_size=2) as llm:
        assert llm.info.device == "2 of 2 engines x 2 x cpu"
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [one.token_ids for one in outputs] == expected
        engine: int = llm._client.pids[0]  # type: ignore[attr-defined]
        ranks = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
        streams = [llm.stream(prompt, params) for prompt in prompts]
        ids = [[*next(stream).new_token_ids] for stream in streams]
        os.kill(int(ranks[1]), signal.SIGKILL)
        for one, stream in zip(ids, streams, strict=True):
            one += [token for output in stream for token in output.new_token_ids]
        assert ids == expected
        assert llm.info.device == "1 of 2 engines x 2 x cpu"
    assert_nothing_is_left(" ".join([str(engine), *ranks]), folders)
