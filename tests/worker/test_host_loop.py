"""What a steady step may cost the host, counted in calls: the same on every machine.

Engine and worker are the real ones; a stand-in for the captured graph answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.host_step import MAX_ROWS, calls_per_step, decoding_engine, step_without_one
from nanovllm_core.engine import Engine
from nanovllm_core.worker import step_sampler
from nanovllm_core.worker.sampler import TailSampler

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


class InstantTail:
    """Stands for the captured tail of a kernel set."""

    def __init__(self, num_entries: int) -> None:
        self.logprobs = torch.zeros(num_entries, 64)

    def sample(self, *arguments: Tensor) -> None:
        """Only prompts run it here, as eager steps."""
        arguments[4].fill_(7)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        return {}


@pytest.fixture
def captured_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail is captured, as on CUDA."""

    def make(_kernels: Any, _sampler: Any, tables: Any, vocab_size: int, entries: int) -> Any:
        tail: Any = InstantTail(entries)
        return TailSampler(tail, len(tables.computed), vocab_size)

    monkeypatch.setattr(step_sampler, "make_captured_sampler", make)


@pytest.mark.usefixtures("captured_tail")
@pytest.mark.parametrize("batch", [1, MAX_ROWS])
def test_the_host_s_work_does_not_depend_on_who_asks(batch: int) -> None:
    """Not by a call; log-probabilities have an object for each row that asked."""
    asking = (
        {},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.1},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5},
        {"logit_bias": {3: 1.0}, "min_tokens": 500, "stop_token_ids": [4]},
        {"logprobs": 2},
    )
    calls = []
    for asked in asking:
        with decoding_engine(batch, **asked) as engine:
            calls.append(sum(calls_per_step(engine.step, 50)))
    plain, *cut, reported = calls
    assert cut == [plain] * 3
    assert plain + batch <= reported < plain + 60 + 8 * batch


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
