"""A measurement in a process of its own: what it returns, and what it raises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm_bench.apart import run_apart
from nanovllm_core.errors import ConfigError, shown


def refuse(value: str) -> None:
    raise ConfigError(f"no {shown(value)} here")


def test_what_runs_apart_returns_from_another_process() -> None:
    assert run_apart(os.getpid) != os.getpid()


def test_an_error_of_another_process_keeps_its_type_and_text() -> None:
    with pytest.raises(ConfigError, match="no 'roof' here"):
        run_apart(refuse, "roof")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by /proc")
def test_work_aside_leaves_no_threads_of_openmp() -> None:
    """Work in this thread leaves them, where torch may use two."""
    program = """
import os, time, torch
from nanovllm_bench.apart import run_aside
x = torch.empty(600_000)
before = len(os.listdir("/proc/self/task"))
assert run_aside(torch.cos, x).shape == x.shape
until = time.monotonic() + 10
while len(os.listdir("/proc/self/task")) > before:
    assert time.monotonic() < until
    time.sleep(0.01)
torch.cos(x)
assert len(os.listdir("/proc/self/task")) > before
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
