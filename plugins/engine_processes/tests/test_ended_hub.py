"""A door whose hub has ended by a fault: its counters are no sign of life."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm_core.api import EngineClosedError
from nanovllm_core.frontend import EngineStats
from nanovllm_engine_processes.client import ProcessClient


def client_of(hub: Any) -> ProcessClient:
    client = ProcessClient.__new__(ProcessClient)
    client._hub = hub
    return client


def test_the_counters_of_a_hub_that_failed_raise_its_error() -> None:
    """The server's health asks for them: an engine that nobody can reach is not well."""
    fault = LookupError("a bug")
    hub = SimpleNamespace(is_open=False, error=fault, last_stats=EngineStats())
    with pytest.raises(EngineClosedError, match="LookupError") as caught:
        client_of(hub).stats()
    assert caught.value.__cause__ is fault


def test_the_counters_of_a_closed_door_are_its_last() -> None:
    last = EngineStats(steps=7)
    assert client_of(SimpleNamespace(is_open=False, error=None, last_stats=last)).stats() is last
