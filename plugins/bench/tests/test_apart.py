"""A measurement in a process of its own: what it returns, and what it raises."""

from __future__ import annotations

import os

import pytest

from nanovllm_bench.apart import run_apart
from nanovllm_core.errors import ConfigError, shown


def refuse(value: str) -> None:
    raise ConfigError(f"no {shown(value)} here")


def test_what_runs_apart_returns_from_another_process() -> None:
    assert run_apart(os.getpid) != os.getpid()


def test_an_error_of_another_process_keeps_its_type_and_text() -> None:
    with pytest.raises(ConfigError, match="no 'roof' here"):
        run_apart(refuse, "roof")
