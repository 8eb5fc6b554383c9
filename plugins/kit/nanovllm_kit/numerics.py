"""Comparison of tensors that says how far apart they are."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_norm_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64 (the plain norm where expected is zero)."""
    difference = float((actual.double() - expected.double()).norm())
    scale = float(expected.double().norm())
    return difference / scale if scale > 0 else difference


def assert_close_report(
    actual: Tensor, expected: Tensor, *, rel_norm: float, max_abs: float | None = None
) -> None:
    """Fail unless `actual` is near `expected`; the message names the worst element.

    `rel_norm` bounds the relative norm error, `max_abs` (None: unbounded) the absolute error of any
    element. Shapes must be equal; dtypes and devices may differ. A NaN or an infinity in either
    tensor never passes, since neither has a finite error; two empty tensors pass.
    """
    __tracebackhide__ = True
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    for name, tensor in (("actual", actual), ("expected", expected)):
        bad = (~tensor.isfinite()).nonzero()
        if len(bad):
            where = tuple(bad[0].tolist())
            raise AssertionError(
                f"{name} has {len(bad)} of {tensor.numel()} elements not finite, first "
                f"{tensor[where].item()} at {where}"
            )
    if actual.numel() == 0:
        return
    error = (actual - expected).abs()
    where = tuple(i.item() for i in torch.unravel_index(error.argmax(), error.shape))
    worst, norm_error = error[where].item(), relative_norm_error(actual, expected)
    if norm_error <= rel_norm and (max_abs is None or worst <= max_abs):
        return
    raise AssertionError(
        f"relative norm error {norm_error:.3e} (limit {rel_norm:.3e}), worst element error "
        f"{worst:.3e} (limit {'none' if max_abs is None else f'{max_abs:.3e}'}) at {where}: "
        f"actual {actual[where].item():.6g}, expected {expected[where].item():.6g}"
    )
