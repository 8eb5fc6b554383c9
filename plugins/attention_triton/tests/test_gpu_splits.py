"""Split contexts of prompts on a GPU: true sizes, captured graphs, determinism."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanovllm_attention_triton.options import TritonOptions
from nanovllm_kit.attention_checks import run_prefill
from nanovllm_kit.latent_attention import LatentSizes, make_latent_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": (32, 8), "head_size": 128, "block_size": 256},
        {"heads": (16, 2), "head_size": 128, "block_size": 16},
        {"heads": (16, 8), "head_size": 64, "block_size": 64},
        {"heads": (5, 1), "head_size": 80, "block_size": 32},
        {"heads": (8, 4), "head_size": 256, "block_size": 256},
        {"heads": (8, 4), "head_size": 256, "block_size": 16, "window": 4000},
        {"heads": (32, 8), "head_size": 128, "block_size": 256, "cap": 30.0},
    ],
    ids=str,
)
def test_split_contexts_equal_the_reference_at_true_sizes(paged_batch, shape, dtype):
    """A short turn behind a long context, beside others; the same bits in every run."""
    for lens, queries in (
        ([16_016], [16]),
        ([9000, 1, 5, 0, 300, 4100], [100, 1, 5, 0, 60, 3]),
        ([700, 8000], [200, 70]),
    ):
        batch = paged_batch(lens, queries, dtype=dtype, device="cuda", **shape)
        backend = batch.backend()
        out = batch.prefill(backend)
        batch.assert_right(out)
        work = backend._splits
        assert work.items[6, : work.counts[0]].max() > 1
        assert all(torch.equal(out, batch.prefill(backend)) for _ in range(20))


@pytest.mark.parametrize("heads", [(4, 1), (8, 2)])
def test_as_many_splits_as_are_merged_at_once_equal_the_reference(paged_batch, heads):
    """46 to 64 of a row block. In half precision: over so many keys torch's own error in float32,
    to which a batch is held, depends on the order of its sums.
    """
    batch = paged_batch([64_016], [16], heads=heads, head_size=128, block_size=256,
                        dtype=torch.bfloat16, device="cuda")  # fmt: skip
    backend = batch.backend()
    batch.assert_right(batch.prefill(backend))
    assert backend._splits.items[6, 0] > 40


@pytest.mark.parametrize("num_heads", [1, 16, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_latent_contexts_equal_the_reference_at_true_sizes(num_heads, dtype):
    """Prompts over the rows of a latent cache."""
    from nanovllm_attention_triton.backend import TritonAttention

    case = make_latent_case(
        [8016, 1, 700], LatentSizes(), [16, 1, 5], num_heads=num_heads, block_size=64,
        dtype=dtype, device="cuda",
    )  # fmt: skip
    backend = TritonAttention(TritonOptions(), case.config())
    backend.allocate()
    out = run_prefill(backend, case)
    case.assert_close(out)
    assert backend._splits.items[6, 0] > 1
    assert all(torch.equal(out, run_prefill(backend, case)) for _ in range(20))


def test_a_captured_plan_serves_other_lengths_and_every_layer(paged_batch):
    """Replays with contexts that are split otherwise, and with shorter and empty chunks."""
    steps = [
        paged_batch([context + n for n in queries], queries, heads=(32, 8), head_size=128,
                    block_size=256, dtype=torch.bfloat16, device="cuda", seed=context)
        for context, queries in (
            (12_000, [100, 16, 4]), (0, [100, 16, 4]), (3000, [4, 90, 3]), (11_000, [7, 0, 0]),
            (700, [0, 50, 0]),
        )
    ]  # fmt: skip
    first = steps[0]
    backend = first.backend()
    caches = [torch.empty_like(first.k_cache) for _ in range(2)]
    # A copy of the table, which is written below.
    table = first.block_table.clone()
    metadata = replace(first.prefill_metadata(), block_table=table, max_seq_len=20_000)
    q = first.packed_q.clone()
    outs = [torch.empty_like(q) for _ in range(2)]

    def step():
        backend.plan_prefill(metadata)
        for out in outs:
            backend.run_prefill(q, *caches, metadata, out)

    def fill(batch):
        for mine, theirs in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
            mine[: len(theirs)] = theirs
        metadata.block_table[:, : batch.block_table.shape[1]] = batch.block_table
        own = batch.prefill_metadata()
        metadata.seq_lens.copy_(own.seq_lens)
        metadata.query_start_loc.copy_(own.query_start_loc)
        q[: len(batch.packed_q)] = batch.packed_q

    fill(first)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in (*steps, first):
        fill(batch)
        eager = batch.prefill()
        batch.assert_right(eager)
        for _ in range(20):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(out[: len(eager)], eager) for out in outs)
