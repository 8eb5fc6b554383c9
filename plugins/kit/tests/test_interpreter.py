"""Triton's interpreter is switched on in time or refused, and does no work that changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm_kit.interpreter import interpret_triton_without_cuda

IMPORT = "from nanovllm_kit.interpreter import interpret_triton_without_cuda as switch\n"
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles kernels")


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )


@needs_no_cuda
def test_kernels_decorated_afterwards_are_interpreted() -> None:
    """Their type says so."""
    program = "switch()\nimport triton\nprint(type(triton.jit(lambda x: None)).__name__)"
    assert run(IMPORT + program).stdout.strip() == "InterpretedFunction"


@needs_no_cuda
def test_switching_it_on_too_late_is_an_error() -> None:
    """Triton's own functions are already decorated."""
    result = run("import triton.language\n" + IMPORT + "switch()")
    assert "RuntimeError: triton.language was imported before" in result.stderr


def test_a_machine_with_a_gpu_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is left as it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not interpret_triton_without_cuda()
    assert "TRITON_INTERPRET" not in os.environ


SUMS = """
import inspect, torch, triton, triton.language as tl
from triton.runtime import interpreter

@triton.jit
def shifted(x, by):
    return tl.maximum(x + by, 0)

@triton.jit
def kernel(x_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    x = tl.load(x_ptr + at)
    for step in range(COUNT):
        x = shifted(x, step)
    tl.store(out_ptr + at, x + tl.sum(x, 0))

@triton.jit
def mixed_kernel(x_ptr, ints_ptr, floats_ptr, halves_ptr):
    rows, columns = tl.arange(0, 4), tl.arange(0, 8)
    at = rows[:, None] * 8 + columns[None, :]
    x = tl.load(x_ptr + at, mask=(rows < 3)[:, None] & (columns != 5), other=-1)
    sorted_x = tl.sort(x * 3 % 7)
    wide = 2 - x.to(tl.int64) * 2**20 * 2**20
    tl.store(ints_ptr + at, wide + sorted_x + tl.xor_sum(x, 1)[:, None] + (x > 3) + True)
    x = x.to(tl.float32)
    tl.store(floats_ptr + at, 1 / (x + 0.3) + tl.where(x > rows[:, None], x / 3, -float("inf")))
    half = x.to(tl.float16)
    tl.store(halves_ptr + at, (half + half * 3) / 7 + half[:, :] * tl.sum(half, 1)[:, None])

@triton.jit
def unlike_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, 8), tl.arange(0, 8) + tl.arange(0, 4))

searches = []
search = inspect.getmembers
inspect.getmembers = lambda *one: searches.append(1) or search(*one)
x = torch.arange(-8, 8, dtype=torch.int32)
x[0] = 2**31 - 1
for _ in range(2):
    out = torch.zeros_like(x)
    kernel[(2,)](x, out, 5)
    print(out.tolist())
mixed = torch.arange(32, dtype=torch.int32) * 77 % 31 - 9
outs = [torch.zeros(32, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.float16)]
mixed_kernel[(1,)](mixed, *outs)
print([out.tolist() for out in outs])
try:
    unlike_kernel[(1,)](mixed)
except Exception as error:
    print(error)
print(tl.core.is_builtin(tl.load), len(searches))
"""


@needs_no_cuda
def test_a_quickened_interpreter_computes_the_same_and_searches_once_per_launch(
    tmp_path: Path,
) -> None:
    """Sums that overflow, device functions, types beside each other and shapes that do not fit
    included; the language is whole again afterwards.
    """
    (tmp_path / "sums.py").write_text(SUMS)  # Triton reads a kernel's source from its file.
    start = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + IMPORT
    plain, quick = (
        run(start + f"switch()\n{quicken}\nimport sums").stdout.splitlines()
        for quicken in ("", "from nanovllm_kit.interpreter import *; quicken_interpreter()")
    )
    *results, after = quick
    assert results == plain[:-1]
    first, second, mixed, refused = results
    assert first == second
    assert "-inf" in mixed
    assert "incompatible dimensions" in refused
    *_, searches = after.split()
    assert after.startswith("True")
    assert 0 < int(searches) <= int(plain[-1].split()[1]) // 5
