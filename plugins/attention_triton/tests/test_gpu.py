"""On a GPU: the full matrix of shapes, captured graphs, determinism, a cache beyond 2^31."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_attention_triton import prefill
from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.hopper_prefill import HOPPER
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_core.api import AttentionConfig, DecodeMetadata, PrefillMetadata
from nanovllm_kit.attention_checks import check_replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NORM_LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
BATCHES, LENGTHS = (1, 4, 16, 32), (1, 2, 127, 128, 512, 2048, 4096)
MODELS = list(itertools.product((8, 16, 32), (64, 128), (1, 2, 8)))
BLOCK_SIZE, MAX_LEN = 64, 4096


def make_backend(
    heads, kv_heads, head_size, dtype, *, rows=32, block_size=BLOCK_SIZE, options=None
):
    config = AttentionConfig(
        device=torch.device("cuda"),
        dtype=dtype,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        block_size=block_size,
        max_num_seqs=rows,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=8192,
    )
    backend = TritonAttention(options or TritonOptions(), config)
    backend.allocate()
    return backend


def shuffled_table(rows: int, blocks_per_row: int, num_blocks: int) -> Tensor:
    blocks = torch.randperm(num_blocks, device="cuda")[: rows * blocks_per_row]
    return blocks.int().view(rows, blocks_per_row)


def gathered(cache: Tensor, table: Tensor, tokens: int) -> Tensor:
    """Blocks -> [rows, kv heads, tokens, D]."""
    return cache[table.long()].flatten(1, 2)[:, :tokens].transpose(1, 2)


def reference(q_BHQD: Tensor, k: Tensor, v: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's attention in `dtype`; rows without keys are 0."""
    out = scaled_dot_product_attention(
        q_BHQD.to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask, enable_gqa=True
    )
    return out.double().nan_to_num(0.0)


def check(out: Tensor, exact: Tensor, own: Tensor, label: str) -> None:
    """The limits of conftest's `assert_right`, kept on the device."""
    difference = out.double() - exact
    norm_error = (difference.norm() / exact.norm()).item()
    limit = 2 * (own - exact).abs().max().item()
    if out.dtype is torch.float32:  # both errors are a few roundings; which is larger is chance
        limit += 1e-6 * exact.abs().max().item()
    limit = max(limit, torch.finfo(out.dtype).eps * exact.abs().max().item())
    worst = difference.abs().max().item()
    assert norm_error <= NORM_LIMIT[out.dtype], f"{label}: relative norm error {norm_error:.2e}"
    assert worst <= limit, f"{label}: worst element off by {worst:.2e}, limit {limit:.2e}"


