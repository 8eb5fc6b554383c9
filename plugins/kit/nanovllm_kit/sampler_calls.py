"""Calls of a sampler, as the suite of samplers makes them: their arguments and their ids.

Shape suffixes as in `nanovllm_core.interfaces.sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanovllm_core.interfaces.sampler import Sampler

VOCAB = 50
ROWS = 8
TEMPERATURES = (0.0, 1.0, 0.5, 2.0, 0.0, 0.7, 1.5, 3.0)
"""One of each row's own, so that a neighbour's is another."""
WIDE = 5003
"""A vocabulary of more than one block, whatever the block, with a last one that is not full."""
DEVIATIONS = 6.5
"""Standard deviations that a share or a mean may be off.

By the binomial distribution's own tails, a right sampler with any noise is accused less than once
in a million runs of the suite: its 54 shares of six ids and 8 of the parts of a vocabulary add up
to 1.3e-7, the 10 means over 2,048 draws or more to 1e-9, `RARE_LEAST` to 3.0e-7.
"""
TAIL = 400
"""Ids of a vocabulary whose likeliest 50 have two thirds of the probability."""
HUGE, RARE_ROWS, RARE_LOGIT, RARE_LEAST = 1 << 18, 64, -13.3, 4
"""One id at logit 0 and all others at -13.3 have 70 % and 30 %: of 64 draws 20 are rare ones.

Noise from numbers of 16 bits ends at 11.8 and hardly ever gives any.
"""
SEED = 0x123456789ABCDEF
"""Some seed."""


def assert_shares(chosen: Sequence[int], expected: Tensor) -> None:
    """Each id's share of the choices is within `DEVIATIONS` of what is expected."""
    shares = torch.bincount(torch.tensor(chosen), minlength=len(expected)) / len(chosen)
    deviation = (expected * (1 - expected) / len(chosen)).sqrt()
    over = (shares - expected).abs() / deviation
    worst = int(over.argmax())
    assert over[worst] <= DEVIATIONS, (
        f"of {len(chosen)} draws a share of {shares[worst]:.4f} fell to choice {worst} of "
        f"{len(expected)}, where the softmax gives {expected[worst]:.4f}: {over[worst]:.1f} "
        f"standard deviations off, {DEVIATIONS} at most are expected"
    )


def assert_mean(values_N: Tensor, mean: float, deviation: float, what: str) -> None:
    """The mean of independent `values_N` is within `DEVIATIONS` of what is expected."""
    found, error = values_N.mean().item(), deviation / len(values_N) ** 0.5
    assert abs(found - mean) <= DEVIATIONS * error, (
        f"{what} is {found:.4f} on average of {len(values_N)} draws, where the softmax gives "
        f"{mean:.4f}: {abs(found - mean) / error:.1f} standard deviations off, {DEVIATIONS} at "
        "most are expected"
    )


def random_logits(entries: int, device: torch.device, seed: int = 0) -> Tensor:
    """Logits [entries, VOCAB] without a clear winner."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(entries, VOCAB, generator=generator).to(device)


def make_arguments(
    logits_BV: Tensor,
    *,
    rows: Sequence[int] | None = None,
    temperature: Sequence[float] | None = None,
    seed: Sequence[int] | None = None,
    index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """What `Sampler.sample` takes; temperature and seed are those of the table's rows."""
    entries, device = len(logits_BV), logits_BV.device
    size = max(ROWS, entries)
    seeds = list(seed) if seed is not None else [2**40 + 7 * row for row in range(size)]
    temperatures = list(temperature) if temperature is not None else [1.0] * size
    numbers = list(index) if index is not None else [3 + i for i in range(entries)]
    rows = list(rows) if rows is not None else list(range(entries))

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return {
        "logits_BV": logits_BV,
        "rows_B": ints(rows),
        "temperature_R": torch.tensor(
            temperatures + [0.0] * (size - len(temperatures)), device=device
        ),
        "seed_R": torch.tensor(seeds + [0] * (size - len(seeds)), device=device),
        "output_index_B": ints(numbers),
        "out_B": ints([-7] * entries),
        "skip": ints([0]),
    }


def changed_arguments(entries: int, device: torch.device, number: int) -> dict[str, Any]:
    """What another step of the engine would give: other rows, padding among them, and settings."""
    rows = [(3 * i + number) % ROWS for i in range(entries)]
    rows[number % entries] = -1
    return make_arguments(
        random_logits(entries, device, seed=1 + number),
        rows=rows,
        temperature=[TEMPERATURES[(row + number) % ROWS] for row in range(ROWS)],
        seed=[SEED + 11 * number + row for row in range(ROWS)],
        index=[100 * number + i for i in range(entries)],
    )


def choose(
    sampler: Sampler, device: torch.device, seed: Sequence[int], index: Sequence[int]
) -> list[int]:
    """The ids of a vocabulary of `WIDE` equal logits, where noise alone decides."""
    logits = torch.zeros(len(seed), WIDE, device=device)
    return sample(sampler, logits, seed=seed, index=index)


def sample(sampler: Sampler, logits_BV: Tensor, **settings: Any) -> list[int]:
    """The ids of one call."""
    arguments = make_arguments(logits_BV, **settings)
    sampler.sample(**arguments)
    chosen: list[int] = arguments["out_B"].tolist()
    return chosen
