"""Bugs planted in a sampler: the suite catches each by the check that names the matter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.sampler import Sampler, SamplerContext
from nanovllm_core.interfaces.specs import NoOptions, SamplerSpec
from nanovllm_core.kernels.sampling_reference import gumbel_noise
from nanovllm_kit import PluginUnderTest, SamplerConformance
from nanovllm_kit.recording import ReplayError

CPU = torch.device("cpu")
SPEC = SamplerSpec(
    name="planted",
    impl="a:B",
    contract=1,
    devices=frozenset({"cpu", "cuda"}),
    cuda_graphs=True,
)


class Honest(Sampler):
    """The Gumbel-max trick in pieces, of which each bug replaces one; it can be captured."""

    def __init__(self, options: Any, context: SamplerContext) -> None:
        super().__init__(options, context)
        self.ids_V = torch.arange(context.vocab_size, device=context.device)

    def seen(self, logits_BV: Tensor) -> Tensor:
        return logits_BV

    def temperature(self, temperature_R: Tensor, rows_B: Tensor) -> Tensor:
        return temperature_R[rows_B]

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        return gumbel_noise(seed_B, index_B, self.context.vocab_size)

    def scores(self, logits_BV: Tensor, temperature_B1: Tensor, noise_BV: Tensor) -> Tensor:
        return logits_BV.float() / temperature_B1 + noise_BV

    def sample(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        logits_BV = self.seen(logits_BV)
        row_B = rows_B.clamp(min=0)
        temperature_B1 = self.temperature(temperature_R, row_B)[:, None]
        greedy_B1 = temperature_B1 == 0
        noise_BV = self.noise(seed_R[row_B], output_index_B, row_B)
        drawn_BV = self.scores(logits_BV, temperature_B1.masked_fill(greedy_B1, 1.0), noise_BV)
        scores_BV = torch.where(greedy_B1, logits_BV.float(), drawn_BV)
        best_B1 = scores_BV.amax(dim=1, keepdim=True)
        others_BV = scores_BV != best_B1
        ids_BV = self.ids_V.expand_as(scores_BV).masked_fill(others_BV, len(self.ids_V))
        out_B.copy_(torch.where(rows_B < 0, -1, ids_BV.amin(dim=1)))

    def captured_tensors(self) -> Mapping[str, Tensor]:
        return {"ids": self.ids_V}


class TemperatureByPlace(Honest):
    """What is the row's is looked up by its place in the batch."""

    def temperature(self, temperature_R: Tensor, rows_B: Tensor) -> Tensor:
        return temperature_R[: len(rows_B)]


class FirstDecidesGreedy(Honest):
    """All are greedy where the first is."""

    def temperature(self, temperature_R: Tensor, rows_B: Tensor) -> Tensor:
        own_B = temperature_R[rows_B]
        return torch.where(own_B[:1] == 0, 0.0, own_B.clamp(min=0.1))


class NoiseOfTheRow(Honest):
    """Noise is kept by row and output index, whoever has the row."""

    def __init__(self, options: Any, context: SamplerContext) -> None:
        super().__init__(options, context)
        self.kept: dict[tuple[int, int], Tensor] = {}

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        fresh_BV = super().noise(seed_B, index_B, rows_B)
        keys = zip(rows_B.tolist(), index_B.tolist(), strict=True)
        kept = [self.kept.setdefault(key, noise) for key, noise in zip(keys, fresh_BV, strict=True)]
        return torch.stack(kept)


class RowForSeed(Honest):
    """Seeds are ignored: each row has noise of its own."""

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        return super().noise(rows_B.long() * 1000003 + 12345, index_B, rows_B)


class SeedAndRow(Honest):
    """A request that comes back in another row goes on with other noise."""

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        return super().noise(seed_B ^ (rows_B.long() * 1000003 << 20), index_B, rows_B)


class SeedPlusIndex(Honest):
    """Seed 8 at output 1 draws as seed 9 at output 0."""

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        return super().noise(seed_B + index_B, torch.zeros_like(index_B), rows_B)


class LowSeed(Honest):
    """Some bits of the seed are dropped."""

    bits = 16

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        return super().noise(seed_B & ((1 << self.bits) - 1), index_B, rows_B)


class HalfASeed(LowSeed):
    bits = 32


class LowIndex(Honest):
    """Output 256 draws as output 0."""

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        return super().noise(seed_B, index_B & 0xFF, rows_B)


class OneBlock(Honest):
    """Ids from 1024 on are never chosen."""

    def seen(self, logits_BV: Tensor) -> Tensor:
        logits_BV = logits_BV.clone()
        logits_BV[:, 1024:] = -torch.inf
        return logits_BV


