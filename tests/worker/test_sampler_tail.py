"""The sampler's tail against a naive numpy reference, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from nanovllm_core.interfaces.plan import RowSampling
from nanovllm_core.interfaces.sampler import SamplerContext
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.kernels.sampling_reference import gumbel_noise, sample_tokens
from nanovllm_core.worker import sampler_tail as sampler_module
from nanovllm_core.worker.masks import MaskTable
from nanovllm_core.worker.processors import RowProcessors
from nanovllm_core.worker.results import LogprobTensors
from nanovllm_core.worker.sampler import GumbelSampler
from nanovllm_core.worker.sampler_tail import SamplerTail

from .tail_step import ints, tail_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 50
NUM_PROMPT = 6
NUM_KNOWN = 12


def make_tail(vocab: int, size: int) -> SamplerTail:
    context = SamplerContext(device=DEVICE, vocab_size=vocab, max_entries=size)
    return SamplerTail(
        DEVICE,
        vocab,
        GumbelSampler(NoOptions(), context),
        RowProcessors({}),
        MaskTable(64, vocab, DEVICE),
    )


@dataclass
class Batch:
    """A batch of one entry per parameter set, whose rows are in reverse order in the tables."""

    params: list[RowSampling]
    vocab: int = VOCAB
    finished: set[int] = field(default_factory=set)
    output_index: int = NUM_KNOWN - NUM_PROMPT

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        size = len(self.params)
        self.rows = tuple(reversed(range(size)))
        self.logits = torch.randn(size, self.vocab, generator=generator).to(DEVICE) * 3
        self.token_ids = torch.randint(0, self.vocab, (size, 20), generator=generator).int()
        self.token_ids = self.token_ids.to(DEVICE)

    def run(self, tail: SamplerTail | None = None) -> tuple[list[int], LogprobTensors | None]:
        size = len(self.params)
        by_row = [self.params[self.rows.index(row)] for row in range(size)]
        rows = [-1 if i in self.finished else row for i, row in enumerate(self.rows)]
        out = torch.full((size,), -7, dtype=torch.int32, device=DEVICE)
        self.tail = tail or make_tail(self.vocab, size)

        temperature = torch.tensor([one.temperature for one in by_row], device=DEVICE)
        seed = torch.tensor([one.seed for one in by_row], device=DEVICE)
        rows_b = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        known, index = ints(size, NUM_KNOWN, DEVICE), ints(size, self.output_index, DEVICE)
        step = tail_step(rows_b, known, index, self.token_ids, temperature, seed)
        sample_tokens(self.logits, rows_b, temperature, seed, index, out)
        parts = self.tail(self.logits, self.rows, self.params, *step, out)
        return out.tolist(), parts[0] if parts else None

    def expected(self) -> list[int]:
        return [-1 if i in self.finished else naive_token(self, i) for i in range(len(self.params))]


def naive_token(batch: Batch, entry: int) -> int:
    """One row's token, written as plainly as can be, in float64."""
    one = batch.params[entry]
    logits = naive_logits(batch, entry)
    if one.temperature == 0:
        return int(logits.argmax())
    noise = gumbel_noise(torch.tensor([one.seed]), torch.tensor([batch.output_index]), batch.vocab)
    return int((logits / one.temperature + noise[0].double().numpy()).argmax())


def naive_logits(batch: Batch, entry: int) -> np.ndarray:
    """The logits after everything that the row asks for, -inf where an id is forbidden."""
    one = batch.params[entry]
    logits = batch.logits[entry].double().cpu().numpy().copy()
    history = batch.token_ids[batch.rows[entry]].tolist()
    outputs = history[NUM_PROMPT:NUM_KNOWN]
    for token, bias in one.logit_bias:
        logits[token] += bias
    for token in set(history[:NUM_KNOWN]):
        factor = one.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in outputs:
        logits[token] -= one.frequency_penalty
    for token in set(outputs):
        logits[token] -= one.presence_penalty
    if batch.output_index < one.min_tokens:
        logits[list(one.stop_token_ids)] = -np.inf
    if one.temperature == 0:
        return logits
    tempered = logits / one.temperature
    logits[np.exp(tempered - tempered.max()) < one.min_p] = -np.inf
    ranked = sorted(range(batch.vocab), key=lambda token: (-logits[token], token))
    if one.top_k > 0:
        logits[ranked[one.top_k :]] = -np.inf
    weights = np.exp(logits / one.temperature - (logits / one.temperature).max())
    probabilities, held = weights / weights.sum(), 0.0
    for token in ranked:
        if held >= one.top_p:
            logits[token] = -np.inf
        held += probabilities[token]
    return logits


