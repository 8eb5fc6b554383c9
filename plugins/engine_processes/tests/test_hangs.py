"""A step that hangs: its process does not outlive the door's, and leaves no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

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
