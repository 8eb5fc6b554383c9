"""Kernels are compiled for sm_90 on any machine, and their registers and spills are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm_kit.aot import AotJob, compile_kernel, compile_kernels

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def copy(x_ptr, y_ptr, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets).to(DTYPE))

@triton.jit
def hoard(x_ptr, y_ptr, n, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    for i in range(n):
        z = tl.load(x_ptr + offsets + i * SIZE)
        y = y * tl.sum(x * z) + x
    tl.store(y_ptr + offsets, x + y)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def double(x_ptr, SIZE: gl.constexpr):
    offsets = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(x_ptr + offsets, gl.load(x_ptr + offsets) * 2)
"""
POINTERS = {"x_ptr": "*fp32:16", "y_ptr": "*fp32:16"}


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "aot_examples.py").write_text(KERNELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return "aot_examples"


def test_a_small_kernel_does_not_spill_even_where_the_tests_interpret(kernels: str) -> None:
    """The report shows its registers, no spills and 16-byte accesses."""
    report = compile_kernel(
        f"{kernels}:copy", POINTERS, {"SIZE": 512, "DTYPE": "tl.float32"}, num_warps=4
    )
    assert report.spills == 0
    assert 0 < report.registers <= 32
    assert "ld.global.v4" in report.ptx


def test_a_kernel_that_needs_too_many_registers_reports_its_spills(kernels: str) -> None:
    """384 live floats per thread cannot fit 255 registers."""
    signature = {**POINTERS, "n": "i32"}
    report = compile_kernel(f"{kernels}:hoard", signature, {"SIZE": 4096}, num_warps=1)
    assert report.spills > 0


def test_a_gluon_kernel_reports_its_machine_code_where_the_job_asks_for_it(kernels: str) -> None:
    """Disassembling takes seconds, so other reports have none."""
    job = AotJob(
        kernel=f"{kernels}:double", signature={"x_ptr": "*fp32:16"}, constexprs={"SIZE": 128}
    )
    plain, shown = compile_kernels([job, replace(job, disassemble=True)])
    assert plain.sass == ""
    assert "STG.E" in shown.sass


def test_an_argument_without_a_type_is_named(kernels: str) -> None:
    """The signature must be complete."""
    with pytest.raises(RuntimeError, match="no type for argument 'y_ptr'"):
        compile_kernel(f"{kernels}:copy", {"x_ptr": "*fp32"}, {"SIZE": 64, "DTYPE": "tl.float32"})
