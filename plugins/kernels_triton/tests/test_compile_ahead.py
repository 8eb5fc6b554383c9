"""Kernels compiled ahead, on any machine: a true compiler, and a stand-in for the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="compiles Triton kernels")

KERNELS = """
import triton, triton.language as tl

ONE = tl.constexpr(1.0)

@triton.jit
def one():
    return ONE

@triton.jit
def fill(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), one())

@triton.jit
def wrong(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), tl.zeros((SIZE + 2,), tl.float32))
"""

DRIVER = """
import contextlib, json, sys, threading
import torch, triton
from triton.backends.compiler import GPUTarget
from nanovllm_kernels_triton import compilation
from nanovllm_kernels_triton.compilation import CompileAhead
from kernels import fill, wrong

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
x = torch.zeros(64)
seen = {}
"""

BY_THREADS = """
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
print(json.dumps(seen))
"""

BY_PROCESSES = """
from kernels import one
one.cache_key  # Triton's key of `fill` is another one where `one` was hashed first
is_hit, errors = {}, []
def listen(*, src, cache_hit, **_):
    is_hit[src.constants[1,]] = cache_hit
triton.knobs.compilation.listener = listen
compilation.NUM_HERE = 2
with CompileAhead(num_processes=2) as is_needed:
    wrong[(1,)](x, SIZE=4)
    for size in (1, 2, 8, 16, 32, 64, 128):
        fill[(1,)](x, SIZE=size)
    wrong[(1,)](x, SIZE=16)
    seen["needed"] = is_needed()
for size in (4, 16):
    try:
        wrong[(1,)](x, SIZE=size)
    except Exception as error:
        errors.append(type(error).__name__)
for size in (1, 2, 8, 16, 32, 64, 128):
    fill[(1,)](x, SIZE=size)
seen["launched"] = len(launched)
seen["by processes"] = sorted(size for size in is_hit if is_hit[size])
seen["here"] = sorted(size for size in is_hit if not is_hit[size])
seen["errors"] = errors
warnings = []
compilation.logger.warning = lambda text, *values: warnings.append(text % values)
sys.executable = "/nowhere/python"
with CompileAhead(num_processes=2):
    for size in (256, 512, 1024, 2048):
        fill[(1,)](x, SIZE=size)
seen["without processes"] = sorted(size for size in is_hit if size >= 256 and not is_hit[size])
seen["warnings"] = warnings
print(json.dumps(seen))
"""

JOBS = """
import os, signal
from triton.compiler import ASTSource
from nanovllm_kernels_triton import compilers as compilers_module
from nanovllm_kernels_triton.compilers import CompileJob, Compilers

@triton.jit
def of_main(x_ptr, SIZE: triton.language.constexpr):
    triton.language.store(x_ptr, SIZE)

def job(kernel, size):
    source = ASTSource(kernel, {"x_ptr": "*fp32", "SIZE": "constexpr"}, {"SIZE": size})
    return CompileJob(source, GPUTarget("cuda", 90, 32), {"num_warps": 2}, {})

def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False

compilers = Compilers()
seen["a kernel"] = compilers.compile(job(fill, 16))
seen["one that fails"] = compilers.compile(job(wrong, 16))
seen["one of the main module"] = compilers.compile(job(of_main, 16))
seen["one that cannot be sent"] = compilers.compile(job(fill, threading.Lock()))
def wait():
    try:
        compilers.compile(job(fill, 32))
    except Exception as error:
        seen["closed"] = type(error).__name__
waiting = threading.Thread(target=wait)
os.kill(compilers.pid, signal.SIGSTOP)
waiting.start()
compilers.close()
waiting.join()
seen["ended"] = has_ended(compilers.pid)
with open("kernels.py", "a") as file:
    file.write("ONE = tl.constexpr(2.0)\\n")
