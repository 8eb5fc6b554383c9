"""The command shows what `auto` chose to somebody who watches."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from nanovllm_core.cli import engine_options
from nanovllm_core.config.sources import load_config
from nanovllm_core.frontend.llm import LLM


@pytest.mark.parametrize(("watched", "level"), [(True, logging.INFO), (False, logging.NOTSET)])
def test_choices_are_logged_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, watched: bool, level: int
) -> None:
    """Pipes and logs stay quiet."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: watched)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(LLM, "from_config", lambda config: None)
    logger = logging.getLogger("nanovllm_core")
    before = logger.level
    try:
        engine_options.open_llm(load_config("demo"))
        assert logger.level == level
    finally:
        logger.setLevel(before)
