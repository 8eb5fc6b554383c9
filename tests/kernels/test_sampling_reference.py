"""The definition of sampling: greedy choice, the noise's distribution, independence, invariance."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nanovllm_core.kernels.sampling_reference import gumbel_noise, random_bits, sample_tokens


def sample(
    logits_BV: Tensor, temperature: float, seeds: list[int], indices: list[int] | None = None
) -> list[int]:
    batch = len(logits_BV)
    out = torch.full((batch,), -7, dtype=torch.int32)
    sample_tokens(
        logits_BV,
        torch.arange(batch, dtype=torch.int32),
        torch.full((batch,), temperature),
        torch.tensor(seeds),
        torch.tensor(indices or [0] * batch, dtype=torch.int32),
        out,
    )
    return out.tolist()


def chi_square_p_value(observed: Tensor, expected: Tensor) -> float:
    statistic = ((observed - expected) ** 2 / expected).sum()
    half_degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, statistic / 2))


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_id_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [0.0, 1.0, 2.0, 2.5]])
    assert sample(logits, 0.0, [0, 1, 2]) == [1, 0, 3]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_counts_as_minus_infinity(temperature):
    """A NaN is never chosen, and a row with nothing above -inf gives id 0."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, -inf, 1.0], [nan, nan, nan], [-inf, -inf, -inf]])
    assert sample(logits, temperature, [4, 5, 6]) == [2, 0, 0]


def test_padded_entries_get_minus_one():
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(3, dtype=torch.int32)
    rows = torch.tensor([-1, 1, -1], dtype=torch.int32)
    sample_tokens(logits, rows, torch.zeros(2), torch.zeros(2, dtype=torch.int64), rows, out)
    assert out.tolist() == [-1, int(logits[1].argmax()), -1]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_tokens_follow_the_softmax_over_output_indices(temperature):
    """Chi-square over 40,000 consecutive output indices of one seed."""
    draws, vocab = 40_000, 40
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    tokens = sample(logits.expand(draws, -1), temperature, [123] * draws, list(range(draws)))
    expected = torch.softmax(logits.double() / temperature, 0) * draws
    observed = torch.tensor(tokens).bincount(minlength=vocab).double()
    assert expected.min() > 5
    assert chi_square_p_value(observed, expected) > 1e-3


def test_tokens_follow_the_softmax_over_consecutive_seeds():
    draws, vocab = 40_000, 40
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2))
    tokens = sample(logits.expand(draws, -1), 1.0, list(range(draws)))
    expected = torch.softmax(logits.double(), 0) * draws
    observed = torch.tensor(tokens).bincount(minlength=vocab).double()
    assert chi_square_p_value(observed, expected) > 1e-3


def test_successive_tokens_are_independent():
    """Pairs of tokens at neighbouring output indices follow the product of their distributions."""
    draws, vocab = 40_000, 6
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    tokens = torch.tensor(sample(logits.expand(draws, -1), 1.0, [9] * draws, list(range(draws))))
    probabilities = torch.softmax(logits.double(), 0)
    pairs = tokens[0::2] * vocab + tokens[1::2]
    expected = torch.outer(probabilities, probabilities).flatten() * len(pairs)
    observed = pairs.bincount(minlength=vocab**2).double()
    assert chi_square_p_value(observed, expected) > 1e-3


def test_noise_is_a_standard_gumbel_with_a_resolved_upper_tail():
    """Mean, variance and a chi-square over 100 equal bins; the 2^-20 tail has its share."""
    count = 4_000_000
    noise = gumbel_noise(torch.tensor([7]), torch.tensor([3]), count).double().flatten()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772157) < 5 * math.pi / math.sqrt(6 * count)
    uniform = torch.exp(-torch.exp(-noise))
    observed = (uniform * 100).long().clamp(max=99).bincount(minlength=100).double()
    expected = torch.full((100,), count / 100, dtype=torch.float64)
    assert chi_square_p_value(observed, expected) > 1e-3
    threshold = -math.log(-math.log1p(-(2.0**-15)))
    in_tail = int((noise > threshold).sum())
    assert abs(in_tail - count / 2**15) < 5 * math.sqrt(count / 2**15)
    assert len(noise[noise > threshold].unique()) > 0.99 * in_tail


def test_streams_of_neighbouring_seeds_and_indices_are_uncorrelated():
    """256 streams (seeds 0-15, output indices 0-15): no pair correlates beyond chance."""
    vocab = 20_000
    seeds = torch.arange(16).repeat_interleave(16)
    indices = torch.arange(16, dtype=torch.int32).repeat(16)
    correlation = torch.corrcoef(gumbel_noise(seeds, indices, vocab))
    correlation.fill_diagonal_(0.0)
    assert correlation.abs().max() < 6 / math.sqrt(vocab)


def test_neighbouring_vocabulary_ids_are_uncorrelated():
    count = 1_000_000
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), count)[0]
    for lag in (1, 2, 3, 16, 256, 2048):
        pair = torch.stack([noise[:-lag], noise[lag:]])
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(count - lag)


def test_every_bit_of_the_generator_is_fair_and_uses_the_whole_seed():
    bits = random_bits(torch.tensor([1, 1 + 2**32, 1]), torch.zeros(3), 100_000)
    for position in range(32):
        ones = ((bits[0] >> position) & 1).float().mean()
        assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(100_000)
    assert (bits[0] == bits[1]).float().mean() < 1e-3, "the high half of the seed was ignored"
    assert torch.equal(bits[0], bits[2])


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(2, 6),
    vocab=st.integers(1, 300),
    seed=st.integers(-(2**63), 2**63 - 1),
    index=st.integers(0, 2**31 - 1),
    data=st.data(),
)
def test_a_token_does_not_depend_on_the_batch_around_it(batch, vocab, seed, index, data):
    place = data.draw(st.integers(0, batch - 1))
    logits = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(vocab))
    alone = sample(logits[place : place + 1], 0.8, [seed], [index])[0]
    seeds, indices = list(range(batch)), list(range(batch))
    seeds[place], indices[place] = seed, index
    assert sample(logits, 0.8, seeds, indices)[place] == alone
