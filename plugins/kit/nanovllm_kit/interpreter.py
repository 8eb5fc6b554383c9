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
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

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


def quicken_interpreter() -> None:
    """Spare the interpreter work that changes nothing; kernels take about half the time.

    With its `debug` off, it checks integer sums and products for overflow and drops the verdict.
    Each call of a device function searches `triton.language` for operations to replace, which the
    kernel's launch has replaced. Each operation makes a table of all types to find one.

    Relies on names that are private to Triton 3.7: call it in tests that pin Triton.
    """
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _patched_once(interpreter)
    interpreter._get_np_dtype = _found_once(interpreter._get_np_dtype)


def _patched_once(interpreter: Any) -> Callable[[Any], Any]:
    """`_patch_lang`, which leaves a language as it is that a running kernel has patched."""
    patch, language = interpreter._patch_lang, interpreter.tl

    def patch_unless_patched(fn: Any) -> Any:
        used = [one for one in (language, language.core) if one in fn.__globals__.values()]
        first = [operation for one in used for operation in (one.load, one.tensor.__add__)]
        if any(map(language.core.is_builtin, first)):
            return patch(fn)
        return interpreter._LangPatchScope()

    return patch_unless_patched


def _found_once(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_get_np_dtype`, which gives a block the type of its elements; called once for each of them.

    Types are told apart by name: those of pointers and blocks have no hash.
    """
    found: dict[str, Any] = {}

    def find_unless_found(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return find_unless_found
