"""Run Triton kernels on a CPU through Triton's interpreter.

Triton decides when a kernel is decorated, so the choice must be made before any module with kernels
is imported. Call `interpret_triton_without_cuda()` at the top of a project's root `conftest.py`:

    from nanovllm_kit.interpreter import interpret_triton_without_cuda

    interpret_triton_without_cuda()

Then a kernel called with CPU tensors is interpreted, on machines without a GPU; with one, it needs
CUDA tensors as always. The interpreter computes bfloat16 wrongly and silently, so kernels cast to
float32 after each load, and tests interpret them in float32 and float16. What only the compiler can
tell (registers, spills) `nanovllm_kit.aot` asks in a fresh process.
"""

from __future__ import annotations

import os
import sys

import torch


def interpret_triton_without_cuda() -> bool:
    """Switch the interpreter on where no CUDA device is found; returns whether it is on.

    Raises RuntimeError if Triton's language was imported before without the interpreter.
    """
    if torch.cuda.is_available():
        return False
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton.language" in sys.modules:
        raise RuntimeError(
            "triton.language was imported before the interpreter could be switched on; "
            "call interpret_triton_without_cuda() earlier, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    return True