class OneBlockOfNoise(Honest):
    """Every 1024 ids get the same noise, so that of equal ones the first block's win."""

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        return super().noise(seed_B, index_B, rows_B)[:, self.ids_V % 1024]


class NoiseInBfloat16(Honest):
    """Rounded before it is added, in float32."""

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        return super().noise(seed_B, index_B, rows_B).bfloat16().float()


class ScoresInTheLogitsDtype(Honest):
    """The sum is rounded to what the model computes in."""

    def scores(self, logits_BV: Tensor, temperature_B1: Tensor, noise_BV: Tensor) -> Tensor:
        scores_BV = super().scores(logits_BV, temperature_B1, noise_BV)
        return scores_BV.to(logits_BV.dtype).float()


class Likeliest50(Honest):
    """Only the 50 likeliest ids are drawn, unasked."""

    def seen(self, logits_BV: Tensor) -> Tensor:
        least_B1 = logits_BV.topk(min(50, logits_BV.shape[1])).values[:, -1:]
        return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


class NeverCold(Honest):
    """Temperatures below 0.3 are taken for 0.3."""

    least, most = 0.3, float("inf")

    def temperature(self, temperature_R: Tensor, rows_B: Tensor) -> Tensor:
        own_B = temperature_R[rows_B]
        return torch.where(own_B == 0, own_B, own_B.clamp(self.least, self.most))


class Likeliest99(Honest):
    """Never takes the least likely ids that have a hundredth together."""

    def scores(self, logits_BV: Tensor, temperature_B1: Tensor, noise_BV: Tensor) -> Tensor:
        p_BV, ids_BV = (logits_BV.float() / temperature_B1).softmax(-1).sort(stable=True)
        lost_BV = torch.zeros_like(p_BV, dtype=torch.bool)
        lost_BV.scatter_(1, ids_BV, p_BV.cumsum(1) <= 0.01)
        return super().scores(logits_BV, temperature_B1, noise_BV).masked_fill(lost_BV, -torch.inf)


class NeverHot(NeverCold):
    """Temperatures above 3 are taken for 3."""

    least, most = 0.0, 3.0


class NeverWarm(NeverCold):
    """Temperatures above 2 are taken for 2."""

    least, most = 0.0, 2.0


class TooSharp(Honest):
    """Logits are a twentieth too large."""

    factor = 1.05

    def scores(self, logits_BV: Tensor, temperature_B1: Tensor, noise_BV: Tensor) -> Tensor:
        return super().scores(logits_BV * self.factor, temperature_B1, noise_BV)


class TooFlat(TooSharp):
    """Logits are a twentieth too small."""

    factor = 0.95


class UniformsOf16Bits(Honest):
    """Noise is made from whole numbers below 2**16."""

    def noise(self, seed_B: Tensor, index_B: Tensor, rows_B: Tensor) -> Tensor:
        uniform_BV = (-(-super().noise(seed_B, index_B, rows_B)).exp()).exp()
        whole_BV = (uniform_BV * 65536).floor().clamp(max=65535)
        return -(-((whole_BV + 0.5) / 65536).log()).log()


class WaitsForTheDevice(Honest):
    """Reads on the host whether any row draws."""

    def temperature(self, temperature_R: Tensor, rows_B: Tensor) -> Tensor:
        own_B = temperature_R[rows_B]
        return own_B if own_B.max().item() > 0 else torch.zeros_like(own_B)


class BufferOfTheBatch(Honest):
    """Makes a buffer anew where the batch has another size, and drops the one before."""

    def __init__(self, options: Any, context: SamplerContext) -> None:
        super().__init__(options, context)
        self.buffer = torch.empty(0, device=context.device)

    def scores(self, logits_BV: Tensor, temperature_B1: Tensor, noise_BV: Tensor) -> Tensor:
        if self.buffer.shape != logits_BV.shape:
            self.buffer = torch.empty_like(noise_BV)
        return torch.add(logits_BV.float() / temperature_B1, noise_BV, out=self.buffer)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        return {"buffer": self.buffer}


class TemperatureOfTheFirstCall(Honest):
    """Computes on the first call what changes with each."""

    kept: Mapping[int, Tensor] = {}

    def temperature(self, temperature_R: Tensor, rows_B: Tensor) -> Tensor:
        self.kept = {len(rows_B): temperature_R[rows_B], **self.kept}
        return self.kept[len(rows_B)]


