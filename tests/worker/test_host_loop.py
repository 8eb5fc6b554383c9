"""What a steady step may cost the host, counted in calls: the same on every machine.

Engine and worker are the real ones; a stand-in for the captured graph answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.host_step import MAX_ROWS, calls_per_step, decoding_engine, step_without_one
from nanovllm_core.engine import Engine

pytest.importorskip("nanovllm_model_qwen3", reason="needs the plugin model_qwen3")
pytest.importorskip("nanovllm_attention_sdpa", reason="needs the plugin attention_sdpa")


@pytest.fixture
def full_engine() -> Iterator[Engine]:
    with decoding_engine(MAX_ROWS) as engine:
        yield engine


def test_a_steady_step_makes_less_than_100_calls_at_any_batch() -> None:
    """Python and C functions together; 256 rows cost no more than a tenth above one row."""
    calls = {}
    for batch in (1, MAX_ROWS):
        with decoding_engine(batch) as engine:
            calls[batch] = sum(calls_per_step(engine.step, 100))
    assert calls[MAX_ROWS] < 100
    assert calls[MAX_ROWS] <= 1.1 * calls[1]


def test_a_step_with_sixteen_new_blocks_makes_less_than_300_python_calls() -> None:
    """Blocks of 16 and 256 rows at different places in them: 16 to append, 16 to publish."""
    with decoding_engine(MAX_ROWS, block_size=16, stagger=True) as engine:
        free = engine.stats.free_blocks
        calls, _ = calls_per_step(engine.step, 96)
        assert free - engine.stats.free_blocks > 90 * 16
    assert calls < 300


def test_a_row_that_leaves_costs_less_than_300_calls(full_engine: Engine) -> None:
    """What changes is planned and sent anew for all rows, but not row by row."""
    calls, c_calls = calls_per_step(lambda: step_without_one(full_engine), 50)
    assert full_engine.stats.running == MAX_ROWS - 50
    assert calls + c_calls < 300


def test_most_steps_of_staggered_rows_bring_no_block() -> None:
    """Rows that need a block soon get it with one that needs it now: one copy for many steps."""
    with decoding_engine(MAX_ROWS, block_size=64, stagger=True) as engine:
        before, with_blocks = engine.stats.free_blocks, 0
        for _ in range(128):
            engine.step()
            with_blocks += engine.stats.free_blocks != before
            before = engine.stats.free_blocks
    assert 0 < with_blocks <= 9, "a quarter of the rows at a time"
