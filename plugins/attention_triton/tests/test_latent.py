"""Decode over latent rows, interpreted, against float64."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from nanovllm_attention_triton.latent_decode import LatentShape, LatentWorkspace
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.tuning import LatentTuning, latent_tuning

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
    tuning: LatentTuning,
) -> Tensor:  # fmt: skip
    shape = LatentShape(
        num_heads=q.shape[1],
        num_kv_heads=1,
        head_size=v,
        max_num_seqs=len(lens),
        max_seq_len=table.shape[1] * cache.shape[1],
        num_multiprocessors=1,
        rest_size=q.shape[2] - v,
        most_heads=tuning.most_heads,
    )
    workspace = LatentWorkspace(shape, tuning, q.device)
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
