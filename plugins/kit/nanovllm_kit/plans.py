"""Plans written by hand, for tests of workers and executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nanovllm_core.interfaces.plan import StepPlan


def decode_plan(rows: Sequence[int], epoch: int = 1, **work: Any) -> StepPlan:
    """A step of these decoding rows, the first of its epoch; `work` are further fields."""
    listed = np.array(rows, np.int32)
    return StepPlan(epoch=epoch, num_decode=len(rows), decode_rows=listed, **work)
