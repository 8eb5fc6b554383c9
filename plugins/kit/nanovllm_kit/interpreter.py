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
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

WITHIN: dict[str, tuple[type, ...]] = {
    "fp32": (int, float),
    "int32": (int,),
    "int64": (int,),
    "int1": (),
}
"""By type, the kinds of numbers beside which an operation is computed in it, as of two of it."""


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
    """Spare the interpreter work that changes nothing; kernels take a third of the time or less.

    With its `debug` off, it checks integer sums and products for overflow and drops the verdict.
    Each call of a device function searches `triton.language` for operations to replace, which the
    kernel's launch has replaced. Each operation makes a table of all types to find one, describes
    the shape of its result anew, and compares types that are equal. `tl.sort` calls Python for each
    number, where numpy has the operation.

    Relies on names that are private to Triton 3.7: call it in tests that pin Triton.
    """
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    builder, language = interpreter.interpreter_builder, interpreter.tl
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _patched_once(interpreter)
    interpreter._get_np_dtype = _found_once(interpreter._get_np_dtype)
    interpreter.ReduceOps.apply_impl = _xor_by_numpy(language, interpreter.ReduceOps.apply_impl)
    _share_shapes(language.core)
    semantic = type(interpreter.interpreter_semantic)
    for name, shortened in {
        "binary_op_type_checking_impl": _shortened_checks,
        "broadcast_impl_value": _shortened_broadcasts,
    }.items():
        setattr(semantic, name, shortened(language.core, getattr(semantic, name)))


def _patched_once(interpreter: Any) -> Callable[[Any], Any]:
    """`_patch_lang`, which leaves a language as it is that a running kernel has patched."""
    patch, language = interpreter._patch_lang, interpreter.tl

    @cache
    def languages(fn: Any) -> list[Any]:
        return [one for one in (language, language.core) if one in fn.__globals__.values()]

    def patch_unless_patched(fn: Any) -> Any:
        first = [operation for one in languages(fn) for operation in (one.load, one.tensor.__add__)]
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


def _xor_by_numpy(language: Any, reduce: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`ReduceOps.apply_impl`, which knows sums and extremes as operations of numpy's, no xor."""

    def reduce_or_xor(self: Any, input: Any) -> Any:
        if self.combine_fn != language.standard._xor_combine:
            return reduce(self, input)
        block = input[0]
        data = np.bitwise_xor.reduce(block.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, block.dtype)

    return reduce_or_xor


def _share_shapes(core: Any) -> None:
    """Blocks of one shape have the same tuple as their shape, and tensors of such blocks too."""
    check, constexpr = core.block_type.__init__, core.constexpr
    found: dict[tuple[int, ...], tuple[Any, ...]] = {}
    of_scalars = constexpr(1), core.tuple([])

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([one.value if isinstance(one, constexpr) else one for one in shape])
        if sizes not in found:
            check(self, element_ty, shape)
            numel, of_tensors = constexpr(self.numel), core.tuple(map(constexpr, sizes))
            found[sizes] = self.shape, self.numel, str(self.shape), numel, of_tensors
        self.element_ty = element_ty
        self.shape, self.numel, shown, *self.of_tensors = found[sizes]
        self.name = f"<{shown}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else of_scalars

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor


def _shortened_checks(core: Any, check: Callable[..., Any]) -> Callable[..., Any]:
    """`binary_op_type_checking_impl`, for which operands of one type need no other, nor does a
    number beside a tensor that can hold it.
    """

    def check_unless_alike(self: Any, lhs: Any, rhs: Any, *rules: bool, **more: bool) -> Any:
        for tensor, other in ((lhs, rhs), (rhs, lhs)):
            if not isinstance(tensor, core.tensor) or tensor.dtype.name not in WITHIN:
                continue
            if isinstance(other, core.tensor):
                if other.dtype.name == tensor.dtype.name:
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(other) in WITHIN[tensor.dtype.name] and abs(other) < 2**31:
                number = self.scalar_constant(other, tensor.dtype)
                pair = (tensor, number) if tensor is lhs else (number, tensor)
                return self.broadcast_impl_value(*pair)
        return check(self, lhs, rhs, *rules, **more)

    return check_unless_alike


def _shortened_broadcasts(core: Any, broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """`broadcast_impl_value`, which compares sizes as numbers, and makes what it returns alone."""

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        sizes = [one.type.shape.values if one.type.is_block() else [] for one in (lhs, rhs)]
        if not all(sizes):
            block = lhs.type if sizes[0] else rhs.type
            return tuple(fill(self, one, block) for one in (lhs, rhs))
        if len(sizes[0]) != len(sizes[1]):
            return broadcast(self, lhs, rhs)
        wanted = [b if a == 1 else a for a, b in zip(*sizes, strict=True)]
        if any(b not in (1, size) for b, size in zip(sizes[1], wanted, strict=True)):
            return broadcast(self, lhs, rhs)  # which is an error
        return tuple(
            one if its == wanted else stretch(self, one, wanted)
            for one, its in zip((lhs, rhs), sizes, strict=True)
        )

    def fill(self: Any, one: Any, block: Any) -> Any:
        if one.type.is_block():
            return one
        filled = block.with_element_ty(one.dtype)
        return self.tensor(self.builder.create_splat(filled, one.handle), filled)

    def stretch(self: Any, one: Any, sizes: list[int]) -> Any:
        stretched = core.block_type(one.dtype, sizes)
        return self.tensor(self.builder.create_broadcast(one.handle, sizes), stretched)

    return broadcast_if_needed
