"""Calls of a kernel set's operations, watched, and the reference beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import KernelSet, LatentPrep, QKPrep
from nanovllm_core.kernels import TorchKernels
from nanovllm_kit.numerics import assert_close_report

REL_NORM = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""How far a result may be from the reference, by dtype: another order of the sums."""
REFERENCE = TorchKernels()
WRITTEN = ("out_TX", "residual_TE", "k_cache_NPKD", "v_cache_NPKD", "cache_NPR")
"""The parameters that an operation writes to; it leaves all others as they are."""


def random(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def run(kernels: KernelSet, name: str, *arguments: Any) -> Tensor:
    """What an operation returns: memory of its own, with all inputs left as they were."""
    inputs = {key: x for key, x in named_tensors(name, *arguments) if key not in WRITTEN}
    before = {key: x.clone() for key, x in inputs.items()}
    result: Tensor = getattr(kernels, name)(*arguments)
    assert isinstance(result, Tensor), f"{name} returned {type(result).__name__}"
    for key, x in inputs.items():
        assert torch.equal(x, before[key]), f"{name} changed {key}"
        alias = result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert not alias, f"{name} returned memory of {key}"
    return result


def named_tensors(name: str, *arguments: Any) -> Iterator[tuple[str, Tensor]]:
    """An operation's tensors by the names of its parameters, and those of a preparation."""
    parameters = [*signature(getattr(TorchKernels, name)).parameters][1:]
    for key, value in zip(parameters, arguments, strict=False):
        if isinstance(value, QKPrep | LatentPrep):
            stated = ((field.name, getattr(value, field.name)) for field in fields(value))
            yield from ((name, part) for name, part in stated if isinstance(part, Tensor))
        elif isinstance(value, Tensor):
            yield key, value


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Of one dtype, and equal up to the order of the sums."""
    assert actual.dtype == expected.dtype
    assert_close_report(actual, expected, rel_norm=REL_NORM[expected.dtype])
