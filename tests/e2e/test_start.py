"""How an engine starts: where its time goes, and what it leaves to the garbage collector."""

from __future__ import annotations

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
    assert info.kernels.startswith("torch ")
    assert f"kernels: {info.kernels}" in info.choices


def printed(folder: Path, code: str) -> list[str]:
    """What a process of its own prints; `start()` there opens an engine."""
    head = (
        "import gc, sys\n"
        "from nanovllm_core import LLM\n"
        f"def start(): return LLM({str(folder)!r}, load_format='dummy', device='cpu')\n"
    )
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_a_collection_between_steps_need_not_look_at_what_the_start_made(tmp_path: Path) -> None:
    """Its objects are set aside until the engine is closed."""
    code = (
        "llm = start(); print(gc.get_freeze_count() > 10_000)\n"
        "llm.close(); print(gc.get_freeze_count())"
    )
    assert printed(write_config(tmp_path / "model"), code) == ["True", "0"]


@pytest.mark.slow
def test_engines_share_what_is_set_aside(tmp_path: Path) -> None:
    """The first to close leaves the other's objects alone; the last takes all back."""
    code = (
        "one = start(); start().close(); print(gc.get_freeze_count() > 10_000)\n"
        "one.close(); print(gc.get_freeze_count())"
    )
    assert printed(write_config(tmp_path / "model"), code) == ["True", "0"]


@pytest.mark.parametrize("before", ["pass", "gc.freeze()", "other = start()"])
def test_what_a_closing_engine_drops_is_collected(tmp_path: Path, before: str) -> None:
    """Cycles too, whatever else set them aside: the interpreter (3.12), the program, an engine."""
    code = (
        "import weakref\n"
        "class Cycle: pass\n"
        f"{before}\n"
        "cycle = Cycle(); cycle.itself = cycle\n"
        "llm = start(); llm.engine._executor._worker._runner.cycle = cycle\n"
        "gone = weakref.ref(cycle); del cycle; llm.close(); print(gone() is None)"
    )
    assert printed(write_config(tmp_path / "model"), code) == ["True"]


def test_an_engine_for_event_loops_has_imported_what_applies_a_chat_template() -> None:
    """So no conversation stops a loop for a second; other text needs none of it."""
    code = (
        "import sys; from nanovllm_core import AsyncLLM, LLM\n"
        "LLM('demo', device='cpu').close(); print('transformers' in sys.modules)\n"
        "AsyncLLM('demo', device='cpu').close(); print('transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == ["False", "True"]


def test_a_start_imports_neither_transformers_nor_torchs_compiler(tmp_path: Path) -> None:
    """Each takes longer than the rest of a start."""
    code = (
        "start().close()\n"
        "print(*[m for m in ('transformers', 'torch._dynamo', 'sympy') if m in sys.modules])"
    )
    assert printed(write_config(tmp_path / "model"), code) == []
