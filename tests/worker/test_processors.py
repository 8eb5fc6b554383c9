"""Which rows a logits processor sees, and that it cannot reach the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from nanovllm_core.errors import PluginFailedError
from nanovllm_core.interfaces.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
)
from nanovllm_core.interfaces.plan import RowSampling
from nanovllm_core.interfaces.sampler import SamplerContext
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.worker import sampler_tail as sampler_module
from nanovllm_core.worker.logits import StepRows
from nanovllm_core.worker.masks import MaskTable
from nanovllm_core.worker.processors import LoadedProcessor, RowProcessors, run_processor
from nanovllm_core.worker.sampler import GumbelSampler
from nanovllm_core.worker.sampler_tail import SamplerTail

from .tail_step import tail_step

CPU = torch.device("cpu")
VOCAB = 11


class Amount(BaseModel):
    model_config = ConfigDict(extra="forbid")
    amount: float


class Add(LogitsProcessor):
    """Adds what the request asks; remembers which rows came together."""

    def __init__(self) -> None:
        super().__init__(
            NoOptions(),
            LogitsContext(
                device=CPU, vocab_size=VOCAB, max_model_len=8, max_num_seqs=4, tokenizer=""
            ),
        )
        self.seen: list[list[float]] = []

    def prepare(self, arguments: BaseModel) -> object:
        assert isinstance(arguments, Amount)
        return arguments.amount

    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        self.seen.append([float(str(request.state)) for request in requests])
        for logits_V, request in zip(logits_SV, requests, strict=True):
            logits_V += float(str(request.state))


def loaded() -> LoadedProcessor:
    return LoadedProcessor("add", Amount, Add())


def asking(amount: float, name: str = "add", **fields: Any) -> RowSampling:
    return RowSampling(logits_processors=((name, {"amount": amount}),), **fields)


def run(one: LoadedProcessor, logits: Tensor, which: list[int], rows: list[int]) -> None:
    """Run a processor on some rows of `logits`, which have three ids each."""
    size = len(logits)
    lengths = torch.full((size,), 3)
    step = StepRows(
        torch.arange(size), torch.ones(size), lengths, lengths, lengths, torch.zeros(6, 8).int()
    )
    run_processor(one, rows, logits, step, torch.tensor(which))


def test_rows_that_did_not_ask_keep_every_bit() -> None:
    one = loaded()
    rows = RowProcessors({"add": one})
    for row in (5, 2):
        rows.admit(row, asking(row).logits_processors)
    logits = torch.randn(4, VOCAB)
    logits[1, 3] = -torch.inf
    before = logits.clone()
    run(one, logits, [3, 0], [5, 2])
    assert torch.equal(logits[1:3], before[1:3])
    assert torch.equal(logits[3], before[3] + 5)
    assert torch.equal(logits[0], before[0] + 2)


def test_a_row_that_changes_hands_forgets_what_was_asked() -> None:
    one = loaded()
    rows = RowProcessors({"add": one})
    rows.admit(3, asking(1.0).logits_processors)
    rows.admit(3, ())
    assert one.rows == {}
    rows.admit(3, asking(2.0).logits_processors)
    assert [state for _, state in one.rows.values()] == [2.0]


def test_processors_run_in_the_order_of_the_engine_not_of_the_request() -> None:
    first, second = loaded(), loaded()
    rows = RowProcessors({"first": first, "second": second})
    both = (("second", {"amount": 1.0}), ("first", {"amount": 2.0}))
    assert [one for one, _ in rows.asked_of([(), both])] == [first, second]
    assert [where for _, where in rows.asked_of([both, (), both[:1]])] == [[0], [0, 2]]
    assert rows.asked_of([(), ()]) == []


@pytest.mark.parametrize("amount", [float("nan"), float("inf")])
def test_debug_mode_refuses_nan_and_inf(amount: float) -> None:
    """Elsewhere nobody looks: to look would wait for the device."""
    one = loaded()
    RowProcessors({"add": one}).admit(0, asking(amount).logits_processors)
    run(one, torch.zeros(1, VOCAB), [0], [0])
    one.checks = True
    with pytest.raises(PluginFailedError, match=r"add: process made a logit NaN or \+inf"):
        run(one, torch.zeros(1, VOCAB), [0], [0])


def test_debug_mode_takes_rows_with_and_without_forbidden_ids() -> None:
    one = loaded()
    one.checks = True
    rows = RowProcessors({"add": one})
    for row in (0, 1):
        rows.admit(row, asking(2.0).logits_processors)
    logits = torch.zeros(2, VOCAB)
    logits[1, 1:] = -torch.inf
    run(one, logits, [0, 1], [0, 1])
    assert logits[0].tolist() == [2.0] * VOCAB
    assert logits[1].tolist() == [2.0, *[-float("inf")] * (VOCAB - 1)]


def test_debug_mode_blames_no_processor_for_what_the_model_gave() -> None:
    """A processor may go on with +inf as it likes; -inf is what others forbade."""
    one = loaded()
    one.checks = True
    RowProcessors({"add": one}).admit(0, asking(2.0).logits_processors)
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = float("inf"), -float("inf")
    run(one, logits, [0], [0])
    assert logits[0, 5] == 2.0


@pytest.mark.parametrize("group", [1, 2, 4])
def test_groups_of_rows_that_fit_in_memory_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """With less memory a processor is called for some rows at a time, each row once."""
    row_bytes = VOCAB * sampler_module.logit_ops.BYTES_PER_CHANGED_LOGIT
    row_bytes += 8 * sampler_module.logit_ops.BYTES_PER_KNOWN_ID
    monkeypatch.setattr(sampler_module, "TRANSIENT_BYTES", group * row_bytes)
    one = loaded()
    processors = RowProcessors({"add": one})
    params = [asking(4.0), RowSampling(), asking(2.0, temperature=1.0), asking(0.0)]
    for row, sampling in enumerate(params):
        processors.admit(row, sampling.logits_processors)
    context = SamplerContext(device=CPU, vocab_size=VOCAB, max_entries=4)
    sampler = GumbelSampler(NoOptions(), context)
    tail = SamplerTail(CPU, VOCAB, sampler, processors, MaskTable(8, VOCAB, CPU))
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    before, alone = logits.clone(), torch.empty(4, dtype=torch.int32)
    ints = torch.arange(4, dtype=torch.int32)
    temperature = torch.tensor([one.temperature for one in params])
    never = torch.zeros(1, dtype=torch.int32)
    sampler.sample(logits, ints, temperature, ints.long(), ints, alone, never)
    out = alone.clone()
    step = tail_step(ints, ints + 4, ints, torch.zeros(4, 8).int(), temperature, ints.long())
    tail(logits, (0, 1, 2, 3), params, *step, out)
    # A constant added to all logits of a row changes no choice.
    assert torch.equal(out, alone)
    assert torch.equal(logits, before)
    processor = one.processor
    assert isinstance(processor, Add)
    assert sorted(state for call in processor.seen for state in call) == [0.0, 2.0, 4.0]
    assert max(map(len, processor.seen)) <= group
