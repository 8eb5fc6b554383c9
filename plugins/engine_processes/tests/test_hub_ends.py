"""Engines that end together, over the simulated engines of `test_hub`."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from nanovllm_core.frontend import NewRequest
from nanovllm_engine_processes import EngineLoad, hub as hub_module
from nanovllm_engine_processes.plugin import ProcessesOptions

from .test_hub import RandomRouter, Simulation


class FirstRouter(RandomRouter):
    """The first engine that runs, as far as the hub knows."""

    def choose(self, request: NewRequest, loads: Mapping[int, EngineLoad]) -> int:
        return min(loads)


@pytest.mark.parametrize("ends", [[("die together", 0)], [("fail", 0), ("fail", 1)]])
def test_a_request_is_not_run_again_on_an_engine_that_has_ended_too(
    ends: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines that end together cost it one of its reruns, whichever of them it was on."""
    monkeypatch.setattr(hub_module, "LOOK_SECONDS", -1.0)
    simulation = Simulation([("add", 0), ("step", 0), *ends], Random(0))
    simulation.hub._options = ProcessesOptions(max_reruns=1)
    simulation.hub._router = FirstRouter(Random(0))
    simulation.hub._serve(simulation)  # type: ignore[arg-type]
    assert sorted(simulation.engines) == [2, 3]
    assert simulation.calls
    for call in simulation.calls:
        assert call.error is None
        assert len(call.last) == call.request.params.n
        assert {one.finish_reason for one in call.last.values()} <= {"length", "stop"}
