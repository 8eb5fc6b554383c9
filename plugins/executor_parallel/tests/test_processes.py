"""The processes of ranks: no main guard, ended with the engine's process, out of Ctrl-C's reach."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")

SCRIPT = """
import asyncio, os, signal, sys, threading
from nanovllm_core import LLM, SamplingParams
from nanovllm_executor_parallel import executor

# They are ignored where the tests were started in the background of a shell.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if sys.argv[1] == "starting":
    def spawn(ranks, *rest, spawn=executor.spawn):
        spawn(ranks, *rest)
        print(*(one.pid for one in ranks), flush=True)
        os.killpg(0, signal.SIGINT)
    executor.spawn = spawn
def start():
    return LLM("demo", executor="parallel", tensor_parallel_size=2, device="cpu",
               attention="sdpa", max_num_seqs=4)
async def cell():
    with start() as llm:
        print(*(one.pid for one in llm.engine._executor._ranks), flush=True)
        [output] = llm.generate(["What is 27 + 15?"], use_tqdm=False)
        print(output.finish_reason, flush=True)
if sys.argv[1] == "notebook":
    asyncio.run(cell())
    sys.exit()
llm = start()
print(*(one.pid for one in llm.engine._executor._ranks), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "forked":
    if os.fork() == 0:
        print("child", os.getpid(), flush=True)
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "interrupted":
    threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()
    try:
        llm.generate(["Write a story."] * 4, SamplingParams(ignore_eos=True, max_tokens=1500))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    # A service manager may send these to every process of a service.
    for pid in (one.pid for one in llm.engine._executor._ranks):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGHUP)
    # The ranks are alive: all signals are this process's to handle.
    [output] = llm.generate(["What is 27 + 15?"], use_tqdm=False)
    print(output.finish_reason, flush=True)
"""
"""Read from stdin, and without `if __name__ == "__main__":`. It ends without closing the engine."""


def run(how: str) -> tuple[int, list[str]]:
    """The exit code of the script, and what it printed. It leads a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-", how],
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
        if line.startswith("child"):
            break
    return process.wait(60), lines


def has_ended(pid: int) -> bool:
    """Gone, or a zombie that its new parent has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_end(pids: list[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not all(map(has_ended, pids)):
        assert time.monotonic() < until, "ranks go on without their engine"
        time.sleep(0.05)


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def test_ranks_end_when_the_engine_s_process_is_killed() -> None:
    """Their sockets end. All of them write to one pipe, which ends with the last."""
    code, [pids] = run("killed")
    assert code == -signal.SIGKILL
    assert_end([int(pid) for pid in pids.split()], 1.0)


@pytest.mark.slow
def test_ranks_end_although_a_fork_of_the_engine_s_process_lives() -> None:
    """It holds their sockets open; they see that their parent has gone."""
    code, [pids, child] = run("forked")
    try:
        assert code == -signal.SIGKILL
        assert_end([int(pid) for pid in pids.split()], 3.0)
    finally:
        os.kill(int(child.split()[1]), signal.SIGKILL)


@pytest.mark.slow
def test_the_ranks_leave_signals_to_the_program() -> None:
    """Ctrl-C interrupts the call, the engine goes on, and its ranks end with the program."""
    code, [pids, interrupted, reason] = run("interrupted")
    assert (code, interrupted, reason) == (0, "interrupted", "stop")
    assert_end([int(pid) for pid in pids.split()], 1.0)


@pytest.mark.slow
def test_ranks_serve_a_program_without_a_file_in_which_an_event_loop_runs() -> None:
    """As a notebook's cells do."""
    code, [pids, reason] = run("notebook")
    assert (code, reason) == (0, "stop")
    assert_end([int(pid) for pid in pids.split()], 1.0)


@pytest.mark.slow
def test_ctrl_c_ends_a_start_and_its_ranks() -> None:
    """They are killed: until they have started they read no messages."""
    code, [pids] = run("starting")
    assert code == -signal.SIGINT
    assert_end([int(pid) for pid in pids.split()], 1.0)
