"""Engines that the tests share: one on a thread, and two in processes, of one model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core import LLM

pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")
pytest.importorskip("nanovllm_model_qwen3", reason="needs the plugin model_qwen3")

SETTINGS: dict[str, Any] = {
    "model": "demo",
    "device": "cpu",
    "attention": "sdpa",
    "max_model_len": 512,
    "max_num_seqs": 16,
}


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    """What all engines of the tests are started with."""
    return SETTINGS


@pytest.fixture(scope="session")
def thread() -> Iterator[LLM]:
    """The engine on a thread, whose answers are the expected ones."""
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="session")
def two() -> Iterator[LLM]:
    """Two engines behind one door, for tests that leave them running."""
    with LLM(**SETTINGS, data_parallel_size=2) as llm:
        yield llm


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Path]]]:
    """Lists the folders of sockets in a place for temporary files that is this test's alone."""
    with tempfile.TemporaryDirectory() as place:  # its path is short, as a socket's must be
        monkeypatch.setattr(tempfile, "tempdir", place)
        monkeypatch.setenv("TMPDIR", place)
        yield lambda: [*Path(place).glob("nanovllm-engines-*")]
