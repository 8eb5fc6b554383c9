"""A step that hangs: the engine is ended after a bound, and does not outlive the door's process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import EngineConfig
from nanovllm_engine_processes import process
from nanovllm_engine_processes.engines import Engines
from nanovllm_engine_processes.plugin import ProcessesOptions

from .test_processes import assert_nothing_is_left

SCRIPT = """
import os, signal, threading, time
from nanovllm_core import LLM, SamplingParams
from nanovllm_core.frontend import Close
from nanovllm_engine_processes import process

process.PROGRAM = '''
import pathlib, sys, time
sys.path[:] = sys.argv[5:]
from nanovllm_core.engine import Engine
def hang(self):
    pathlib.Path(sys.argv[2], "hangs").touch()
    time.sleep(1000)
Engine.step = hang
from nanovllm_engine_processes.child import main
main()
'''
settings = dict(device="cpu", attention="sdpa", max_model_len=64, max_num_seqs=4)
llm = LLM("demo", engine_client="processes", **settings)
print(*llm._client.pids.values(), flush=True)
asked = ["x"], SamplingParams(max_tokens=8)
threading.Thread(target=llm.generate, args=asked, daemon=True).start()
while not os.path.exists(llm._client._hub.engines._folder + "/hangs"):
    time.sleep(0.01)
llm._client.post(Close())
time.sleep(1)  # the engine has read it
os.kill(os.getpid(), signal.SIGKILL)
"""
"""The step hangs when the engine is told to close, and the door's process ends before the bound."""

Folders = Callable[[], list[Path]]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.slow
def test_an_engine_that_hangs_while_it_closes_ends_with_the_door_s_process(
    folders: Folders, tmp_path: Path
) -> None:
    """Its receiving thread has read `Close` and ended; another one watches the door's process."""
    said = tmp_path / "said"  # a file, because a process that is left would hold a pipe open
    with said.open("w") as file:
        ended = subprocess.run([sys.executable, "-c", SCRIPT], stdout=file, check=False)
    pids = said.read_text().strip()
    try:
        assert ended.returncode == -signal.SIGKILL
        assert_nothing_is_left(pids, folders)
    finally:
        for pid in pids.split():
            with suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGKILL)


def test_an_engine_that_works_and_does_not_move_is_ended_after_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle one is not, nor one that takes another step now and then."""
    monkeypatch.setattr(process, "PROGRAM", "import time; time.sleep(600)")
    options = ProcessesOptions(step_seconds=40)
    few = Engines(EngineConfig(model="x", device="cpu"), options)  # it pings once in a second
    try:
        [one] = few._processes.values()
        for _ in range(100):
            one.note_pong(7, works=False)
        assert few.find_ended()[1] == {}
        for turns in range(100):
            one.note_pong(turns // 40, works=True)
        assert few.find_ended()[1] == {}
        for _ in range(41):
            one.note_pong(3, works=True)
        [error] = few.find_ended()[1].values()
        assert "engine 0 (process" in str(error)
        assert "step_seconds (40 s)" in str(error)
    finally:
        few.close()


HANGING = """
import sys, time
sys.path[:] = sys.argv[5:]
from nanovllm_core.engine import Engine
step, taken = Engine.step, 0
def hang(self):
    global taken
    taken += 1
    if taken > 20 and sys.argv[3] == "1":
        time.sleep(1000)
    return step(self)
Engine.step = hang
from nanovllm_engine_processes.child import main
main()
"""


@pytest.mark.slow
def test_requests_of_an_engine_whose_step_hangs_go_on_elsewhere(
    settings: dict[str, Any],
    thread: LLM,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A thread of its process answers all the while."""
    monkeypatch.setattr(process, "PROGRAM", HANGING)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompts = ["Once upon a time", "The", "Hello", "A cat"]
    expected = [one.token_ids for one in thread.generate(prompts, params, use_tqdm=False)]
    client = {"name": "processes", "options": {"step_seconds": 8}}
    with LLM(**settings, data_parallel_size=2, engine_client=client) as llm:
        pid: int = llm._client.pids[1]  # type: ignore[attr-defined]
        with caplog.at_level(logging.ERROR):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [one.token_ids for one in outputs] == expected
        assert llm.info.device == "1 of 2 engines x cpu"
        [record] = caplog.records
        assert f"engine 1 (process {pid}) was at one step for step_seconds (8 s)" in record.message
    assert_nothing_is_left(str(pid), folders)
