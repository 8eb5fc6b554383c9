"""The processor keeps the contract of logits processors, and its own promise."""

from __future__ import annotations

import pytest
import torch
from nanovllm_core.api import LogitsContext, LogitsRequest
from nanovllm_kit import (
    LogitsProcessorConformance,
    PluginUnderTest,
    plugin_under_test,
)
from torch import Tensor

from nanovllm_logits_processor_my_plugin import plugin as declared
from nanovllm_logits_processor_my_plugin import processor as code


class TestMyPlugin(LogitsProcessorConformance):
    # What rows ask for, in turns: two sets that differ, so that a row cannot get another's.
    arguments = ({"window": 2, "penalty": 1.5}, {"window": 64, "penalty": 0.5})

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(declared.SPEC)


def lowered(known: list[int], window: int, per_occurrence: bool) -> Tensor:
    """What a row of zeros becomes after these ids, at a penalty of 2."""
    processor = code.MyPluginProcessor(
        declared.EngineOptions(per_occurrence=per_occurrence),
        LogitsContext(
            device=torch.device("cpu"),
            vocab_size=6,
            max_model_len=8,
            max_num_seqs=1,
            tokenizer="",
        ),
    )
    # Behind the known ids stands what was there before.
    ids_L = torch.tensor(known + [-7] * (8 - len(known)), dtype=torch.int32)
    request = LogitsRequest(
        arguments=declared.RequestArguments(window=window, penalty=2.0),
        state=None,
        token_ids=ids_L,
        num_prompt=torch.tensor(1, dtype=torch.int32),
        num_known=torch.tensor(len(known), dtype=torch.int32),
    )
    logits_SV = torch.zeros(1, 6)
    processor.process(logits_SV, [request])
    return logits_SV[0]


def test_the_ids_in_the_window_are_lowered_and_no_others() -> None:
    """Five ids are known, the last three count."""
    assert lowered([1, 2, 3, 4, 3], window=3, per_occurrence=False).tolist() == [0, 0, 0, -2, -2, 0]


def test_an_id_may_be_lowered_for_each_occurrence() -> None:
    assert lowered([1, 2, 3, 4, 3], window=3, per_occurrence=True).tolist() == [0, 0, 0, -4, -2, 0]


def test_a_window_longer_than_the_row_takes_all_of_it() -> None:
    assert lowered([1, 2], window=99, per_occurrence=False).tolist() == [0, -2, -2, 0, 0, 0]
