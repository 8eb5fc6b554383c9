"""Ranks that hold a part of the vocabulary each choose the tokens of one that holds all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from nanovllm_core.errors import UnsupportedError
from nanovllm_core.interfaces.parallel import SingleRank, TensorParallel
from nanovllm_core.interfaces.plan import Admission, RowSampling
from nanovllm_core.interfaces.sampler import Sampler, SamplerContext
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.interfaces.tail import ShardedTail
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.masks import MaskTable
from nanovllm_core.worker.processors import RowProcessors
from nanovllm_core.worker.rows import RowTables, RowUpdates
from nanovllm_core.worker.rows_reference import scatter_updates
from nanovllm_core.worker.sampler import CapturedSampler, GumbelSampler, TailSampler, tail_tables
from nanovllm_core.worker.sampler_tail import NOTHING_ASKED, SamplerTail
from nanovllm_core.worker.sharded import over_ranks
from nanovllm_kit.ranks import SimulatedRank, run_ranks

from .counted_rank import Counted
from .row_sampling import row_sampling
from .tail_step import ints

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_LEN = 32
# On a GPU each part of a vocabulary has its own kernels, which take seconds to compile.
TAIL_VOCABS = [500] if DEVICE.type == "cuda" else [1, 7, 129, 500]
TAIL_RANKS = [3] if DEVICE.type == "cuda" else [2, 3, 4, 5]
INTERPRETER = threading.Lock()
"""Triton's interpreter runs one kernel at a time; ranks are threads here."""


class SubclassedSampler(GumbelSampler):
    """A plugin's: whole logits are its contract."""


class LockedTail(TailSampler):
    def sample(self, logits_BV: Tensor, inputs: StepInputs, out_B: Tensor, skip: Tensor) -> None:
        with INTERPRETER:
            super().sample(logits_BV, inputs, out_B, skip)


