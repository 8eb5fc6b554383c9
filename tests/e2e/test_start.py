"""How an engine starts: where its time goes, and what it leaves to the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from .tiny import open_tiny, write_config


def test_a_start_says_where_its_time_went(tiny: Path) -> None:
    """The parts of `info.start_seconds` come in order and make up the start."""
    with open_tiny(tiny) as llm:
        info = llm.info
    assert list(info.start_seconds) == ["plan", "device", "model", "attention", "cache"]
    assert all(seconds > 0 for seconds in info.start_seconds.values())
    parts = sum(info.start_seconds.values()) - info.start_seconds["plan"]
    assert parts == pytest.approx(info.load_seconds)
    assert info.capture_seconds == 0


def test_a_collection_between_steps_need_not_look_at_what_the_start_made(tiny: Path) -> None:
    """A few hundred thousand objects are set aside until the engine is closed."""
    frozen = gc.get_freeze_count()
    with open_tiny(tiny):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() <= frozen


def test_engines_share_what_is_set_aside(tiny: Path) -> None:
    """The first to close leaves the other's objects alone."""
    with open_tiny(tiny):
        with open_tiny(tiny):
            pass
        assert gc.get_freeze_count() > 10_000


def test_what_the_program_set_aside_itself_stays(tiny: Path) -> None:
    """An engine does not undo another's gc.freeze."""
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        open_tiny(tiny).close()
        assert gc.get_freeze_count() >= before // 2 > 0
    finally:
        gc.unfreeze()


def test_a_start_imports_neither_transformers_nor_torchs_compiler(tmp_path: Path) -> None:
    """Each takes longer than the rest of a start."""
    folder = write_config(tmp_path / "model")
    code = (
        "import sys\n"
        "from nanovllm_core import LLM\n"
        f"LLM({str(folder)!r}, load_format='dummy', device='cpu').close()\n"
        "print(*[m for m in ('transformers', 'torch._dynamo', 'sympy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""
