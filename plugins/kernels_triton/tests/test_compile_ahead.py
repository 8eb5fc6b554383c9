"""Kernels compiled by threads, on any machine: a true compiler, and a stand-in for the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiles Triton kernels")

PROGRAM = """
import contextlib, json, sys, threading
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from nanovllm_kernels_triton.compilation import CompileAhead

launched, compiled_by = [], []

class Utils:
    def load_binary(self, name, *_):
        compiled_by.append(threading.current_thread())
        return 1, name, 0, 0, 1024
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

class Launcher:
    def __init__(self, *_): pass
    def __call__(self, gx, gy, gz, stream, function, *_): launched.append(function)

class Driver:
    utils, launcher_cls = Utils(), Launcher
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
torch.cuda.current_device = lambda: 0
torch.cuda.device = lambda device: contextlib.nullcontext()

@triton.jit
def fill(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 1.0)

@triton.jit
def wrong(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), tl.zeros((SIZE + 2,), tl.float32))

x = torch.zeros(64)
seen = {}
with CompileAhead() as is_needed:
    for _ in range(3):
        for size in (16, 32, 64):
            fill[(1,)](x, SIZE=size)
    seen["needed"] = is_needed()
    wrong[(1,)](x, SIZE=16)
    seen["launched within"] = len(launched)
    other = threading.Thread(target=lambda: fill[(1,)](x, SIZE=32))
    other.start()
    other.join()
    seen["launched by another thread"] = len(launched)
launched.clear()
seen["compiled"] = len(compiled_by)
seen["by threads"] = threading.main_thread() not in compiled_by
for size in (16, 32, 64):
    fill[(1,)](x, SIZE=size)
seen["launched behind"] = len(launched)
seen["compiled again"] = len(compiled_by) - seen["compiled"]
try:
    wrong[(1,)](x, SIZE=16)
except Exception as error:
    seen["error"] = type(error).__name__
compiled = len(compiled_by)
try:
    with CompileAhead():
        fill[(1,)](x, SIZE=8)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    fill[(1,)](x, SIZE=8)
    seen["launched after an interruption"] = len(launched) - seen["launched behind"]
before = len(launched)
leave = triton.AsyncCompileMode.__exit__
def interrupted(*_):
    raise KeyboardInterrupt
triton.AsyncCompileMode.__exit__ = interrupted
try:
    with CompileAhead():
        fill[(1,)](x, SIZE=4)
except KeyboardInterrupt:
    fill[(1,)](x, SIZE=4)
    seen["launched after an interrupted wait"] = len(launched) - before
triton.AsyncCompileMode.__exit__ = leave
fill.device_caches.clear()
with CompileAhead() as is_needed:
    fill[(1,)](x, SIZE=16)
    seen["needed with a warm cache"] = is_needed()
sooner = threading.Thread(target=lambda: start(entered, may_leave))
entered, may_leave = threading.Event(), threading.Event()
def start(entered, may_leave):
    with CompileAhead():
        entered.set()
        may_leave.wait(10)
sooner.start()
entered.wait(10)
with CompileAhead() as is_needed:
    may_leave.set()
    sooner.join()
    fill[(1,)](x, SIZE=128)
    seen["needed while another start ends"] = is_needed()
seen["listener"] = triton.knobs.compilation.listener
print(json.dumps(seen))
"""


def test_kernels_are_compiled_by_threads_and_launched_behind(tmp_path: Path) -> None:
    """Each variant once; what fails raises at its next launch; an interruption leaves none out.

    Starts of two threads may overlap, and leave Triton as they found it.
    """
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, file],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "needed": True,
        "launched within": 0,
        "launched by another thread": 1,
        "compiled": 3,
        "by threads": True,
        "launched behind": 3,
        "compiled again": 0,
        "error": "CompilationError",
        "launched after an interruption": 1,
        "launched after an interrupted wait": 1,
        "needed with a warm cache": False,
        "listener": None,
        "needed while another start ends": True,
    }