def allowed_ids(params: RowSampling, logits: list[float]) -> set[int]:
    """The ids that a row with these parameters gives over 400 seeds."""
    seeds = range(400)
    rows = [
        RowSampling(
            **{name: getattr(params, name) for name in params.__slots__ if name != "seed"},
            seed=seed,
        )
        for seed in seeds
    ]
    batch = Batch(rows, vocab=len(logits))
    batch.logits[:] = torch.tensor(logits, device=DEVICE)
    return set(batch.run()[0])


def test_a_logit_that_is_not_a_number_is_the_least_likely() -> None:
    """Its row's other ids are chosen between as if it were not there; an overflow is the token."""
    asked = [RowSampling(temperature=0.0, repetition_penalty=1.3, seed=i) for i in range(3)]
    batch = Batch(asked)
    without = batch.run()[0]
    batch.logits[:, 7] = torch.nan
    batch.logits[2, 9] = torch.inf
    assert 7 not in without
    assert batch.run()[0] == [*without[:2], 9]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"frequency_penalty": -1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"min_tokens": 7, "stop_token_ids": (3, 4, 5, 40)},
        {"min_tokens": 6, "stop_token_ids": (3, 4, 5, 40)},
        {"logit_bias": ((7, 6.5), (0, -100.0), (VOCAB - 1, 2.25))},
        {"logit_bias": ((3, 100.0), (9, 4.0)), "min_tokens": 7, "stop_token_ids": (3,)},
        {"min_p": 0.2},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p": 0.7, "top_k": 5, "min_p": 0.05},
        {"logprobs": 2},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_parameter_gives_the_tokens_of_the_naive_reference(params, temperature):
    rows = [RowSampling(temperature=temperature, seed=seed, **params) for seed in range(60)]
    batch = Batch(rows)
    assert batch.run()[0] == batch.expected()