def ragged_lens(rows: int, longest: int) -> Tensor:
    """The longest first, an empty row last, anything between."""
    lens = torch.randint(1, longest + 1, (rows,), device="cuda", dtype=torch.int32)
    lens[0] = longest
    if rows > 1:
        lens[-1] = 0
    return lens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_decode_matrix_equals_the_reference(dtype):
    """Batches × lengths × heads × head sizes × groups, ragged and with an empty row."""
    torch.manual_seed(0)
    for heads, head_size, group in MODELS:
        kv_heads = heads // group
        backend = make_backend(heads, kv_heads, head_size, dtype)
        num_blocks = 32 * MAX_LEN // BLOCK_SIZE
        shape = (num_blocks, BLOCK_SIZE, kv_heads, head_size)
        k_cache, v_cache = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
        for rows, longest in itertools.product(BATCHES, LENGTHS):
            table = shuffled_table(rows, MAX_LEN // BLOCK_SIZE, num_blocks)
            lens = ragged_lens(rows, longest)
            q = torch.randn(rows, heads, head_size, dtype=dtype, device="cuda")
            out = torch.full_like(q, float("nan"))
            metadata = DecodeMetadata(table, lens, max_seq_len=MAX_LEN)
            backend.plan_decode(metadata)
            backend.run_decode(q, k_cache, v_cache, metadata, out)
            k, v = (gathered(x, table, longest) for x in (k_cache, v_cache))
            mask = torch.arange(longest, device="cuda") < lens[:, None, None, None]
            exact, own = (
                reference(q[:, :, None], k, v, mask, kind)[:, :, 0]
                for kind in (torch.float64, dtype)
            )
            label = f"{rows} x {longest}, heads {heads}/{kv_heads}, head size {head_size}"
            check(out, exact, own, label)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [
        *((*heads, size) for heads in ((8, 4), (4, 1), (16, 16)) for size in (192, 256)),
        *((32, 8, 64), (14, 2, 64), (16, 16, 64)),
        *((28, 4, 128), (32, 2, 128)),
    ],
)
def test_steps_of_every_number_of_rows_equal_the_reference(heads, kv_heads, head_size):
    """By each of their constants: of one row to those of many."""
    torch.manual_seed(0)
    backend = make_backend(heads, kv_heads, head_size, torch.bfloat16, rows=256)
    longest, per_row = 700, -(-700 // BLOCK_SIZE)
    shape = (256 * per_row, BLOCK_SIZE, kv_heads, head_size)
    k_cache, v_cache = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert len(backend.decode_tunings) > 1
    for rows, tuning in backend.decode_tunings:
        table, lens = shuffled_table(rows, per_row, 256 * per_row), ragged_lens(rows, longest)
        q = torch.randn(rows, heads, head_size, dtype=torch.bfloat16, device="cuda")
        out = torch.full_like(q, float("nan"))
        metadata = DecodeMetadata(table, lens, max_seq_len=longest)
        backend.plan_decode(metadata)
        backend.run_decode(q, k_cache, v_cache, metadata, out)
        k, v = (gathered(x, table, longest) for x in (k_cache, v_cache))
        mask = torch.arange(longest, device="cuda") < lens[:, None, None, None]
        exact, own = (
            reference(q[:, :, None], k, v, mask, kind)[:, :, 0]
            for kind in (torch.float64, torch.bfloat16)
        )
        check(out, exact, own, f"{rows} rows by {tuning}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_prefill_matrix_equals_the_reference(dtype):
    """Whole prompts and chunks behind a context, ragged, every head count, size and group."""
    torch.manual_seed(0)
    for heads, head_size, group in MODELS:
        kv_heads = heads // group
        backend = make_backend(heads, kv_heads, head_size, dtype)
        num_blocks = 4 * 2048 // BLOCK_SIZE
        shape = (num_blocks, BLOCK_SIZE, kv_heads, head_size)
        k_cache, v_cache = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
        for rows, queries, context in ((1, 127, 0), (4, 128, 0), (4, 65, 512), (1, 512, 1500)):
            longest = queries + context
            table = shuffled_table(rows, 2048 // BLOCK_SIZE, num_blocks)
            query_lens = ragged_lens(rows, queries)
            lens = query_lens + context
            starts = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
            starts[1:] = query_lens.cumsum(0)
            packed = torch.randn(int(starts[-1]), heads, head_size, dtype=dtype, device="cuda")
            out = torch.full_like(packed, float("nan"))
            metadata = PrefillMetadata(table, lens, starts, queries, longest)
            backend.plan_prefill(metadata)
            backend.run_prefill(packed, k_cache, v_cache, metadata, out)
            # Dense: queries padded to [rows, H, queries, D], each row's at the front.
            steps = torch.arange(queries, device="cuda")
            real = steps < query_lens[:, None]
            dense = packed.new_zeros(rows, queries, heads, head_size)
            dense[real] = packed
            keys = torch.arange(longest, device="cuda")
            mask = (keys <= context + steps[:, None]) & (keys < lens[:, None, None])
            k, v = (gathered(x, table, longest) for x in (k_cache, v_cache))
            exact, own = (
                reference(dense.transpose(1, 2), k, v, mask[:, None], kind).transpose(1, 2)[real]
                for kind in (torch.float64, dtype)
            )
            label = f"{rows} x {queries} after {context}, heads {heads}/{kv_heads}, {head_size}"
            check(out, exact, own, label)


@pytest.mark.parametrize("block_size", [16, 32, 128, 256])
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (4, 4), (80, 1)])
def test_blocks_groups_and_needles_equal_the_reference(paged_batch, heads, block_size):
    """Poisoned blocks, a needle in every awkward place, decode cut in chunks, and prefill."""
    needles = [0, 15, 16, 63, 64, 127, 128, 255, 256, 299]
    for options in (TritonOptions(), TritonOptions(chunk_size=64)):
        batch = paged_batch(
            [300] * 10, heads=heads, block_size=block_size, needles=needles, head_size=128,
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        batch.assert_right(batch.decode(batch.backend(options)))
    chunks = paged_batch(
        [300, 0, 64, 129], [200, 0, 1, 129], heads=heads, block_size=block_size, head_size=64,
        dtype=torch.float16, device="cuda",
    )  # fmt: skip
    chunks.assert_right(chunks.prefill())


@pytest.fixture
def hopper_kernel_only(monkeypatch):
    """However little there is to do, the kernel for Hopper does it; the other one does nothing."""
    monkeypatch.setattr(prefill, "prefill_kernel", defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setattr(prefill, "HOPPER_BLOCKS", 0)
    monkeypatch.setattr(prefill, "HOPPER_QUERIES", 0)


HOPPER_ONLY = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != HOPPER,
    reason="the kernel of Hopper GPUs",
)


@HOPPER_ONLY
@pytest.mark.parametrize(
    ("heads", "dtype", "block_size"),
    [
        ((4, 2), torch.bfloat16, 256),
        ((4, 4), torch.float16, 128),
        ((10, 2), torch.bfloat16, 512),
        ((8, 1), torch.float16, 128),
        ((6, 2), torch.bfloat16, 256),
        ((16, 16), torch.float16, 256),
        ((36, 36), torch.bfloat16, 128),
    ],
)
def test_the_hopper_kernel_equals_the_reference(
    paged_batch, hopper_kernel_only, heads, dtype, block_size
):
    """Lengths around every tile, chunks behind a context, no queries, NaN in every unused place."""
    seq_lens = [1, 127, 128, 129, 0, 255, 256, 300, 1000, 513, 64]
    query_lens = [1, 127, 128, 1, 0, 255, 256, 200, 1000, 130, 0]
    batch = paged_batch(
        seq_lens, query_lens, heads=heads, head_size=128, block_size=block_size, dtype=dtype,
        device="cuda",
    )  # fmt: skip
    batch.assert_right(batch.prefill())


@HOPPER_ONLY
def test_programs_of_the_hopper_kernel_take_several_blocks_of_rows(paged_batch, hopper_kernel_only):
    """More work than multiprocessors: barriers and buffers are used again. Runs are equal."""
    lens = [*range(1, 900, 37), 3000]
    batch = paged_batch(lens, lens, heads=(16, 8), head_size=128, block_size=256,
                        dtype=torch.bfloat16, device="cuda")  # fmt: skip
    first = batch.prefill()
    batch.assert_right(first)
    assert all(torch.equal(batch.prefill(), first) for _ in range(20))


@HOPPER_ONLY
def test_a_captured_launch_of_the_hopper_kernel_follows_changed_lengths(
    paged_batch, hopper_kernel_only
):
    """The launch is made for all tokens of a step; fewer and shorter prompts leave work empty."""
    batch = paged_batch([700, 300, 513], [700, 300, 513], heads=(16, 8), head_size=128,
                        block_size=256, dtype=torch.bfloat16, device="cuda")  # fmt: skip
    backend, metadata, q = batch.backend(), batch.prefill_metadata(), batch.packed_q
    out = torch.full_like(q, float("nan"))
    backend.plan_prefill(metadata)
    backend.run_prefill(q, batch.k_cache, batch.v_cache, metadata, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.plan_prefill(metadata)
        backend.run_prefill(q, batch.k_cache, batch.v_cache, metadata, out)
    for lens in ([700, 300, 513], [5, 0, 300], [0, 0, 1], [129, 128, 127]):
        starts = [sum(lens[:row]) for row in range(4)]
        metadata.seq_lens.copy_(torch.tensor(lens))
        metadata.query_start_loc.copy_(torch.tensor(starts))
        q.normal_()
        out.fill_(float("nan"))
        graph.replay()
        now = replace(
            batch,
            q=list(q[: starts[-1]].split(lens)),
            k=[k[:length] for k, length in zip(batch.k, lens, strict=True)],
            v=[v[:length] for v, length in zip(batch.v, lens, strict=True)],
        )
        now.assert_right(out[: starts[-1]])
        assert out[starts[-1] :].isnan().all()


def test_replay_with_changed_inputs_equals_eager_bitwise():
    """Several buckets share one workspace; the allocator is disturbed in between (bug 22)."""
    torch.manual_seed(0)
    dtype, heads, kv_heads, head_size = torch.bfloat16, 16, 8, 128
    backend = make_backend(heads, kv_heads, head_size, dtype)
    num_blocks = 32 * MAX_LEN // BLOCK_SIZE
    shape = (num_blocks, BLOCK_SIZE, kv_heads, head_size)
    caches = [
        tuple(torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2)) for _ in range(2)
    ]
    steps = {}
    for rows in (1, 4, 16, 32):
        metadata = DecodeMetadata(
            torch.zeros(rows, MAX_LEN // BLOCK_SIZE, dtype=torch.int32, device="cuda"),
            torch.zeros(rows, dtype=torch.int32, device="cuda"),
            max_seq_len=MAX_LEN,
        )
        q = torch.zeros(rows, heads, head_size, dtype=dtype, device="cuda")
        outs = [torch.zeros_like(q) for _ in caches]

        def step(metadata=metadata, q=q, outs=outs):
            backend.plan_decode(metadata)
            for (k, v), out in zip(caches, outs, strict=True):
                backend.run_decode(q, k, v, metadata, out)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        steps[rows] = (graph, step, metadata, q, outs)
    addresses = {n: t.data_ptr() for n, t in backend.captured_tensors().items()}
    for longest in (1, 700, MAX_LEN):
        for rows, (graph, step, metadata, q, outs) in steps.items():
            metadata.block_table.copy_(shuffled_table(rows, MAX_LEN // BLOCK_SIZE, num_blocks))
            metadata.seq_lens.copy_(ragged_lens(rows, longest))
            q.normal_()
            junk = [torch.full((size,), float("nan"), device="cuda") for size in (10, 10**6, 10**7)]
            graph.replay()
            replayed = [out.clone() for out in outs]
            del junk
            for out in outs:
                out.fill_(float("nan"))
            step()
            for eager, replay in zip(outs, replayed, strict=True):
                assert torch.equal(eager, replay)
                assert replay.isfinite().all()
            assert not torch.equal(*replayed)
    assert addresses == {n: t.data_ptr() for n, t in backend.captured_tensors().items()}


def test_who_arrives_last_does_not_change_a_bit(paged_batch):
    """300 runs of rows in many chunks: one result, and tickets back at zero."""
    batch = paged_batch([4000, 777, 64, 1500], heads=(16, 8), head_size=128,
                        dtype=torch.bfloat16, device="cuda")  # fmt: skip
    backend = batch.backend(TritonOptions(chunk_size=64))
    first = batch.decode(backend)
    batch.assert_right(first)
    metadata, q, again = batch.decode_metadata(), batch.packed_q, torch.empty_like(first)
    for _ in range(300):
        again.fill_(float("nan"))
        backend.run_decode(q, batch.k_cache, batch.v_cache, metadata, again)
        assert torch.equal(again, first)
    tickets = [t for n, t in backend.captured_tensors().items() if "tickets" in n]
    assert tickets
    assert not any(t.any() for t in tickets)


def test_blocks_beyond_2_to_the_31_elements_are_read_right():
    """Decode and prefill from the highest blocks of a cache of more than 2^31 elements."""
    torch.manual_seed(0)
    block_size, kv_heads, head_size = 256, 8, 128
    num_blocks = 2**31 // (block_size * kv_heads * head_size) + 64
    k_cache, v_cache = (
        torch.zeros(
            num_blocks, block_size, kv_heads, head_size, dtype=torch.bfloat16, device="cuda"
        )
        for _ in range(2)
    )
    last = torch.arange(num_blocks - 16, num_blocks, dtype=torch.int32, device="cuda")
    table = last.flip(0)[None]
    for cache in (k_cache, v_cache):
        cache[-16:].normal_()
    backend = make_backend(16, kv_heads, head_size, torch.bfloat16, rows=1, block_size=block_size)
    lens = torch.tensor([4000], dtype=torch.int32, device="cuda")
    q = torch.randn(1, 16, head_size, dtype=torch.bfloat16, device="cuda")
    k, v = (gathered(x, table, 4000) for x in (k_cache, v_cache))
    mask = torch.ones(1, 4000, dtype=torch.bool, device="cuda")
    exact, own = (
        reference(q[:, :, None], k, v, mask, kind)[:, :, 0]
        for kind in (torch.float64, torch.bfloat16)
    )
    metadata = DecodeMetadata(table, lens, max_seq_len=MAX_LEN)
    out = torch.empty_like(q)
    backend.plan_decode(metadata)
    backend.run_decode(q, k_cache, v_cache, metadata, out)
    check(out, exact, own, "decode")
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    prefill = PrefillMetadata(table, lens, starts, 1, 4000)
    backend.plan_prefill(prefill)
    backend.run_prefill(q, k_cache, v_cache, prefill, out)
    check(out, exact, own, "prefill")


REACH = [
    *((size, None, None, 128, torch.bfloat16) for size in (8, 40, 59, 80, 96, 160, 192, 256)),
    *((size, 100, 20.0, 128, torch.bfloat16) for size in (64, 80, 96, 128, 256)),
    *((size, 100, None, 16, torch.bfloat16) for size in (64, 80, 128, 256)),
    (128, None, 20.0, 128, torch.bfloat16),
    (256, 100, None, 16, torch.float16),
    (111, 100, 20.0, 16, torch.float16),
    (80, 100, 20.0, 16, torch.float32),
    (256, 100, 20.0, 16, torch.float32),
]
"""Head size, window, soft cap, block size, dtype: few, for each case compiles its own kernels."""


@pytest.mark.parametrize(("head_size", "window", "cap", "block_size", "dtype"), REACH)
def test_head_sizes_windows_and_soft_caps_equal_the_reference(
    paged_batch, head_size, window, cap, block_size, dtype
):
    """Decode in one chunk and in several, prefill by either way to load a tile, NaN all around."""
    shape = {
        "heads": (8, 2), "head_size": head_size, "block_size": block_size, "dtype": dtype,
        "device": "cuda", "window": window, "cap": cap,
    }  # fmt: skip
    rows = paged_batch([900, 0, 1, 99, 100, 101, 500], **shape)
    for options in (TritonOptions(), TritonOptions(chunk_size=64)):
        rows.assert_right(rows.decode(rows.backend(options)))
    chunks = paged_batch([600, 0, 129, 64], [300, 0, 129, 1], **shape)
    chunks.assert_right(chunks.prefill())


@pytest.mark.parametrize("window", [1, 100])
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 80), (256, 128)])
def test_windows_end_at_the_exact_key(paged_batch, window, block_size, head_size):
    """A needle at the window's first key is all that is seen; one right before it is not seen."""
    for needle in (300 - window, 299 - window):
        shape = {
            "head_size": head_size, "block_size": block_size, "dtype": torch.bfloat16,
            "device": "cuda",
            "window": window, "needles": [needle] * 2,
        }  # fmt: skip
        rows = paged_batch([300, 300], **shape)
        rows.assert_right(rows.decode())
        chunks = paged_batch([300, 300], [120, 300], **shape)
        chunks.assert_right(chunks.prefill())


@pytest.mark.parametrize(
    ("head_size", "window", "cap"), [(128, 100, None), (80, 300, 20.0), (256, 33, None)]
)
def test_replay_with_a_window_follows_changed_inputs(head_size, window, cap):
    """Lengths cross the window's edge between replays; each equals eager to the bit."""

    def make(config: AttentionConfig) -> TritonAttention:
        return TritonAttention(TritonOptions(), config)

    check_replay(
        make, block_size=64, dtype=torch.bfloat16, plan_is_captured=True, head_size=head_size,
        sliding_window=window, soft_cap=cap,
    )  # fmt: skip