class LockedKernels:
    """A kernel set with a tail over ranks, whose launches take turns."""

    def make_sharded_tail(self, *arguments: Any) -> ShardedTail:
        tail: ShardedTail = captured_tail().TritonShardedTail(*arguments)
        for name in ("find", "choose"):
            setattr(tail, name, self.taking_turns(getattr(tail, name)))
        return tail

    @staticmethod
    def taking_turns(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with INTERPRETER:
                return method(*arguments)

        return call


def captured_tail() -> Any:
    return pytest.importorskip(
        "nanovllm_kernels_triton.captured_tail", reason="needs the plugin kernels_triton"
    )


@dataclass
class Step:
    """Entries of a step: whole logits, and of each its row, what it asks for, and its ids."""

    logits: Tensor
    params: Sequence[RowSampling]
    ids: Sequence[Sequence[int]]
    finished: int = -1
    captured_tail: Any = None
    kernels: Any = None

    def __post_init__(self) -> None:
        self.vocab_size = self.logits.shape[1]
        self.rows = tuple(reversed(range(len(self.params))))

    def make_tables(self) -> RowTables:
        tables = RowTables.allocate(len(self.rows), MAX_LEN, 16, DEVICE)
        updates = RowUpdates(tables)
        for row, sampling, ids in zip(self.rows, self.params, self.ids, strict=True):
            updates.admit(
                Admission(
                    row=row,
                    token_ids=np.array(ids, np.int32),
                    num_prompt_tokens=1 + len(ids) // 2,
                    num_computed=0,
                    block_ids=np.zeros((1, 1), np.int32),
                    max_length=MAX_LEN,
                    sampling=sampling,
                )
            )
        packed = updates.take()
        assert packed is not None
        scatter_updates(tables.arena, torch.from_numpy(packed).to(DEVICE))
        return tables

    def inputs(self, tables: RowTables) -> StepInputs:
        inputs = StepInputs.allocate(len(self.rows), len(self.rows), 1, DEVICE)
        live = [-1 if i == self.finished else row for i, row in enumerate(self.rows)]
        inputs.rows.copy_(torch.tensor(live))
        inputs.seq_lens.copy_(torch.tensor([len(ids) for ids in self.ids]))
        inputs.output_index.copy_(inputs.seq_lens - tables.num_prompt[list(self.rows)])
        return inputs

    def samplers(
        self, tp: TensorParallel, tables: RowTables, kind: type[Sampler] = GumbelSampler
    ) -> Any:
        """What `over_ranks` makes, and what it is given."""
        vocab, size = self.vocab_size, len(self.rows)
        context = SamplerContext(device=DEVICE, vocab_size=vocab, max_entries=size)
        sampler = kind(NoOptions(), context)
        masks = MaskTable(size, vocab, DEVICE)
        tail = SamplerTail(DEVICE, vocab, sampler, RowProcessors({}), masks)
        captured = CapturedSampler(sampler, tables)
        if self.captured_tail is not None:
            kernels = self.captured_tail.TritonTail(tail_tables(tables), vocab, size)
            captured = LockedTail(kernels, size, vocab)
        made = over_ranks(tp, self.kernels, sampler, captured, tail, tables, vocab, size)
        return made, (captured, tail, vocab)

    def columns(self, tp: TensorParallel, num_columns: int) -> Tensor:
        """The logits of this rank's ids, and padding."""
        here_BX = self.logits.to(DEVICE)[:, tp.rank * num_columns :][:, :num_columns]
        padding = here_BX.new_zeros(len(self.rows), num_columns - here_BX.shape[1])
        return torch.cat([here_BX, padding], dim=1)

    def on_rank(self, tp: TensorParallel) -> tuple[list[int], dict[int, Any]]:
        """Tokens and log-probabilities, by a rank that has its own columns of the logits."""
        tables, size = self.make_tables(), len(self.rows)
        (sampling, after, num_columns), _ = self.samplers(tp, tables)
        logits_BX = self.columns(tp, num_columns)
        inputs, out_B = self.inputs(tables), ints(size, -7, DEVICE)
        asked = []
        for row, one in zip(self.rows, self.params, strict=True):
            sampling.admit(row, one)
            asked.append(one if sampling.needs_tail(one) else NOTHING_ASKED)
        sampling.sample(logits_BX, inputs, out_B, ints(1, 0, DEVICE))
        logprobs = list(sampling.logprobs(np.array(self.rows)))
        if asked != [NOTHING_ASKED] * size:
            logprobs += after(logits_BX, self.rows, asked, inputs, tables, out_B)
        return out_B.tolist(), {
            entry: (one.token_logprob, dict(one.top))
            for part in logprobs
            for entry, one in part.to_host().to_records().items()
        }


def steps(vocabs: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    """Logits that tie often, within a rank and across; some forbidden, some NaN."""

    @st.composite
    def draw_step(draw: st.DrawFn) -> Step:
        vocab, size = draw(vocabs), draw(st.integers(1, 5))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        logits_BV = torch.randn(size, vocab, generator=generator) * 3
        if draw(st.booleans()):
            logits_BV.round_()
        chances = torch.rand(size, vocab, generator=generator)
        logits_BV[chances < 0.1] = -torch.inf
        logits_BV[chances > 0.97] = torch.nan
        ids = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=MAX_LEN - 1)
        plain = st.builds(
            RowSampling,
            temperature=st.sampled_from([0.0, 0.7, 1.0]),
            seed=st.integers(0, 2**63 - 1),
        )
        params = st.lists(st.one_of(plain, row_sampling(vocab)), min_size=size, max_size=size)
        known = st.lists(ids, min_size=size, max_size=size)
        return Step(logits_BV, draw(params), draw(known), draw(st.integers(-1, size - 1)))

    return draw_step()


def assert_ranks_agree(step: Step, size: int) -> None:
    tokens, logprobs = step.on_rank(SingleRank())
    for its_tokens, its_logprobs in run_ranks(size, step.on_rank):
        assert its_tokens == tokens, step
        assert its_logprobs.keys() == logprobs.keys()
        for entry, (logprob, top) in its_logprobs.items():
            expected, its_top = logprobs[entry]
            assert logprob == pytest.approx(expected, abs=1e-5, nan_ok=True)
            assert top == pytest.approx(its_top, abs=1e-5, nan_ok=True)


@settings(max_examples=60, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(step=steps(st.sampled_from([1, 2, 5, 13, 64, 101])), size=st.integers(2, 5))
def test_any_mix_of_rows_gets_the_tokens_of_one_rank(step: Step, size: int) -> None:
    """With vocabularies that ranks do not divide, down to ranks that hold nothing but padding."""
    assert_ranks_agree(step, size)


@settings(max_examples=4, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(step=steps(st.sampled_from([129, 300])), size=st.integers(2, 3))
def test_the_kernel_sets_tail_samples_gathered_rows(step: Step, size: int) -> None:
    """What captures hold on one rank follows the step here; the eager tail does what it leaves."""
    step.captured_tail = captured_tail()
    for one in range(len(step.params)):
        many = {"stop_token_ids": tuple(range(9)), "min_tokens": 4}
        if one % 3 == 2:  # more than the tables hold
            step.params[one] = RowSampling(seed=one, logprobs=1, **many)
    assert_ranks_agree(step, size)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few ids have many splits."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(captured_tail(), "TILE", 64)
        monkeypatch.setattr(captured_tail(), "MAX_SPLITS", 4)


@pytest.mark.usefixtures("small_tiles")
@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(step=steps(st.sampled_from(TAIL_VOCABS)), size=st.sampled_from(TAIL_RANKS))
def test_the_kernel_sets_tail_over_ranks_chooses_as_that_of_one(step: Step, size: int) -> None:
    """Cuts, penalties, biases, log-probabilities, and ties that overflow the candidates' slots."""
    step.captured_tail, step.kernels = captured_tail(), LockedKernels()
    assert_ranks_agree(step, size)


@pytest.mark.usefixtures("small_tiles")
def test_a_tail_over_ranks_is_exact_at_the_edges_of_its_cuts() -> None:
    """Of nearly equal logits, where one id more would often be chosen; of more equal ones than
    there are slots, where the likeliest have the highest ids; and where no id is left.
    """
    cuts = ((1, 1.0), (2, 1.0), (2, 1.0), (3, 1.0), (3, 0.7), (64, 1.0), (64, 0.7))
    params = [
        RowSampling(temperature=2.0, seed=i, top_k=top_k, top_p=top_p, logprobs=(None, 20)[i % 2])
        for i, (top_k, top_p) in enumerate(cuts)
    ]
    flat = torch.randn(len(params), 500, generator=torch.Generator().manual_seed(1)) / 100
    equal = torch.full((len(params), 500), 0.5)
    equal[:, -9:] = 3.0
    nothing = {"min_tokens": 9, "stop_token_ids": (0, 1, 2, 3, 4), "logprobs": 3}
    without = [RowSampling(temperature=t, top_k=2, **nothing) for t in (1.0, 0.0)]  # type: ignore[arg-type]
    for logits, asked in (flat, params), (equal, params), (torch.ones(2, 5), without):
        step = Step(logits, asked, [[1]] * len(asked))
        step.captured_tail, step.kernels = captured_tail(), LockedKernels()
        assert_ranks_agree(step, TAIL_RANKS[0])


@pytest.mark.usefixtures("small_tiles")
def test_a_tail_over_ranks_gathers_parts_and_no_logits_of_the_rows_that_it_decides() -> None:
    """Of 8 entries two are cut without a top_k that is in its reach."""
    in_reach = [
        RowSampling(temperature=0.7, seed=1, top_k=64, top_p=0.9, min_p=0.01),
        RowSampling(temperature=0.0, repetition_penalty=1.3, logprobs=20),
        RowSampling(temperature=1.0, seed=2, logit_bias=((3, 2.0), (170, -9.0)), logprobs=0),
        RowSampling(temperature=1.0, seed=3, top_k=1, min_tokens=9, stop_token_ids=(5, 180)),
        RowSampling(),
        RowSampling(temperature=0.7, seed=4),
    ]
    beyond = [
        RowSampling(temperature=0.7, seed=5, top_p=0.9, frequency_penalty=0.4),
        RowSampling(temperature=0.7, seed=6, top_k=65, logprobs=3),
    ]

    def sent(params: list[RowSampling]) -> list[int]:
        step = Step(torch.randn(len(params), 200) * 3, params, [[1, 170, 3, 170]] * len(params))
        step.captured_tail, step.kernels = captured_tail(), LockedKernels()
        ranks: list[Counted] = []

        def on_rank(rank: SimulatedRank) -> Any:
            ranks.append(Counted(rank))
            return step.on_rank(ranks[-1])

        expected = step.on_rank(SingleRank())
        assert [tokens for tokens, _ in run_ranks(2, on_rank)] == [expected[0]] * 2
        return ranks[0].sent

    part = 4 * (8 + 3 * 64 + 2 * 32)
    assert sent(in_reach) == [6 * part]
    assert sent([*in_reach, *beyond]) == [8 * part, 2 * 100 * 4]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_of_equal_logits_on_several_ranks_the_lowest_id_wins(size: int) -> None:
    """Whoever holds it; a row of which nothing is left gives id 0."""
    logits_BV = torch.zeros(4, 10)
    for entry, ids in enumerate([(9, 4), (3, 8, 7), (9,)]):
        logits_BV[entry, list(ids)] = 1.0
    logits_BV[3] = -torch.inf
    step = Step(logits_BV, [RowSampling(temperature=0.0)] * 4, [[1]] * 4)
    assert [tokens for tokens, _ in run_ranks(size, step.on_rank)] == [[4, 3, 9, 0]] * size


def test_plain_rows_move_eight_bytes_and_only_rows_that_ask_their_logits() -> None:
    """Of 8 entries, with 50 ids on each of two ranks, two ask for more than a plain row does."""
    plain = [RowSampling(temperature=float(i % 2), seed=i) for i in range(8)]
    asking = [
        *plain[:3],
        RowSampling(logprobs=2),
        *plain[4:7],
        RowSampling(temperature=1.0, top_k=3),
    ]
    ids = [[1, 2, 3]] * 8

    def sent(params: list[RowSampling]) -> list[list[int]]:
        def on_rank(rank: SimulatedRank) -> list[int]:
            counted = Counted(rank)
            Step(torch.randn(8, 100), params, ids).on_rank(counted)
            return counted.sent

        return run_ranks(2, on_rank)

    assert sent(plain) == [[8 * 8]] * 2
    assert sent(asking) == [[8 * 8, 2 * 50 * 4]] * 2


def test_a_plugins_sampler_has_whole_logits() -> None:
    """As its contract says; so has every sampler where there is one rank."""
    step = Step(torch.zeros(1, 11), [RowSampling()], [[1]])
    for size, kind in ((1, GumbelSampler), (2, SubclassedSampler)):
        made, given = step.samplers(SingleRank(size=size), step.make_tables(), kind)
        assert made == given


def test_a_model_that_ignores_the_width_of_its_output_is_named() -> None:
    """Its columns would be taken for other ids."""
    step = Step(torch.zeros(1, 11), [RowSampling()], [[1]])
    tables = step.make_tables()
    (sharded, _, num_columns), _ = step.samplers(SingleRank(size=2), tables)
    assert num_columns == 6
    out, skip = ints(1, 0, DEVICE), ints(1, 0, DEVICE)
    with pytest.raises(UnsupportedError, match=r"11 columns .* 6, .*ParallelLMHead"):
        sharded.sample(step.logits.to(DEVICE), step.inputs(tables), out, skip)


@pytest.mark.parametrize("size", [2, 4])
def test_debug_mode_sees_the_largest_logit_of_all_ranks(size: int) -> None:
    """An id is forbidden by -inf; a rank may have no other, or padding alone."""
    logits = torch.full((3, 5), -torch.inf)
    logits[0, 4] = -2.0
    logits[1, 1] = torch.nan
    step = Step(logits, [RowSampling()] * 3, [[1]] * 3)

    def on_rank(tp: TensorParallel) -> list[float]:
        (sharded, _, num_columns), _ = step.samplers(tp, step.make_tables())
        largest: list[float] = sharded.largest(step.columns(tp, num_columns)).tolist()
        return largest

    for largest in run_ranks(size, on_rank):
        assert largest == pytest.approx([-2.0, float("nan"), -torch.inf], nan_ok=True)
