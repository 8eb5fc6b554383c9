"""The captured tail gives the eager tail's tokens and log-probabilities, whatever rows ask for.

Kernels are interpreted on a CPU, with small tiles so that few ids have many splits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

from nanovllm_core import SamplingParams
from nanovllm_core.frontend import RequestOutput
from nanovllm_core.interfaces.plan import MAX_DEVICE_STOP_IDS, Admission, RowSampling
from nanovllm_core.interfaces.sampler import SamplerContext
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.interfaces.tail import MAX_ROW_BIASES, MAX_ROW_LOGPROBS, RowColumn
from nanovllm_core.worker import step_sampler
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.masks import MaskTable
from nanovllm_core.worker.processors import RowProcessors
from nanovllm_core.worker.results import LogprobTensors
from nanovllm_core.worker.rows import RowTables, RowUpdates, is_captured, pack_parameters
from nanovllm_core.worker.rows_reference import scatter_updates
from nanovllm_core.worker.sampler import (
    CapturedSampler,
    GumbelSampler,
    TailSampler,
    tail_tables,
)
from nanovllm_core.worker.sampler_tail import SamplerTail

from ..e2e.tiny import open_tiny, write_checkpoint
from .row_sampling import row_sampling

captured_tail = pytest.importorskip(
    "nanovllm_kernels_triton.captured_tail", reason="needs the plugin kernels_triton and Triton"
)
pytest.importorskip("nanovllm_attention_sdpa", reason="needs the plugin attention_sdpa")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_LEN = 64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(captured_tail, "TILE", 128)
        monkeypatch.setattr(captured_tail, "MAX_SPLITS", 4)


class Desk:
    """Row tables, both tails on them, and rows that take requests, grow and sample."""

    def __init__(self, vocab: int, num_rows: int) -> None:
        self.vocab = vocab
        self.tables = RowTables.allocate(num_rows, MAX_LEN, 16, DEVICE)
        self.updates = RowUpdates(self.tables)
        context = SamplerContext(device=DEVICE, vocab_size=vocab, max_entries=2 * num_rows)
        self.sampler = GumbelSampler(NoOptions(), context)
        masks = MaskTable(num_rows, vocab, DEVICE)
        self.eager = SamplerTail(DEVICE, vocab, self.sampler, RowProcessors({}), masks)
        tail = captured_tail.TritonTail(tail_tables(self.tables), vocab, 2 * num_rows)
        self.captured = TailSampler(tail, num_rows, vocab)
        self.sampling = [RowSampling()] * num_rows
        self.ids: list[list[int]] = [[]] * num_rows
        self.skip = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def admit(self, row: int, sampling: RowSampling, ids: list[int], num_prompt: int) -> None:
        self.sampling[row], self.ids[row] = sampling, list(ids)
        self.captured.admit(row, sampling)
        self.updates.admit(
            Admission(
                row=row,
                token_ids=np.array(ids, np.int32),
                num_prompt_tokens=num_prompt,
                num_computed=0,
                block_ids=np.zeros((1, 1), np.int32),
                max_length=MAX_LEN,
                sampling=sampling,
            )
        )
        scatter_updates(self.tables.arena, torch.from_numpy(self.updates.take()).to(DEVICE))

    def append(self, row: int, token: int) -> None:
        self.tables.token_ids[row, len(self.ids[row])] = token
        self.ids[row].append(token)

    def inputs(self, rows: list[int], finished: set[int]) -> StepInputs:
        inputs = StepInputs.allocate(len(rows), len(rows), 1, DEVICE)
        live = [-1 if i in finished else row for i, row in enumerate(rows)]
        known = [len(self.ids[row]) for row in rows]
        inputs.rows.copy_(torch.tensor(live, dtype=torch.int32))
        inputs.seq_lens.copy_(torch.tensor(known, dtype=torch.int32))
        inputs.output_index.copy_(inputs.seq_lens - self.tables.num_prompt[rows])
        return inputs

    def both(
        self, logits: Tensor, rows: list[int], finished: set[int] = frozenset()
    ) -> tuple[list[int], dict[int, Any], list[int], dict[int, Any]]:
        """Tokens and log-probabilities of the captured tail, then of the eager one."""
        inputs, tables = self.inputs(rows, finished), self.tables
        ours = torch.full((len(rows),), -7, dtype=torch.int32, device=DEVICE)
        theirs = ours.clone()
        self.captured.sample(logits, inputs, ours, self.skip)
        choice = (logits, inputs.rows, tables.temperature, tables.seed, inputs.output_index)
        self.sampler.sample(*choice, theirs, self.skip)
        eager = self.eager(
            logits,
            rows,
            [self.sampling[row] for row in rows],
            inputs,
            tables,
            theirs,
        )
        captured = self.captured.logprobs(np.array(rows))
        return ours.tolist(), records(captured), theirs.tolist(), records(eager)

    def check(self, logits: Tensor, rows: list[int], finished: set[int] = frozenset()) -> list[int]:
        """Both agree (NaN where a row has no id above -inf); returns the tokens."""
        ours, captured, theirs, eager = self.both(logits, rows, finished)
        assert ours == theirs, [self.sampling[row] for row in rows]
        assert captured.keys() == eager.keys()
        for entry in captured.keys() - finished:
            one, other = captured[entry], eager[entry]
            assert one.token_logprob == pytest.approx(other.token_logprob, abs=1e-5, nan_ok=True)
            values = [value for _, value in one.top]
            assert values == pytest.approx([value for _, value in other.top], abs=1e-5, nan_ok=True)
            # Of equal logits either may come first.
            for token, value in one.top:
                exact = (
                    logits[entry]
                    .float()
                    .nan_to_num(-math.inf, math.inf, -math.inf)
                    .log_softmax(0)[token]
                )
                assert value == pytest.approx(float(exact), abs=1e-5, nan_ok=True)
        return ours


def records(tensors: Sequence[LogprobTensors]) -> dict[int, Any]:
    return {k: v for part in tensors for k, v in part.to_host().to_records().items()}


# Without shrinking: an example takes long, and says what it drew.
@settings(max_examples=12, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_mix_of_rows_gets_the_eager_tails_tokens(data: st.DataObject) -> None:
    """Over steps in which rows grow and change hands, with ties, forbidden ids and NaN."""
    vocab = data.draw(st.sampled_from([1, 7, 128, 257, 1000]), "vocab")
    num_rows = data.draw(st.integers(1, 4), "rows")
    desk, choose = Desk(vocab, num_rows), data.draw(st.randoms(use_true_random=False))
    generator = torch.Generator().manual_seed(choose.getrandbits(32))

    def admit(row: int) -> None:
        ids = [choose.randrange(min(vocab, 30)) for _ in range(choose.randint(1, 40))]
        desk.admit(row, data.draw(row_sampling(vocab)), ids, choose.randint(1, len(ids)))

    for row in range(num_rows):
        admit(row)
    for _ in range(2):
        rows = choose.sample(range(num_rows), choose.randint(1, num_rows))
        finished = {i for i in range(len(rows)) if choose.random() < 0.1}
        logits = torch.randn(len(rows), vocab, generator=generator)
        match data.draw(st.sampled_from(["free", "bfloat16", "ties", "equal", "broken"])):
            case "free":
                logits *= 5
            case "bfloat16":
                logits = (3 * logits).bfloat16()
            case "ties":
                logits = (2 * logits).round()
            case "equal":
                logits.fill_(0.5)
            case "broken":
                logits[:, ::3] = -math.inf
                logits[0, 1:] = math.nan
        desk.check(logits.to(DEVICE), rows, finished)
        for i, row in enumerate(rows):
            if choose.random() < 0.3:
                admit(row)
            elif i not in finished:
                desk.append(row, choose.randrange(min(vocab, 30)))


@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_a_logit_that_overflowed_is_the_token(min_p: float) -> None:
    """As where nothing is cut; there are no log-probabilities then."""
    desk = Desk(5, 1)
    cut: dict[str, Any] = {"temperature": 0.2, "top_k": 2, "top_p": 0.9, "min_p": min_p}
    desk.admit(0, RowSampling(seed=1, **cut), [1, 2], 1)
    logits = torch.zeros(1, 5)
    logits[0, 3] = math.inf
    assert desk.check(logits.to(DEVICE), [0]) == [3]


def test_candidates_that_lie_in_few_lanes_are_all_found() -> None:
    """The likeliest ids one tile apart share a lane, and more of them than there are slots."""
    desk = Desk(1300, 3)
    cut: dict[str, Any] = {"temperature": 1.0, "top_k": 60, "logprobs": 20}
    for row in range(3):
        desk.admit(row, RowSampling(seed=row, **cut), [1, 2], 1)
    logits = torch.randn(3, 1300, generator=torch.Generator().manual_seed(5))
    logits[0, ::128] += 50
    logits[1, 3:900:2] += 50
    logits[2, 1000:1300] = 70.0
    desk.check(logits.to(DEVICE), [0, 1, 2])


def test_a_row_that_asks_for_nothing_gets_the_samplers_token_beside_any_other() -> None:
    desk = Desk(700, 2)
    desk.admit(0, RowSampling(temperature=0.8, seed=3), [1, 2, 3], 2)
    desk.admit(1, RowSampling(temperature=0.8, seed=3, repetition_penalty=2.0, top_k=3), [4], 1)
    logits = torch.randn(2, 700, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    alone = desk.check(logits[:1].contiguous(), [0])
    assert desk.check(logits, [0, 1])[:1] == alone


def test_counts_follow_a_row_through_requests_and_repeated_ids() -> None:
    """The same id many times in one prompt, then in the output; then another request."""
    desk = Desk(300, 1)
    asked = RowSampling(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.5)
    logits = torch.zeros(1, 300, device=DEVICE)
    logits[0, [10, 11, 12]] = torch.tensor([3.0, 2.9, 2.8], device=DEVICE)
    desk.admit(0, asked, [10] * 30 + [11] * 9, 35)
    assert desk.check(logits, [0]) == [12]
    for token in (12, 12, 12):
        desk.append(0, token)
    assert desk.check(logits, [0]) == [10]
    desk.admit(0, asked, [12], 1)
    assert desk.check(logits, [0]) == [10]


def test_nothing_is_written_while_an_eager_tail_follows() -> None:
    desk = Desk(100, 1)
    desk.admit(0, RowSampling(temperature=1.0, top_k=2, presence_penalty=1.0), [1, 2], 1)
    desk.skip.fill_(1)
    out = torch.full((1,), -7, dtype=torch.int32, device=DEVICE)
    desk.captured.sample(
        torch.zeros(1, 100, device=DEVICE), desk.inputs([0], set()), out, desk.skip
    )
    assert out.item() == -7
    assert desk.tables.parameters[0, RowColumn.COUNTED] == -1


def test_rows_that_the_tables_cannot_hold_need_the_eager_tail() -> None:
    """Processors, constraints, and more than there are places."""
    assert is_captured(RowSampling())
    everything = RowSampling(
        temperature=1.0,
        top_k=5,
        logprobs=MAX_ROW_LOGPROBS,
        min_tokens=3,
        stop_token_ids=tuple(range(MAX_DEVICE_STOP_IDS)),
        logit_bias=tuple((i, 1.0) for i in range(MAX_ROW_BIASES)),
    )
    assert is_captured(everything)
    for beyond in (
        {"constrained": True},
        {"logits_processors": (("name", {}),)},
        {"logprobs": MAX_ROW_LOGPROBS + 1},
        {"logit_bias": tuple((i, 1.0) for i in range(MAX_ROW_BIASES + 1))},
        {"min_tokens": 1, "stop_token_ids": tuple(range(MAX_DEVICE_STOP_IDS + 1))},
    ):
        assert not is_captured(RowSampling(**beyond))  # type: ignore[arg-type]
    assert is_captured(RowSampling(stop_token_ids=tuple(range(MAX_DEVICE_STOP_IDS + 1))))


@settings(max_examples=100, deadline=None)
@given(row_sampling(50))
def test_a_row_has_flags_or_log_probabilities_where_it_needs_a_tail(one: RowSampling) -> None:
    packed = pack_parameters(one)
    asks = packed[RowColumn.FLAGS] != 0 or packed[RowColumn.NUM_TOP] >= 0
    assert asks == one.needs_tail


PROMPTS = [[(7 * i + j) % 90 + 3 for j in range(20 + i)] for i in range(5)]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": 0.3, "min_p": 0.02},
    {"temperature": 0.9, "logit_bias": {9: -50, 40: 3.0}, "logprobs": 0, "top_k": 70},
]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu compares engines on a GPU")
@pytest.mark.parametrize("beyond", [False, True], ids=["captured", "beside a row that is not"])
def test_an_engine_gives_the_same_with_either_tail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, beyond: bool
) -> None:
    """Prompts in chunks, rows that are preempted and come again, and log-probabilities."""
    folder = write_checkpoint(tmp_path)
    many = {"stop_token_ids": list(range(9)), "min_tokens": 4, "logprobs": 2}
    asked = [*ASKED[:-1], many] if beyond else ASKED
    eager = generate(folder, asked)
    monkeypatch.setattr(step_sampler, "make_captured_sampler", make_interpreted)
    if not beyond:
        monkeypatch.setattr(SamplerTail, "__call__", never_called)
    for one, other in zip(generate(folder, asked), eager, strict=True):
        assert one.token_ids == other.token_ids
        assert numbers(one) == pytest.approx(numbers(other), abs=1e-5)


def make_interpreted(
    kernels: object, sampler: object, tables: RowTables, vocab: int, entries: int
) -> CapturedSampler:
    tail = captured_tail.TritonTail(tail_tables(tables), vocab, entries)
    return TailSampler(tail, len(tables.computed), vocab)


def never_called(*_: object) -> None:
    raise AssertionError("no row asked for the eager tail")


def generate(folder: Path, asked: list[dict[str, Any]]) -> list[RequestOutput]:
    """In a cache that is too small for all."""
    cache = {"num_blocks": 8, "block_size": 16}
    params = [
        SamplingParams(max_tokens=14, seed=i, ignore_eos=True, **fields)
        for i, fields in enumerate(asked)
    ]
    with open_tiny(folder, max_model_len=64, max_num_batched_tokens=24, cache=cache) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert llm.stats.preemptions > 0
        return outputs


def numbers(output: RequestOutput) -> list[float]:
    """All log-probabilities of an output, with the ids that they belong to."""
    found: list[float] = []
    for record in output.logprobs or []:
        found.append(record.token_logprob)
        found += [number for pair in record.top for number in pair]
    return found
