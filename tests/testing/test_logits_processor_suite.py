"""The suite of logits processors catches what processors are often written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.errors import ConfigError
from nanovllm_core.interfaces.logits_processor import LogitsProcessor, LogitsRequest
from nanovllm_core.interfaces.specs import LogitsProcessorSpec, NoOptions
from nanovllm_core.testing import LogitsProcessorConformance, PluginUnderTest
from nanovllm_core.testing.logits_processor import OUTPUTS, VOCAB, write_tokenizer
from nanovllm_core.tokenizer import Tokenizer

Process = Callable[[Tensor, Sequence[LogitsRequest]], Any]


class Nothing(BaseModel):
    """No arguments."""


ASKED: list[BaseModel] = [Nothing() for _ in OUTPUTS]


class Processor(LogitsProcessor):
    """Does as it is told."""

    def __init__(self, does: Process) -> None:
        self._does = does

    def prepare(self, arguments: BaseModel) -> None:
        return None

    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        return self._does(logits_SV, requests)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "wait",
    [
        lambda logits, requests: requests[0].token_ids.tolist(),
        lambda logits, requests: requests[0].token_ids.cpu(),
        lambda logits, requests: requests[0].token_ids.numpy(),
        lambda logits, requests: int(requests[0].num_known),
        lambda logits, requests: requests[0].num_known.item(),
        lambda logits, requests: bool(requests[0].num_known > 3),
        lambda logits, requests: torch.unique(requests[0].token_ids),
        lambda logits, requests: torch.bincount(requests[0].token_ids.clamp(min=0)),
        lambda logits, requests: logits[logits > 0],
        lambda logits, requests: logits.nonzero(),
    ],
    ids=["tolist", "cpu", "numpy", "int", "item", "bool", "unique", "bincount", "mask", "nonzero"],
)
def test_reading_a_value_on_the_host_is_caught(wait: Process) -> None:
    """On a CPU some of these are no operation at all."""
    suite = LogitsProcessorConformance()
    with pytest.raises(AssertionError, match="waits for the device"):
        suite.test_it_does_not_wait_for_the_device(Processor(wait), ASKED)


def test_work_on_the_device_does_not_wait() -> None:
    suite = LogitsProcessorConformance()
    suite.test_it_does_not_wait_for_the_device(
        Processor(lambda logits, requests: logits.where(logits > 0, 0).sum()), ASKED
    )


def test_the_suite_s_tokenizer_writes_any_text_in_ids_of_the_suite_s_vocabulary(
    tmp_path: Path,
) -> None:
    """For whoever reads the folder: the engine's own tokenizer, or transformers."""
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    ours = Tokenizer.load(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert ours.vocab_size == len(theirs) == VOCAB
    assert ours.eos_token_ids == (theirs.eos_token_id,) == (VOCAB - 1,)
    for text in (" fox", "Mia\n", "naïve 狐"):
        assert ours.decode(ours.encode(text)) == text
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)


def test_stated_arguments_that_no_request_may_ask_are_an_error() -> None:
    """A skip would hide that nothing was tested."""

    class Suite(LogitsProcessorConformance):
        arguments = ({"bias": 1},)

    spec = LogitsProcessorSpec(name="plain", impl="a:B", contract=1)
    plugin = PluginUnderTest(spec, NoOptions(), "a")
    with pytest.raises(ConfigError, match=r"arguments\.bias: unknown option"):
        Suite.asked.__wrapped__(Suite(), plugin)  # type: ignore[attr-defined]


def test_logits_that_are_returned_and_not_changed_are_caught() -> None:
    suite = LogitsProcessorConformance()
    with pytest.raises(AssertionError, match="process returned Tensor, which is ignored"):
        suite.test_rows_are_changed_in_place(Processor(lambda logits, requests: logits - 1), ASKED)


def test_a_processor_that_changes_nothing_proves_nothing() -> None:
    suite = LogitsProcessorConformance()
    with pytest.raises(pytest.skip.Exception, match="state `arguments`"):
        suite.test_rows_are_changed_in_place(Processor(lambda logits, requests: None), ASKED)
