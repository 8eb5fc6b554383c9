"""The conformance suite of samplers: on a CPU, and on a GPU where the plugin declares it.

Shape suffixes as in `nanovllm_core.interfaces.sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.sampler import Sampler, SamplerContext
from nanovllm_core.interfaces.specs import SamplerSpec
from nanovllm_core.testing.conformance import PluginUnderTest, SpecConformance

VOCAB = 50
ROWS = 8


class SamplerConformance(SpecConformance):
    """Greedy and temperature choice that depends on an entry's own numbers alone."""

    @pytest.fixture(params=["cpu", "cuda"])
    def device(self, plugin: PluginUnderTest, request: pytest.FixtureRequest) -> torch.device:
        """Each device that the plugin declares and this machine has."""
        assert isinstance(plugin.spec, SamplerSpec)
        if request.param not in plugin.spec.devices:
            pytest.skip(f"{plugin.spec.name} does not declare {request.param}")
        if request.param == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        return torch.device(request.param)

    def make(
        self, plugin: PluginUnderTest, device: torch.device, vocab: int = VOCAB, rows: int = ROWS
    ) -> Sampler:
        """A fresh sampler."""
        context = SamplerContext(device=device, vocab_size=vocab, max_entries=rows)
        sampler = plugin.load()(plugin.options, context)
        assert isinstance(sampler, Sampler)
        return sampler

    def test_temperature_0_takes_the_likeliest_id(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """In every dtype a model's logits may have, whatever the seed."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = random_logits(ROWS, device).to(dtype)
            peaks = torch.arange(ROWS, device=device) * 7 % VOCAB
            logits[torch.arange(ROWS), peaks] = 20.0
            chosen = sample(self.make(plugin, device), logits, temperature=[0.0] * ROWS)
            assert chosen == peaks.tolist()

    def test_of_equal_logits_the_lowest_id_wins(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """So that greedy outputs do not depend on how a kernel is cut."""
        logits = torch.zeros(2, VOCAB, device=device)
        logits[0, [11, 12, 49]] = 3.0
        assert sample(self.make(plugin, device), logits, temperature=[0.0] * 2) == [11, 0]

    def test_padding_gets_minus_one(self, plugin: PluginUnderTest, device: torch.device) -> None:
        """Row -1 is nobody; the entries beside it are chosen for as ever."""
        logits = random_logits(4, device)
        sampler = self.make(plugin, device)
        full = sample(sampler, logits, rows=[0, 1, 2, 3])
        assert sample(sampler, logits, rows=[0, -1, 2, -1]) == [full[0], -1, full[2], -1]

    def test_a_choice_depends_on_no_neighbour(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Alone, in another place of the batch and after other calls: the same id."""
        logits = random_logits(ROWS, device)
        sampler = self.make(plugin, device)
        together = sample(sampler, logits)
        order = [5, 0, 7, 2, 1, 6, 3, 4]
        shuffled = sample(sampler, logits[order], rows=order, index=[3 + i for i in order])
        assert shuffled == [together[i] for i in order]
        for i in range(ROWS):
            assert sample(sampler, logits[i : i + 1], rows=[i], index=[3 + i]) == [together[i]]

    def test_a_new_sampler_goes_on_as_the_old_one_would_have(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Nothing is remembered, so a preempted request keeps its tokens."""
        logits = random_logits(ROWS, device)
        used = self.make(plugin, device)
        for index in range(5):
            sample(used, logits, index=[index] * ROWS)
        assert sample(used, logits) == sample(self.make(plugin, device), logits)

    def test_seed_and_output_index_change_the_noise(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Equal logits, other seeds or other outputs: other ids, most of the time."""
        logits = torch.zeros(ROWS, VOCAB, device=device)
        sampler = self.make(plugin, device)
        by_seed = sample(sampler, logits, seed=list(range(ROWS)), index=[0] * ROWS)
        by_index = sample(sampler, logits, seed=[1] * ROWS, index=list(range(ROWS)))
        for chosen in (by_seed, by_index):
            assert len(set(chosen)) > ROWS // 2, chosen

    def test_what_is_forbidden_is_never_chosen(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """An id at -inf, at any temperature."""
        logits = torch.full((ROWS, VOCAB), float("-inf"), device=device)
        logits[:, [3, 30]] = 0.0
        sampler = self.make(plugin, device)
        for temperature in (0.0, 0.01, 1.0, 100.0):
            chosen = sample(sampler, logits, temperature=[temperature] * ROWS)
            assert set(chosen) <= {3, 30}

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_ids_come_as_often_as_the_softmax_says(
        self, plugin: PluginUnderTest, device: torch.device, temperature: float
    ) -> None:
        """Over 8192 seeds each id's share is within five standard deviations."""
        draws, vocab = 8192, 6
        logits = torch.tensor([1.5, -1.0, 0.3, 0.0, 2.0, -0.5], device=device)
        chosen = sample(
            self.make(plugin, device, vocab, draws),
            logits.repeat(draws, 1),
            temperature=[temperature] * draws,
            seed=list(range(draws)),
            index=[0] * draws,
        )
        shares = torch.bincount(torch.tensor(chosen), minlength=vocab) / draws
        expected = (logits.cpu() / temperature).softmax(-1)
        deviation = (expected * (1 - expected) / draws).sqrt()
        assert ((shares - expected).abs() <= 5 * deviation).all(), (shares, expected)

    def test_only_the_output_is_written(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Logits and tables are read again after the call."""
        arguments = make_arguments(random_logits(ROWS, device))
        before = {name: tensor.clone() for name, tensor in arguments.items()}
        self.make(plugin, device).sample(**arguments)
        assert (arguments.pop("out_B") >= 0).all()
        for name, tensor in arguments.items():
            assert torch.equal(tensor, before[name]), f"{name} was changed"

    def test_a_step_with_a_tail_may_be_skipped(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """With `skip` set the call still runs, inside a graph: it must not fail."""
        arguments = make_arguments(random_logits(ROWS, device))
        arguments["skip"].fill_(1)
        self.make(plugin, device).sample(**arguments)


def random_logits(entries: int, device: torch.device) -> Tensor:
    """Logits [entries, VOCAB] without a clear winner."""
    generator = torch.Generator().manual_seed(0)
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


def sample(sampler: Sampler, logits_BV: Tensor, **settings: Any) -> list[int]:
    """The ids of one call."""
    arguments = make_arguments(logits_BV, **settings)
    sampler.sample(**arguments)
    chosen: list[int] = arguments["out_B"].tolist()
    return chosen
