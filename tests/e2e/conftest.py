"""Checkpoints and engines that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm_core import LLM

from .tiny import Reference, open_tiny, write_checkpoint

for plugin in ("model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random checkpoint; prompts are token ids."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    """What the tiny checkpoint must answer."""
    return Reference.of(tiny)


@pytest.fixture(scope="session")
def shared_engine(tiny: Path) -> Iterator[LLM]:
    """One engine on the tiny checkpoint, for tests that leave nothing behind but cached blocks."""
    with open_tiny(tiny) as llm:
        yield llm


@pytest.fixture(scope="session")
def demo() -> Iterator[LLM]:
    """The embedded model, for tests of text."""
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")
    with LLM("demo", device="cpu", attention="sdpa", max_model_len=256, max_num_seqs=64) as llm:
        yield llm
