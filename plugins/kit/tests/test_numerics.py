"""Comparisons report how far apart two tensors are, and where."""

from __future__ import annotations

import pytest
import torch

from nanovllm_kit.numerics import assert_close_report, relative_norm_error


def test_the_worst_element_is_named() -> None:
    """The message holds the norm error, the worst error and its index."""
    expected = torch.ones(4, 5)
    actual = expected.clone()
    actual[2, 3] = 1.5
    with pytest.raises(AssertionError, match=r"5\.000e-01.*\(2, 3\).*actual 1\.5, expected 1"):
        assert_close_report(actual, expected, rel_norm=1e-3)


def test_one_wrong_element_among_many_fails_by_its_absolute_error() -> None:
    """A norm averages; the bound on the worst element does not."""
    expected = torch.ones(100_000)
    actual = expected.clone()
    actual[7] = 2.0
    assert_close_report(actual, expected, rel_norm=1e-2)
    with pytest.raises(AssertionError, match=r"\(7,\)"):
        assert_close_report(actual, expected, rel_norm=1e-2, max_abs=0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_never_pass(value: float) -> None:
    """Not even where both tensors hold the same one."""
    tensor = torch.tensor([1.0, value])
    with pytest.raises(AssertionError, match=r"not finite.*\(1,\)"):
        assert_close_report(tensor, tensor, rel_norm=1e9, max_abs=1e9)


def test_shapes_must_be_equal() -> None:
    """Broadcasting would hide an error."""
    with pytest.raises(AssertionError, match=r"shape \(1, 3\), expected \(2, 3\)"):
        assert_close_report(torch.ones(1, 3), torch.ones(2, 3), rel_norm=1.0)


def test_the_norm_error_is_relative_to_the_expected_tensor() -> None:
    """And absolute where the expected tensor is zero."""
    assert relative_norm_error(torch.tensor([3.0]), torch.tensor([2.0])) == 0.5
    assert relative_norm_error(torch.tensor([3.0]), torch.tensor([0.0])) == 3.0
