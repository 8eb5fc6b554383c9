"""`make bench-gpu`: a committed throughput measured again fails where it became slower."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core.errors import ConfigError

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "remeasure.py"))


def record(rate: float, attention: str = "triton 3.6.0") -> dict[str, Any]:
    return {
        "benchmark": "throughput",
        "workload": "nano",
        "attention": attention,
        "tokens_per_second": rate,
        "roofline": {"share": 0.5},
        "config": {"model": "demo", "a_field_of_another_version": 1},
    }


@pytest.mark.parametrize("attention", ["triton 3.6.0", "triton 3.7.1"])
@pytest.mark.parametrize(("rate", "passes"), [(96.0, True), (94.0, False)])
def test_slower_by_more_than_a_twentieth_fails(rate: float, passes: bool, attention: str) -> None:
    """Whatever version ran: one that is slower is what the check is for."""
    assert SCRIPT["compare"]("nano", record(100.0), record(rate, attention)) is passes


@pytest.mark.parametrize(
    ("changed", "said"),
    [({}, "of another version"), ({"benchmark": "latency"}, "a record of 'latency'")],
)
def test_a_file_that_cannot_be_repeated_says_why(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SCRIPT["measure_again"](record(1.0) | changed, 1)
