"""The conformance suite of samplers: on a CPU, and on a GPU where the plugin declares it.

Shape suffixes as in `nanovllm_core.interfaces.sampler`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from nanovllm_core.interfaces.sampler import Sampler, SamplerContext
from nanovllm_core.interfaces.specs import SamplerSpec
from nanovllm_kit.attention_replay import captured, perturb, recorded
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.recording import HostReadError
from nanovllm_kit.sampler_calls import (
    HUGE,
    RARE_LEAST,
    RARE_LOGIT,
    RARE_ROWS,
    ROWS,
    SEED,
    TAIL,
    TEMPERATURES,
    VOCAB,
    WIDE,
    assert_mean,
    assert_shares,
    changed_arguments,
    choose,
    make_arguments,
    random_logits,
    sample,
)

SEED_BITS = 63
"""Of a seed: the engine's are from 0 to 2**63 - 1."""
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

    def test_a_choice_is_the_same_in_every_row(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """A preempted request may come back in another row of the tables.

        All requests change their rows. Then equal requests have all rows at once.
        """
        logits = random_logits(ROWS, device)
        seeds = [SEED + 7 * row for row in range(ROWS)]
        sampler = self.make(plugin, device)
        before = sample(sampler, logits, temperature=TEMPERATURES, seed=seeds)
        order = [5, 0, 7, 2, 1, 6, 3, 4]
        moved = sample(
            sampler,
            logits[order],
            temperature=[TEMPERATURES[i] for i in order],
            seed=[seeds[i] for i in order],
            index=[3 + i for i in order],
        )
        assert moved == [before[i] for i in order]
        equal = choose(self.make(plugin, device, WIDE), device, [SEED] * ROWS, [0] * ROWS)
        assert len(set(equal)) == 1, f"equal requests in {ROWS} rows get {equal}"

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
        changes once in 10**11 times. All go through one row, one call each.
        """
        seeds = [SEED, *(SEED ^ 1 << bit for bit in range(SEED_BITS))]
        indices = [5, *(5 ^ 1 << bit for bit in range(INDEX_BITS))]
        sampler = self.make(plugin, device, WIDE, 1)

        def chosen(seed: int, index: int) -> int:
            return choose(sampler, device, [seed], [index])[0]

        by_seed = [[chosen(seed, i) for seed in seeds] for i in range(3)]
        by_index = [[chosen(SEED + i, index) for index in indices] for i in range(3)]
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
        """Over 8192 seeds each id's share is within `DEVIATIONS` of what it should be.

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

    def test_temperatures_of_three_decades_divide_the_logits(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """From 0.05 to 50, over 16,384 draws: ids beyond the 50 likeliest have their share, and so
        have the least likely ones that have a hundredth together.

        Each row's logits are such that all rows have one distribution, with a long tail. Shown by
        the mean of log-probabilities, at all temperatures (where 5 % of scale are 11 standard
        deviations) and at those of each of eight parts, so that a temperature that is taken for
        another one shows.
        """
        draws, parts = 16_384, 8
        ranks_V = (torch.arange(TAIL) * 7 + 3) % TAIL  # 0 is the likeliest.
        z_V = -(ranks_V + 1.0).log()
        temperature_B = 0.05 * 1000 ** torch.linspace(0, 1, draws)
        chosen = sample(
            self.make(plugin, device, TAIL, draws),
            (z_V * temperature_B[:, None]).to(device),
            temperature=temperature_B.tolist(),
            seed=range(draws),
            index=[0] * draws,
        )
        p_V = z_V.double().softmax(-1)
        last_V = p_V[ranks_V.argsort()].flip(0).cumsum(0).flip(0)[ranks_V] <= 0.01
        for what, value_V in (
            ("the share of the least likely hundredth", last_V.double()),
            ("the share of ids beyond the 50 likeliest", (ranks_V >= 50).double()),
            ("logit / temperature of the chosen ids", z_V.double()),
        ):
            mean = (p_V * value_V).sum().item()
            deviation = (p_V * (value_V - mean).square()).sum().sqrt().item()
            values_B = value_V[chosen]
            assert_mean(values_B, mean, deviation, what)
        for part, values in enumerate(values_B.chunk(parts)):
            first, last = temperature_B.chunk(parts)[part][[0, -1]].tolist()
            where = f"at temperatures from {first:.2g} to {last:.2g}, {what}"
            assert_mean(values, mean, deviation, where)

    def test_rare_ids_of_a_large_vocabulary_are_chosen(
        self, plugin: PluginUnderTest, device: torch.device
    ) -> None:
        """Each has a probability of one in a million; together 262,143 of them have 30 %.

        Noise made from uniform numbers of 16 bits reaches none of them. In four calls.
        """
        calls, rows = 4, RARE_ROWS // 4
        sampler = self.make(plugin, device, HUGE, rows)
        logits = torch.full((rows, HUGE), RARE_LOGIT, device=device)
        logits[:, 77] = 0.0
        chosen = [
            chosen
            for call in range(calls)
            for chosen in sample(
                sampler, logits, seed=range(rows * call, rows * (call + 1)), index=[0] * rows
            )
        ]
        rare = sum(one != 77 for one in chosen)
        assert rare >= RARE_LEAST, (
            f"{rare} of {RARE_ROWS} draws are ids with a probability of one in a million, which "
            f"have 30 % together: at least {RARE_LEAST} are expected; make the noise from uniform "
            "numbers of 24 bits or more"
        )

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
