"""Triton's interpreter is switched on before kernels are decorated, or an error says it is late."""

from __future__ import annotations

import os
import subprocess
import sys

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
