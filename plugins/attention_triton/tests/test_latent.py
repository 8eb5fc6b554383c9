"""Decode over latent rows, interpreted, against float64."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from torch import Tensor

from nanovllm_attention_triton.decode_tuning import LatentTuning, latent_tuning
from nanovllm_attention_triton.hopper_latent import EvenShape, HopperLatentWorkspace
from nanovllm_attention_triton.latent_decode import LatentShape, LatentWorkspace
from nanovllm_attention_triton.options import TritonOptions

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there; see test_gpu_latent.py"
)


def latent_batch(
    lens: list[int],
    heads: int,
    value_size: int,
    rest_size: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, cache, block table, lengths): rows in shuffled blocks, NaN in every unused place."""
    generator = torch.Generator().manual_seed(seed)
    size = value_size + rest_size
    q = torch.randn(len(lens), heads, size, generator=generator).to(dtype)
    counts = [-(-length // block_size) for length in lens]
    order = torch.randperm(sum(counts) + 2, generator=generator).int()
    cache = torch.full((len(order), block_size, 1, size), float("nan"), dtype=dtype)
    table = torch.full((len(lens), max(*counts, 1)), 2**30, dtype=torch.int32)
    taken = 0
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        for token in range(length):
            block = table[row, token // block_size]
            latent = torch.randn(size, generator=generator)
            cache[block, token % block_size, 0] = latent.to(dtype)
    return q, cache, table, torch.tensor(lens, dtype=torch.int32)


def exact(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, scale: float, v: int) -> Tensor:
    """Attention in float64; a row without keys is 0."""
    out = torch.zeros(*q.shape[:2], v, dtype=torch.float64)
    for row, length in enumerate(lens.tolist()):
        if length:
            blocks = table[row, : -(-length // cache.shape[1])].long()
            keys = cache[blocks].flatten(0, 2)[:length].double()
            weights = (q[row].double() @ keys.T * scale).softmax(-1)
            out[row] = weights @ keys[:, :v]
    return out


def decode(
    q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, v: int, scale: float,
    tuning: LatentTuning, kind: type[LatentShape] = LatentShape, num_multiprocessors: int = 1,
) -> Tensor:  # fmt: skip
    shape = kind(
        num_heads=q.shape[1],
        num_kv_heads=1,
        head_size=v,
        max_num_seqs=len(lens),
        max_seq_len=table.shape[1] * cache.shape[1],
        num_multiprocessors=num_multiprocessors,
        rest_size=q.shape[2] - v,
        most_heads=tuning.most_heads,
    )
    make = HopperLatentWorkspace if kind is EvenShape else LatentWorkspace
    workspace = make(shape, tuning, q.device)
    workspace.plan(lens, table, cache.shape[1])
    out = torch.full((*q.shape[:2], v), float("nan"), dtype=q.dtype)
    workspace.run(q, cache, cache[..., :v], table, shape.max_seq_len, scale, out)
    return out


@pytest.mark.parametrize("number", range(12))
def test_decode_over_latent_rows_equals_the_reference(number):
    """Drawn sizes, heads, blocks and lengths; rows of one chunk, of several, and padding."""
    draws = Random(number)
    heads = (1, 5, 16, 128, 17, 2)[number % 6]
    value, rest = draws.choice(((32, 16), (24, 8), (64, 0), (16, 5), (40, 24)))
    block_size = draws.choice((16, 32, 64, 48))
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 64, 65]
    lens = [*draws.sample(edges, 3), draws.randint(66, 300)]
    dtype = draws.choice((torch.float32, torch.float16))
    chunk = draws.choice((None, 64))
    tuning = latent_tuning(dtype.itemsize, heads, TritonOptions(chunk_size=chunk))
    q, cache, table, lengths = latent_batch(lens, heads, value, rest, block_size, dtype, number)
    scale = (value + rest) ** -0.5
    out = decode(q, cache, table, lengths, value, scale, tuning)
    right = exact(q, cache, table, lengths, scale, value)
    torch.testing.assert_close(
        out.double(), right, rtol=0, atol=2e-6 if dtype is torch.float32 else 2e-3
    )


def test_with_fixed_chunks_a_row_has_the_same_bits_in_every_batch():
    """Its chunks are averaged in one order, whether the merge's programs are few or many."""
    tuning = latent_tuning(4, 1, TritonOptions(chunk_size=64))
    others = [1] * 8
    q, cache, table, lengths = latent_batch([1300, *others], 1, 256, 8, 64, torch.float32, 0)
    alone, among = (
        decode(q[:rows], cache, table[:rows], lengths[:rows], 256, 0.1, tuning)
        for rows in (1, 1 + len(others))
    )
    assert torch.equal(alone[0], among[0])


@pytest.mark.parametrize("parts", [1, 3, 8, 40])
def test_an_even_plan_gives_the_same_attention(parts):
    """Rows cut where parts end, several rows in a part, parts without work, padding between."""
    tuning = LatentTuning(tile=16, num_warps=4, num_stages=1, min_chunk=16)
    lens = [33, 0, 1, 100, 0, 16, 250, 0]
    q, cache, table, lengths = latent_batch(lens, 3, 32, 16, 32, torch.float32, parts)
    out = decode(q, cache, table, lengths, 32, 0.2, tuning, EvenShape, parts)
    right = exact(q, cache, table, lengths, 0.2, 32)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("number", range(6))
def test_an_even_plan_gives_every_part_the_same_number_of_tiles(number):
    """Its items cover every row once, in order; a part's are neighbours; the rest have none."""
    draws = Random(number)
    lens = [draws.choice((0, 1, 16, 17, draws.randint(0, 300))) for _ in range(9)]
    parts, least = draws.choice((1, 2, 7, 64)), draws.choice((16, 48))
    shape = EvenShape(
        num_heads=2, num_kv_heads=1, head_size=16, max_num_seqs=9, max_seq_len=320,
        num_multiprocessors=parts, rest_size=16,
    )  # fmt: skip
    tuning = LatentTuning(tile=16, num_warps=4, num_stages=1, min_chunk=least)
    workspace = HopperLatentWorkspace(shape, tuning, torch.device("cpu"))
    table = torch.arange(9 * 10, dtype=torch.int32).view(9, 10)
    workspace.plan(torch.tensor(lens, dtype=torch.int32), table, 32)
    count = int(workspace.num_items)
    assert count <= workspace.capacity
    items = workspace.items[:, :count].T.tolist()
    for row, length in enumerate(lens):
        mine = [item for item in items if item[0] == row]
        first = int(workspace.items[6, row])
        assert items[first : first + len(mine)] == mine
        assert {(item[3], item[4]) for item in mine} == {(first, len(mine))}
        begins, ends = [item[1] for item in mine], [item[2] for item in mine]
        assert (begins[0], ends[-1], begins[1:]) == (0, length, ends[:-1])
        assert all(item[5] == table[row, item[1] // 32] for item in mine if length)
    starts = workspace.part_starts.tolist()
    assert (starts[0], starts[-1]) == (0, count)
    assert starts == sorted(starts)
    tiles = [-(-(end - begin) // 16) for _, begin, end, *_ in items]
    shares = [sum(tiles[a:b]) for a, b in itertools.pairwise(starts)]
    most = max(-(-sum(tiles) // parts), -(-least // 16))
    full, rest = divmod(sum(tiles), most)
    assert shares == ([most] * full + [rest] + [0] * parts)[:parts]
