"""What debug mode says of a model's logits."""

from __future__ import annotations

import pytest
import torch

from nanovllm_core.errors import ModelOutputError
from nanovllm_core.worker.logits import check_logits

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("value", "shown"), [(NAN, "nan"), (INF, "inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_logit_that_is_nan_or_infinite_is_an_error_of_its_row(
    value: float, shown: str, dtype: torch.dtype
) -> None:
    logits = torch.zeros(3, 50, dtype=dtype)
    logits[1, 49] = value
    with pytest.raises(
        ModelOutputError, match=rf"step 9: .* 1 of 3 rows .*\(row 6: {shown}\)"
    ) as caught:
        check_logits(logits.amax(dim=1), torch.tensor([4, 6, 5]), step=9)
    assert caught.value.rows == (6,)


def test_padding_may_hold_anything() -> None:
    logits = torch.full((3, 5), NAN)
    check_logits(logits.amax(dim=1), torch.full((3,), -1), step=1)
    logits[1] = 0.0
    check_logits(logits.amax(dim=1), torch.tensor([-1, 2, -1]), step=1)


def test_some_ids_of_a_row_may_be_forbidden_but_not_all() -> None:
    logits = torch.full((1, 5), -INF)
    logits[0, 2] = -3.0
    check_logits(logits.amax(dim=1), torch.tensor([0]), step=1)
    logits[0, 2] = -INF
    with pytest.raises(ModelOutputError, match="row 0: -inf"):
        check_logits(logits.amax(dim=1), torch.tensor([0]), step=1)


def test_of_many_wrong_rows_the_first_are_named() -> None:
    with pytest.raises(ModelOutputError, match=r"row 7: nan\)") as caught:
        check_logits(torch.full((99,), NAN), torch.arange(99), step=1)
    assert len(caught.value.rows) == 99