later = Compilers()
seen["one that was edited"] = later.compile(job(fill, 32))
later.close()
killed = Compilers()
os.kill(killed.pid, signal.SIGKILL)
warnings = []
compilers_module.logger.warning = lambda text, *values: warnings.append(text % values)
seen["by killed ones"] = [killed.compile(job(fill, 16)) for _ in range(2)]
[warning] = warnings
seen["warning"] = warning.replace(str(killed.pid), "PID")
killed.close()
print(json.dumps([seen, Compilers().pid]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

WOKEN = """
from triton.compiler import ASTSource
from nanovllm_kernels_triton import compilers, plugin
from nanovllm_kernels_triton.compilers import CompileJob, Compilers, take, wake

compilers.count_processes = lambda: 0
wake()
seen["by few processors"] = len(compilers._waiting)
compilers.count_processes = lambda: 2
wake()
[unused] = compilers._waiting
plugin.nanovllm_engine_started(None)
seen["left by a start without a use for it"] = len(compilers._waiting) + unused.is_running
wake()
wake()
[woken] = compilers._waiting
seen["taken is the woken one"] = take() is woken
source = ASTSource(fill, {"x_ptr": "*fp32", "SIZE": "constexpr"}, {"SIZE": 16})
seen["it compiles"] = woken.compile(
    CompileJob(source, GPUTarget("cuda", 90, 32), {"num_warps": 2}, {})
)
woken.close()
wake()
seen["woken with kernels in the cache"] = len(compilers._waiting)
compilers.PROGRAM = compilers.PROGRAM.replace(
    "from nanovllm_kernels_triton.compilers import serve",
    "from nanovllm_kernels_triton import compilers\\n"
    "from nanovllm_kernels_triton.compilers import serve\\n"
    "compilers.IDLE_SECONDS = 0.1",
)
idle = Compilers()
compilers._waiting.append(idle)
idle._process.wait(60)
another = take()
seen["one that ended is taken"] = another is idle
another.close()
print(json.dumps(seen))
"""


def run(tmp_path: Path, program: str, status: int = 0) -> Any:
    """The facts that the program prints, run by a process of its own with an empty cache."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    file = tmp_path / "program.py"
    file.write_text(DRIVER + program)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, file],
        cwd=tmp_path,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def test_kernels_are_compiled_by_threads_and_launched_behind(tmp_path: Path) -> None:
    """Each variant once; what fails raises at its next launch; an interruption leaves none out."""
    assert run(tmp_path, BY_THREADS) == {
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
    }


def test_processes_compile_all_but_the_first_kernels(tmp_path: Path) -> None:
    """Their kernels are found in the cache; what fails there raises here, as ever.

    Where no process can be started, threads compile all of them, and a warning says so.
    """
    reason = "[Errno 2] No such file or directory: '/nowhere/python'"
    assert run(tmp_path, BY_PROCESSES) == {
        "needed": True,
        "launched": 7,
        "by processes": [2, 8, 16, 32, 64, 128],
        "here": [1],
        "errors": ["CompilationError", "CompilationError"],
        "without processes": [256, 512, 1024, 2048],
        "warnings": [f"threads compile all kernels, for no process can: {reason}"],
    }


def test_compilers_say_what_they_could_not_compile_and_end_when_closed(tmp_path: Path) -> None:
    """A kernel that fails, cannot be found or sent, or was edited: False, as from killed ones.

    They end too where the process that started them is killed, even while they import.
    """
    seen, orphan = run(tmp_path, JOBS, -signal.SIGKILL)
    assert seen == {
        "a kernel": True,
        "one that fails": False,
        "one of the main module": False,
        "one that was edited": False,
        "one that cannot be sent": False,
        "closed": "CancelledError",
        "ended": True,
        "by killed ones": [False, False],
        "warning": "the process that compiles kernels (process PID) has ended: threads compile "
        "the kernels, which takes longer",
    }
    command = Path(f"/proc/{orphan}/cmdline")
    end = time.monotonic() + 30
    while command.exists() and command.read_bytes():  # a zombie has none
        assert time.monotonic() < end, "it runs after 30 s"
        time.sleep(0.1)


def test_the_process_that_compiles_starts_early_where_nothing_is_compiled(tmp_path: Path) -> None:
    """Its first user takes it. One that nothing asks ends by itself, and is not taken any more."""
    assert run(tmp_path, WOKEN) == {
        "by few processors": 0,
        "left by a start without a use for it": 0,
        "taken is the woken one": True,
        "it compiles": True,
        "woken with kernels in the cache": 0,
        "one that ended is taken": False,
    }
