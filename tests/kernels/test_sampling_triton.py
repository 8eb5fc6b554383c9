"""The Triton sampler gives the reference's tokens: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from nanovllm_core.kernels import sampling_reference, sampling_triton as sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Case:
    """A batch over tables of twice as many rows, in shuffled order."""

    def __init__(self, batch: int, vocab: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(batch * vocab)
        rows = 2 * batch
        self.logits = (torch.randn(batch, vocab, generator=generator) * 2).to(DEVICE, dtype)
        self.rows = torch.randperm(rows, generator=generator)[:batch].int().to(DEVICE)
        temperature = torch.rand(rows, generator=generator) + 0.3
        self.temperature = temperature.masked_fill(torch.arange(rows) % 3 == 0, 0.0).to(DEVICE)
        self.seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator).to(DEVICE)
        index = torch.randint(0, 2**31 - 1, (batch,), generator=generator)
        self.index = index.int().to(DEVICE)
        self.workspace = sampling.SamplingWorkspace(batch, DEVICE)
        self.skip_flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.out = torch.full((batch,), -7, dtype=torch.int32, device=DEVICE)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.logits, self.rows, self.temperature, self.seed, self.index

    def triton(self) -> list[int]:
        sampling.sample_tokens(
            *self.inputs(), self.out, workspace=self.workspace, skip_flag=self.skip_flag
        )
        return self.out.tolist()

    def reference(self) -> list[int]:
        out = torch.empty_like(self.out)
        sampling_reference.sample_tokens(*self.inputs(), out)
        return out.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "vocab"), [(1, 1), (1, 9000), (5, 768), (3, 4097), (40, 61)])
def test_the_kernels_choose_the_tokens_of_the_reference(batch, vocab, dtype):
    case = Case(batch, vocab, dtype)
    assert case.triton() == case.reference()


def test_equal_logits_of_different_tiles_and_splits_give_the_lowest_id(monkeypatch):
    """Half precision leaves many; the lowest id wins over chunks, lanes, tiles and splits."""
    monkeypatch.setattr(sampling, "TARGET_PROGRAMS", 10)
    tile = sampling.TILE
    case = Case(5, 10 * tile)
    assert sampling.num_splits(5, 10 * tile) == 2
    case.temperature.zero_()
    case.logits.fill_(1.0)
    equals = ([4000, 4001], [7 * tile, 50], [tile + 80, 9], [tile + 8, 2 * tile], [16, 9 * tile])
    for entry, ids in enumerate(equals):
        case.logits[entry, ids] = 2.0
    assert case.triton() == [min(ids) for ids in equals]
    case.logits.fill_(1.0)
    assert case.triton() == [0] * 5


@pytest.mark.parametrize("vocab", [5 * sampling.TILE, 5 * sampling.TILE + 1])
def test_a_score_of_a_higher_bound_does_not_hide_a_better_one(vocab, monkeypatch):
    """It is in another lane than the highest bound, and in the same lane of another tile.

    All other logits of the row are too low to win. Where the noise is low, a bound is far above
    its score.
    """
    monkeypatch.setattr(sampling, "TARGET_PROGRAMS", 2)
    case = Case(2, vocab)
    assert sampling.num_splits(2, vocab) == 1
    case.temperature.fill_(1.0)
    case.logits.fill_(-1e4)
    noise = sampling_reference.gumbel_noise(case.seed[case.rows.long()], case.index, vocab)
    lanes = torch.arange(vocab, device=DEVICE) % sampling.TILE // sampling.CHUNK
    expected = []
    for entry in range(2):
        best = int(noise[entry].argmax())
        far = (lanes == lanes[best]) == (entry == 1)
        far &= torch.arange(vocab, device=DEVICE) // sampling.CHUNK != best // sampling.CHUNK
        other = int(noise[entry].masked_fill(~far, math.inf).argmin())
        case.logits[entry, best] = 5.0 - noise[entry, best]
        case.logits[entry, other] = 4.99 - noise[entry, other]
        expected.append(best)
    assert case.triton() == case.reference() == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinite_logits_behave_as_in_the_reference(temperature):
    case = Case(3, 3000)
    case.temperature.fill_(temperature)
    case.logits[0] = math.nan
    case.logits[1] = -math.inf
    case.logits[2] = math.nan
    case.logits[2, 2999] = -5.0
    assert case.triton() == case.reference() == [0, 0, 2999]


@pytest.mark.parametrize(("ranks", "vocab"), [(2, 4097), (3, 61), (4, 9)])
def test_pairs_of_parts_of_the_vocabulary_choose_the_token_of_the_whole(ranks, vocab):
    """Pairs are those of the reference, ids and scores; parts have columns of padding."""
    case = Case(24, vocab)
    case.logits.round_()  # for ties within a part and across
    case.logits[4] = -math.inf
    columns = -(-vocab // ranks)
    pairs = []
    for first in range(0, ranks * columns, columns):
        num_ids = min(columns, max(vocab - first, 0))
        part = torch.full((24, columns), 99.0, device=DEVICE)
        part[:, :num_ids] = case.logits[:, first : first + num_ids]
        inputs = (part, *case.inputs()[1:], first, num_ids)
        own = torch.full((24, 2), -7, dtype=torch.int32, device=DEVICE)
        sampling.best_pairs(*inputs, own, workspace=case.workspace, skip_flag=case.skip_flag)
        expected = sampling_reference.best_pairs(*inputs)
        assert torch.equal(own[:, 1], expected[:, 1])
        greedy = case.temperature[case.rows] == 0
        scores, its_scores = (one[greedy, 0].view(torch.float32) for one in (own, expected))
        assert torch.equal(scores, its_scores), "other scores are in base 2"
        pairs.append(own)
    gathered = torch.cat([*pairs, own], dim=1)[:, : 2 * ranks]  # rows may lie apart
    for rows in (case.rows, torch.where(case.rows == case.rows[2], -1, case.rows)):
        case.rows = rows
        sampling.choose_pair(gathered, rows, case.out, skip_flag=case.skip_flag)
        assert case.out.tolist() == case.reference()
    case.skip_flag.fill_(1)
    case.out.fill_(-7)
    sampling.choose_pair(gathered, case.rows, case.out, skip_flag=case.skip_flag)
    assert case.out.tolist() == [-7] * 24


def test_padded_entries_get_minus_one_and_the_others_their_token():
    case = Case(4, 500)
    expected = case.reference()
    case.rows[1] = case.rows[3] = -1
    assert case.triton() == [expected[0], -1, expected[2], -1]


def test_a_set_skip_flag_leaves_the_output_untouched():
    case = Case(2, 500)
    case.skip_flag.fill_(1)
    assert case.triton() == [-7, -7]
    case.skip_flag.zero_()
    assert case.triton() == case.reference()


def test_a_token_does_not_depend_on_its_place_or_on_the_number_of_splits(monkeypatch):
    case = Case(4, 5 * sampling.TILE)
    case.temperature.fill_(1.0)
    together = case.triton()
    monkeypatch.setattr(sampling, "TARGET_PROGRAMS", 4)
    assert sampling.num_splits(4, 5 * sampling.TILE) == 1
    assert case.triton() == together
    order = [2, 0, 3, 1]
    case.logits, case.rows, case.index = case.logits[order], case.rows[order], case.index[order]
    assert case.triton() == [together[i] for i in order]


@pytest.mark.parametrize("batch", [1, 2, 8, 33, 256, 4096])
@pytest.mark.parametrize("vocab", [1, 768, 32_000, 151_936, 262_144])
def test_splits_cover_the_vocabulary_within_the_workspace(batch, vocab):
    splits, tiles = sampling.num_splits(batch, vocab), sampling.tiles_per_split(batch, vocab)
    width = tiles * sampling.TILE
    assert 1 <= splits <= sampling.MAX_SPLITS
    assert (splits - 1) * width < vocab <= splits * width


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_the_compiled_kernels_agree_with_the_reference_at_full_vocabulary(batch):
    """lg2.approx may turn a near tie: of all entries at most one in a thousand, or one, differs."""
    case = Case(batch, 151_936, torch.bfloat16)
    pairs = list(zip(case.triton(), case.reference(), strict=True))
    assert sum(a != b for a, b in pairs) <= max(1, batch // 1000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_captured_launch_follows_changed_inputs_and_the_skip_flag():
    case = Case(8, 151_936, torch.bfloat16)
    case.triton()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampling.sample_tokens(
            *case.inputs(), case.out, workspace=case.workspace, skip_flag=case.skip_flag
        )
    case.logits.normal_(generator=torch.Generator(DEVICE).manual_seed(5))
    case.index.add_(1)
    graph.replay()
    replayed = case.out.tolist()
    assert replayed == case.triton()
    case.out.fill_(-7)
    case.skip_flag.fill_(1)
    graph.replay()
    assert case.out.tolist() == [-7] * 8
