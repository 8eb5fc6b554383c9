"""The folders of sockets when the door's process ends before it has removed them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm_engine_processes.sharing import EngineShare

Folders = Callable[[], list[Path]]

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

INTERRUPTED = """
import os, signal, time
from nanovllm_core import LLM
from nanovllm_engine_processes import hub

class Engines(hub.Engines):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
    def close(self):
        for number in self:
            self.end(number)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)

hub.Engines = Engines
LLM("demo", device="cpu", engine_client="processes")
"""
"""A second Ctrl-C comes when the engines are killed, and their folder is not removed yet."""

SHARED = """
import os, signal
from nanovllm_core import LLM
from nanovllm_engine_processes.sharing import EngineShare

llm = LLM("demo", device="cpu", max_model_len=64, engine_client="processes")
share = EngineShare()
share.serve(llm._client)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(script: str) -> int:
    """The exit code."""
    return subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.DEVNULL, timeout=60, check=False
    ).returncode


def test_a_second_ctrl_c_during_a_start_leaves_no_folder(folders: Folders) -> None:
    """It interrupts the wait for the thread that would remove it."""
    assert run(INTERRUPTED) == -signal.SIGINT
    assert folders() == []


def test_the_folder_of_a_share_is_removed_when_its_process_is_killed(folders: Folders) -> None:
    """The engine's process does it; the share of another process stays."""
    other = EngineShare()
    try:
        assert run(SHARED) == -signal.SIGKILL
        until = time.monotonic() + 20
        while folders() or [*other.folder.parent.glob("nanovllm-share-*")] != [other.folder]:
            assert time.monotonic() < until, "a folder is left"
            time.sleep(0.05)
    finally:
        other.close()