ROW_SAMPLING = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    top_k=st.sampled_from([0, 0, 1, 4, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
    min_tokens=st.sampled_from([0, 0, 3, 20]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    stop_token_ids=st.sampled_from([(), (7,), (0, 1, 2)]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.floats(-100, 100, width=16), max_size=4
    )
    .map(dict.items)
    .map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(ROW_SAMPLING, min_size=1, max_size=9),
    group_size=st.integers(1, 4),
    data=st.data(),
)
def test_any_mix_of_rows_gives_each_row_its_own_token(params, group_size, data):
    """Whatever its neighbours want, in groups of any size, with some rows already finished."""
    finished = data.draw(st.sets(st.integers(0, len(params) - 1)))
    row_bytes = VOCAB * 96 + 20 * 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "TRANSIENT_BYTES", group_size * row_bytes)
        batch = Batch(params, finished=finished)
        tokens, _ = batch.run()
    assert tokens == batch.expected()


@settings(max_examples=200, deadline=None)
@given(ROW_SAMPLING)
def test_a_row_needs_the_tail_where_the_tail_would_do_something_for_it(one):
    """One rule: a greedy row with top_k=20, say, stays in the captured sampler."""
    asked = bool(sampler_module._operations(one, VOCAB)) or one.logprobs is not None
    assert one.needs_tail == asked


def test_greedy_rows_with_cuts_do_not_need_the_tail():
    """Qwen's advice of top_k 20 and top_p 0.95 costs a greedy request nothing."""
    cuts = {"top_k": 20, "top_p": 0.95, "min_p": 0.1}
    assert not RowSampling(temperature=0.0, **cuts).needs_tail
    assert RowSampling(temperature=0.6, **cuts).needs_tail
    assert not RowSampling(min_tokens=8).needs_tail, "there is no stop id to forbid"


def test_rows_without_extras_get_the_captured_samplers_token():
    """A neighbour's top_k does not change a row's token, to the bit."""
    plain = [RowSampling(temperature=0.9, seed=seed) for seed in range(40)]
    batch = Batch([*plain, RowSampling(temperature=1.0, top_k=2)])
    out = torch.empty(40, dtype=torch.int32, device=DEVICE)
    sample_tokens(
        batch.logits[:40],
        torch.arange(40, dtype=torch.int32, device=DEVICE),
        torch.full((40,), 0.9, device=DEVICE),
        torch.arange(40, device=DEVICE),
        torch.full((40,), batch.output_index, dtype=torch.int32, device=DEVICE),
        out,
    )
    assert batch.run()[0][:40] == out.tolist()


def test_top_k_keeps_exactly_k_ids_and_the_lower_of_equals():
    logits = [1.0, 2.0, 2.0, 2.0, 0.0]
    assert allowed_ids(RowSampling(temperature=1.0, top_k=2), logits) == {1, 2}
    assert allowed_ids(RowSampling(temperature=1.0, top_k=4), logits) == {0, 1, 2, 3}


def test_top_p_keeps_the_fewest_ids_that_hold_the_share_and_at_least_one():
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert allowed_ids(RowSampling(temperature=1.0, top_p=0.79), logits) == {0, 1}
    assert allowed_ids(RowSampling(temperature=1.0, top_p=0.81), logits) == {0, 1, 2}
    assert allowed_ids(RowSampling(temperature=1.0, top_p=1e-6), logits) == {0}
    assert allowed_ids(RowSampling(temperature=1.0, top_p=1e-50), logits) == {0}  # 0 in float32


def test_top_p_counts_only_what_top_k_left():
    """After top_k 2 the shares are 5/8 and 3/8, so top_p 0.6 leaves one id."""
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert allowed_ids(RowSampling(temperature=1.0, top_k=2, top_p=0.6), logits) == {0}


def test_min_p_is_relative_to_the_likeliest_id_at_the_rows_temperature():
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert allowed_ids(RowSampling(temperature=1.0, min_p=0.4), logits) == {0, 1}
    assert allowed_ids(RowSampling(temperature=3.0, min_p=0.4), logits) == {0, 1, 2, 3}


def test_cuts_at_their_limits_keep_the_likeliest_ids_and_their_equals():
    """min_p 1 keeps what is as likely as the likeliest; a ratio at the floor is not below it."""
    logits = [1.0, 2.0, 2.0, 0.0, -math.inf]
    assert allowed_ids(RowSampling(temperature=1.0, min_p=1.0), logits) == {1, 2}
    assert allowed_ids(RowSampling(temperature=1.0, top_k=1), logits) == {1}
    assert allowed_ids(RowSampling(temperature=1.0, top_k=5, top_p=1.0), logits) == {0, 1, 2, 3}
    half = [0.0, math.log(0.5), math.log(0.499)]
    assert allowed_ids(RowSampling(temperature=1.0, min_p=0.5), half) == {0, 1}


def test_a_row_whose_logits_are_all_nan_gives_id_zero_and_harms_no_neighbour():
    params = [RowSampling(temperature=1.0, seed=i, top_k=3, top_p=0.9) for i in range(3)]
    batch = Batch(params)
    neighbours = [batch.expected()[0], batch.expected()[2]]
    batch.logits[1] = math.nan
    assert batch.run()[0] == [neighbours[0], 0, neighbours[1]]


def test_a_bias_is_added_and_lifts_nothing_that_is_forbidden():
    """100 is no command: a logit that is further ahead stays ahead, and -inf stays -inf."""
    logits = [-math.inf, 5.0, 106.0]
    assert allowed_ids(RowSampling(logit_bias=((0, 100.0), (1, 100.0))), logits) == {2}
    assert allowed_ids(RowSampling(logit_bias=((1, 100.0), (2, -6.0))), logits) == {1}


def test_a_bias_shows_in_the_choice_and_not_in_the_log_probabilities():
    """These are of the raw logits."""
    batch = Batch([RowSampling(logit_bias=((4, 100.0),), logprobs=1)])
    tokens, logprobs = batch.run()
    assert tokens == [4]
    assert logprobs is not None
    raw = batch.logits[0].log_softmax(0)
    assert logprobs.to_records()[0].token_logprob == pytest.approx(float(raw[4]), abs=1e-5)
    assert logprobs.to_records()[0].top[0][0] == int(raw.argmax())


def test_stop_ids_outside_the_vocabulary_are_ignored():
    batch = Batch([RowSampling(min_tokens=9, stop_token_ids=(VOCAB + 3, 2))])
    batch.logits[0, 2] = 100.0
    assert batch.run()[0] == [int(batch.logits[0].masked_fill(batch.logits[0] == 100, -9).argmax())]


def test_logprobs_are_the_log_softmax_of_the_raw_logits():
    """Penalties and cuts do not change them; each entry gets as many as it asked for."""
    params = [
        RowSampling(),
        RowSampling(logprobs=2, temperature=0.7, top_k=1, repetition_penalty=1.5),
        RowSampling(logprobs=0),
        RowSampling(logprobs=5, temperature=1.0, seed=3),
    ]
    batch = Batch(params)
    tokens, logprobs = batch.run()
    expected = torch.log_softmax(batch.logits.cpu(), dim=1)
    assert logprobs is not None
    records = logprobs.to_host().to_records()
    assert set(records) == {1, 2, 3}
    for entry, record in records.items():
        assert record.token_logprob == pytest.approx(expected[entry, tokens[entry]].item())
        values, ids = expected[entry].topk(params[entry].logprobs)
        assert [i for i, _ in record.top] == ids.tolist()
        assert [v for _, v in record.top] == pytest.approx(values.tolist())


def test_no_logprobs_where_nobody_asked():
    assert Batch([RowSampling(top_k=1)]).run()[1] is None


def test_uploads_are_kept_while_rows_and_parameters_are_the_same_objects(monkeypatch):
    batch = Batch([RowSampling(temperature=1.0, top_k=2), RowSampling(logprobs=1)])
    tail = make_tail(VOCAB, 2)
    copies = []
    original = sampler_module.to_device
    monkeypatch.setattr(sampler_module, "to_device", lambda *a: copies.append(a) or original(*a))
    first = batch.run(tail)[0]
    uploads = len(copies)
    assert batch.run(tail)[0] == first
    assert len(copies) == uploads > 0
    batch.params = [RowSampling(temperature=1.0, top_k=1), RowSampling()]
    assert batch.run(tail)[0] == batch.expected()
    assert len(copies) > uploads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_tail_never_waits_for_the_device_and_stays_within_its_memory():
    """256 rows that want everything, at a vocabulary of 151,936."""
    params = [
        RowSampling(
            temperature=1.0, seed=i, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
            presence_penalty=0.1, min_tokens=20, stop_token_ids=(1, 2), logprobs=5,
        )
        for i in range(256)
    ]  # fmt: skip
    size, vocab, length = 256, 151_936, 4096
    logits = torch.randn(size, vocab, device=DEVICE, dtype=torch.bfloat16)
    token_ids = torch.randint(0, vocab, (size, length), dtype=torch.int32, device=DEVICE)
    known, index = ints(size, 2000, DEVICE), ints(size, 500, DEVICE)
    temperature = torch.ones(size, device=DEVICE)
    seed = torch.arange(size, device=DEVICE)
    rows_b = torch.arange(size, dtype=torch.int32, device=DEVICE)
    out = torch.empty(size, dtype=torch.int32, device=DEVICE)
    rows = tuple(range(size))
    tail = make_tail(vocab, size)
    step = tail_step(rows_b, known, index, token_ids, temperature, seed)

    def run() -> Sequence[LogprobTensors]:
        return tail(logits, rows, params, *step, out)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= sampler_module.TRANSIENT_BYTES, f"{peak / 2**20:.0f} MiB"
    assert logprobs
    torch.cuda.synchronize()
    assert all(0 <= token < vocab for token in out.tolist())