SHARES = "test_ids_come_as_often_as_the_softmax_says"
BITS = "test_every_bit_of_seed_and_output_index_changes_the_noise"
NEIGHBOURS = "test_a_choice_depends_on_no_neighbour"
DECADES = "test_temperatures_of_three_decades_divide_the_logits"
EVERY_ROW = "test_a_choice_is_the_same_in_every_row"
REPLAYS = "test_captured_calls_follow_their_inputs"
BUGS: list[tuple[type[Honest], str]] = [
    (TemperatureByPlace, NEIGHBOURS),
    (FirstDecidesGreedy, NEIGHBOURS),
    (NoiseOfTheRow, "test_a_new_sampler_goes_on_as_the_old_one_would_have"),
    (RowForSeed, EVERY_ROW),
    (RowForSeed, BITS),
    (SeedAndRow, EVERY_ROW),
    (SeedPlusIndex, "test_neighbouring_seeds_share_no_noise"),
    (LowSeed, BITS),
    (HalfASeed, BITS),
    (LowIndex, BITS),
    (OneBlock, "test_the_last_ids_of_a_wide_vocabulary_are_chosen"),
    (OneBlockOfNoise, "test_each_part_of_a_wide_vocabulary_has_its_share"),
    (NoiseInBfloat16, "test_noise_is_finer_than_bfloat16"),
    (ScoresInTheLogitsDtype, SHARES),
    (Likeliest50, DECADES),
    (Likeliest99, DECADES),
    (NeverCold, DECADES),
    (NeverHot, DECADES),
    (NeverWarm, DECADES),
    (TooSharp, DECADES),
    (TooFlat, DECADES),
    (UniformsOf16Bits, "test_rare_ids_of_a_large_vocabulary_are_chosen"),
    (BufferOfTheBatch, REPLAYS),
    (BufferOfTheBatch, "test_captured_tensors_stay_where_they_are"),
    (TemperatureOfTheFirstCall, REPLAYS),
]


class Planted(PluginUnderTest):
    """A sampler of this file, as a plugin."""

    sampler: type[Honest]

    def load(self) -> Any:
        return self.sampler


def plugin(sampler: type[Honest]) -> PluginUnderTest:
    one = type("One", (Planted,), {"sampler": sampler})
    made: PluginUnderTest = one(SPEC, NoOptions(), "a")
    return made


def cases(check: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """Each set of a check's parameters, as pytest would give them."""
    sets: list[dict[str, Any]] = [{}]
    for mark in getattr(check, "pytestmark", []):
        name, values = mark.args
        sets = [{**one, name: value} for one in sets for value in values]
    yield from sets


def run(sampler: type[Honest], check: str, device: torch.device = CPU) -> None:
    """A check of the suite, on this sampler."""
    method = getattr(SamplerConformance(), check)
    for case in cases(method):
        method(plugin(sampler), device, **case)


@pytest.mark.parametrize(("planted", "check"), BUGS, ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_bug_is_caught(planted: type[Honest], check: str) -> None:
    """By the check that is about it."""
    with pytest.raises((AssertionError, ReplayError)):
        run(planted, check)


def test_a_sampler_without_a_bug_passes() -> None:
    """Every check that takes a device; the others ask for the plugin's files."""
    checks = [
        name
        for name, method in inspect.getmembers(SamplerConformance, inspect.isfunction)
        if name.startswith("test_") and "device" in inspect.signature(method).parameters
    ]
    assert {check for _, check in BUGS} < {*checks}
    for check in checks:
        if check != "test_a_call_never_waits_for_the_device":
            run(Honest, check)


def test_a_value_that_is_read_on_a_cpu_is_no_bug() -> None:
    """There is nothing to wait for; the reason says where it is checked."""
    with pytest.raises(pytest.skip.Exception, match=r"on a CPU, where it may, .*item reads"):
        run(WaitsForTheDevice, REPLAYS)
    with pytest.raises(pytest.skip.Exception, match="checked on a GPU"):
        run(WaitsForTheDevice, "test_a_call_never_waits_for_the_device")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_value_that_is_read_on_the_host_is_caught_on_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="synchronizing"):
        run(WaitsForTheDevice, "test_a_call_never_waits_for_the_device", torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_catch_what_recordings_do() -> None:
    """And pass what can be captured."""
    cuda = torch.device("cuda")
    for check in (REPLAYS, "test_a_call_never_waits_for_the_device"):
        run(Honest, check, cuda)
    with pytest.raises(AssertionError):
        run(TemperatureOfTheFirstCall, REPLAYS, cuda)
