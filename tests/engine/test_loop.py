"""Requests run to the end, at any depth, with the tokens that their ids alone decide."""

from __future__ import annotations

import pytest

from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.engine_harness import Harness, Setting

DEPTHS = (0, 1, 2, 3)


@pytest.mark.parametrize("steps_ahead", DEPTHS)
def test_tokens_do_not_depend_on_how_far_ahead_the_host_works(steps_ahead: int) -> None:
    """Depths 0 to 3 give the reference's tokens, and so each other's."""
    harness = Harness(Setting(steps_ahead=steps_ahead, eos_token_ids=(3,)))
    for i in range(9):
        harness.add(
            f"r{i}", list(range(1, 4 + 3 * i)), SamplingParams(temperature=0, max_tokens=20)
        )
    harness.run()
    harness.check_all()
    assert harness.executor.most_in_flight == steps_ahead + 1
