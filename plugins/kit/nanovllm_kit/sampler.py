"""The conformance suite of samplers: on a CPU, and on a GPU where the plugin declares it.

Shape suffixes as in `nanovllm_core.interfaces.sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.sampler import Sampler, SamplerContext
from nanovllm_core.interfaces.specs import SamplerSpec
from nanovllm_kit.attention_replay import captured, perturb, recorded
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.recording import HostReadError

VOCAB = 50
ROWS = 8
TEMPERATURES = (0.0, 1.0, 0.5, 2.0, 0.0, 0.7, 1.5, 3.0)
"""One of each row's own, so that a neighbour's is another."""
WIDE = 5003
"""A vocabulary of more than one block, whatever the block, with a last one that is not full."""
SEED, SEED_BITS = 0x123456789ABCDEF, 63
"""Some seed, and how many bits one has: the engine's are from 0 to 2**63 - 1."""
INDEX_BITS = 17
"""Of an output index: outputs of 128 Ki tokens."""


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
            # A little above the others: at temperature 1 some would be drawn in its place.
            logits[torch.arange(ROWS), peaks] = logits.amax(1) + 0.5
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
        """Row -1 marks padding. Other entries are sampled as usual."""
        logits = random_logits(4, device)
        sampler = self.make(plugin, device)
        full = sample(sampler, logits, rows=[0, 1, 2, 3])
        assert sample(sampler, logits, rows=[0, -1, 2, -1]) == [full[0], -1, full[2], -1]

    def test_a_choice_depends_on_no_neighbour(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Alone, in another place of the batch and after other calls: the same id.

        Each row has a temperature of its own; some are greedy.
        """
        logits = random_logits(ROWS, device)
        sampler = self.make(plugin, device)
        together = sample(sampler, logits, temperature=TEMPERATURES)
        for order in ([5, 0, 7, 2, 1, 6, 3, 4], *([i] for i in range(ROWS))):
            chosen = sample(
                sampler,
                logits[order],
                rows=order,
                temperature=TEMPERATURES,
                index=[3 + i for i in order],
            )
            assert chosen == [together[i] for i in order], f"the rows {order}"

    def test_a_new_sampler_goes_on_as_the_old_one_would_have(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Nothing is remembered, so a preempted request keeps its tokens.

        The old one has served other outputs of these requests, and others in the same rows: with
        other seeds, temperatures and logits, at the same output index.
        """
        logits = random_logits(ROWS, device)
        used = self.make(plugin, device)
        for index in range(5):
            sample(used, logits, index=[index] * ROWS)
        sample(used, -logits, seed=range(ROWS), temperature=[*reversed(TEMPERATURES)])
        expected = sample(self.make(plugin, device), logits, temperature=TEMPERATURES)
        assert sample(used, logits, temperature=TEMPERATURES) == expected

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

    def test_every_bit_of_seed_and_output_index_changes_the_noise(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Of equal logits another id, for a seed of 63 bits and an output index of 17.

        One bit is changed at a time, in each of three pairs: by chance, none of the three choices
        changes once in 10**11 times.
        """
        seeds = [SEED, *(SEED ^ 1 << bit for bit in range(SEED_BITS))]
        indices = [5, *(5 ^ 1 << bit for bit in range(INDEX_BITS))]
        sampler = self.make(plugin, device, WIDE, len(seeds))
        by_seed = [choose(sampler, device, seeds, [i] * len(seeds)) for i in range(3)]
        by_index = [choose(sampler, device, [SEED + i] * len(indices), indices) for i in range(3)]
        for what, choices in (("seed", by_seed), ("output index", by_index)):
            columns = [*zip(*choices, strict=True)]
            ignored = [bit for bit, ids in enumerate(columns[1:]) if ids == columns[0]]
            assert not ignored, f"these bits of the {what} change nothing: {ignored}"

    def test_neighbouring_seeds_share_no_noise(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Seed s at output n + 1 and seed s + 1 at output n are two draws, not one."""
        sampler = self.make(plugin, device, WIDE)
        seeds = [SEED + 7 * row for row in range(ROWS)]
        later = choose(sampler, device, seeds, [1] * ROWS)
        next_seeds = choose(sampler, device, [seed + 1 for seed in seeds], [0] * ROWS)
        assert sum(a == b for a, b in zip(later, next_seeds, strict=True)) <= 1, later

    def test_the_last_ids_of_a_wide_vocabulary_are_chosen(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Greedily and by chance, where they are all but certain."""
        logits = torch.zeros(2, WIDE, device=device)
        logits[:, -1] = 40.0
        chosen = sample(self.make(plugin, device, WIDE), logits, temperature=[0.0, 1.0])
        assert chosen == [WIDE - 1] * 2

    def test_each_part_of_a_wide_vocabulary_has_its_share(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Of equal logits; 512 draws, eight parts."""
        draws, parts = 512, 8
        sampler = self.make(plugin, device, WIDE, draws)
        chosen = choose(sampler, device, range(draws), [0] * draws)
        assert_shares([i * parts // WIDE for i in chosen], torch.full((parts,), 1 / parts))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_ids_come_as_often_as_the_softmax_says(
        self,
        plugin: PluginUnderTest,
        device: torch.device,
        temperature: float,
        dtype: torch.dtype,
    ) -> None:
        """Over 8192 seeds each id's share is within five standard deviations.

        In every dtype the logits are exact, and so far from 0 that noise which is added in 16 bits
        is lost.
        """
        draws, vocab = 8192, 6
        logits = torch.tensor([101.5, 99.0, 100.5, 100.0, 102.0, 99.5], device=device)
        chosen = sample(
            self.make(plugin, device, vocab, draws),
            logits.to(dtype).repeat(draws, 1),
            temperature=[temperature] * draws,
            seed=range(draws),
            index=[0] * draws,
        )
        assert_shares(chosen, (logits.cpu() / temperature).softmax(-1))

    def test_noise_is_finer_than_bfloat16(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """The logit from which on the second of two ids is chosen, halved down to for 4096 seeds.

        Of noise with 8 bits a third of the seeds shares its own with others, and the likeliest ids
        have ties, which the lowest wins.
        """
        rows = 4096
        sampler = self.make(plugin, device, 2, rows)
        low, high = torch.full((rows,), -16.0), torch.full((rows,), 16.0)
        for _ in range(22):
            middle = (low + high) / 2
            logits = torch.stack([torch.zeros(rows), middle], dim=1).to(device)
            second = torch.tensor(sample(sampler, logits, seed=range(rows), index=[0] * rows)) == 1
            low, high = torch.where(second, low, middle), torch.where(second, middle, high)
        different = len(low.unique())
        assert different > 0.9 * rows, f"{rows} seeds have {different} different noises"

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

    def test_captured_calls_follow_their_inputs(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Calls of two sizes, each captured once; a replay gives what a fresh sampler gives.

        Everything changes between replays but the place of the arguments. On a CPU a recording
        stands for the graph; a sampler that reads values on the host there, where it may, is
        checked on a GPU only.
        """
        _skip_without_graphs(plugin)
        sampler = self.make(plugin, device)
        capture = captured if device.type == "cuda" else recorded
        calls = []
        for entries in (ROWS, 3):
            static = make_arguments(random_logits(entries, device))
            sampler.sample(**static)  # Compiles and picks kernels.
            try:
                calls.append((static, capture(partial(sampler.sample, **static))))
            except HostReadError as error:
                pytest.skip(f"on a CPU, where it may, {error}")
        for number in range(3):
            for static, call in calls:
                live = changed_arguments(len(static["rows_B"]), device, number)
                for name, tensor in live.items():
                    static[name].copy_(tensor)
                perturb(device)
                call.replay()
                self.make(plugin, device).sample(**live)
                assert static["out_B"].tolist() == live["out_B"].tolist(), f"replay {number}"

    def test_a_call_never_waits_for_the_device(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """None that synchronises is made: a captured one could not be."""
        _skip_without_graphs(plugin)
        if device.type != "cuda":
            pytest.skip("on a CPU the host waits for nothing; it is checked on a GPU")
        sampler = self.make(plugin, device)
        arguments = make_arguments(random_logits(ROWS, device), temperature=TEMPERATURES)
        sampler.sample(**arguments)  # Compiles and picks kernels.
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampler.sample(**arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_captured_tensors_stay_where_they_are(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Those that the sampler names are made with it; calls write into them at most."""
        _skip_without_graphs(plugin)
        sampler = self.make(plugin, device)
        before = _addresses(sampler)
        for entries in (1, ROWS, 3):
            sample(sampler, random_logits(entries, device), temperature=TEMPERATURES)
            now = _addresses(sampler)
            moved = sorted(n for n in {*before, *now} if before.get(n) != now.get(n))
            assert not moved, (
                f"{', '.join(moved)} changed place (or were added) in a call of {entries} "
                "entries: allocate them in __init__ and write into them"
            )


def _skip_without_graphs(plugin: PluginUnderTest) -> None:
    assert isinstance(plugin.spec, SamplerSpec)
    if not plugin.spec.cuda_graphs:
        pytest.skip("declares that it cannot be captured")


def _addresses(sampler: Sampler) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in sampler.captured_tensors().items()}


def assert_shares(chosen: Sequence[int], expected: Tensor) -> None:
    """Each id's share of the choices is within five standard deviations of what is expected."""
    shares = torch.bincount(torch.tensor(chosen), minlength=len(expected)) / len(chosen)
    deviation = (expected * (1 - expected) / len(chosen)).sqrt()
    assert ((shares - expected).abs() <= 5 * deviation).all(), (shares, expected)


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
