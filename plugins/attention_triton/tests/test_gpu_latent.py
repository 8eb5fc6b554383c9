"""Latent attention on a GPU: true sizes, both decode kernels, captured graphs, determinism."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
import torch

from nanovllm_attention_triton import packed
from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.hopper_prefill import on_hopper
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_core.api import UnsupportedError
from nanovllm_kit.attention_checks import run_prefill
from nanovllm_kit.latent_attention import LatentSizes, make_latent_case, make_packed_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
USUAL = LatentSizes()
RAGGED = [1, 0, 63, 64, 65, 127, 128, 300, 1000, 0, 4097, 512, 2049, 17]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PORTABLE, FIXED = TritonOptions(latent_kernel="portable"), TritonOptions(chunk_size=256)
HOPPER = TritonOptions(latent_kernel="hopper")
on_hopper_alone = pytest.mark.skipif(
    not (torch.cuda.is_available() and on_hopper(torch.device("cuda"))), reason="on Hopper alone"
)
KERNELS = [
    pytest.param(PORTABLE, id="portable"),
    pytest.param(FIXED, id="fixed-chunks"),
    pytest.param(HOPPER, id="hopper", marks=on_hopper_alone),
]


def make_backend(case, options=None):
    backend = TritonAttention(options or TritonOptions(), case.config())
    backend.allocate()
    return backend


def decode(case, backend):
    out, metadata = case.new_out(), case.decode_metadata()
    backend.plan_decode(metadata)
    backend.run_decode(case.q_THD, case.k_cache, case.v_cache, metadata, out)
    return out


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_heads", [1, 5, 16, 32, 128])
def test_decode_equals_the_reference_at_true_sizes(num_heads, dtype, options):
    """Ragged rows, padding between them, needles, NaN in every place that may not be read."""
    if options is HOPPER and dtype is torch.float32:
        pytest.skip("half precision alone")
    for block_size, needle in ((256, True), (64, False), (16, False)):
        if options is HOPPER and block_size < 64:
            continue
        case = make_latent_case(
            RAGGED, USUAL, num_heads=num_heads, block_size=block_size, dtype=dtype,
            device="cuda", needle=needle, finite_tail=False,
        )  # fmt: skip
        case.assert_close(decode(case, make_backend(case, options)))


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize("sizes", [(256, 64), (512, 32), (128, 128), (64, 16), (40, 24), (320, 64)])
def test_decode_equals_the_reference_at_other_sizes(sizes, options):
    latent, rotated = sizes
    sizes = LatentSizes(latent=latent, rotated=rotated)
    for num_heads in (7, 64):
        case = make_latent_case(
            RAGGED, sizes, num_heads=num_heads, block_size=128, dtype=torch.bfloat16,
            device="cuda", finite_tail=False,
        )  # fmt: skip
        case.assert_close(decode(case, make_backend(case, options)))


@on_hopper_alone
def test_the_kernel_for_hopper_serves_where_it_can():
    """`describe` says so; a cache that the copy engine cannot read is refused, not served."""
    case = make_latent_case([1], USUAL, num_heads=16, block_size=256, dtype=torch.bfloat16,
                            device="cuda")  # fmt: skip
    assert "persistent" not in make_backend(case, PORTABLE).describe()
    backend, metadata = make_backend(case), case.decode_metadata()
    assert "persistent" in backend.describe()
    odd = torch.zeros(*case.k_cache.shape[:-1], 577, dtype=torch.bfloat16, device="cuda")[..., :576]
    backend.plan_decode(metadata)
    with pytest.raises(UnsupportedError, match="multiples of 16 bytes"):
        backend.run_decode(case.q_THD, odd, odd[..., :512], metadata, case.new_out())


@pytest.mark.parametrize("options", KERNELS)
def test_replays_follow_changed_lengths_and_runs_are_equal(options):
    """One captured plan and two layers; whose programs end last changes no bit."""
    cases = [
        make_latent_case(
            lens,
            USUAL,
            num_heads=16,
            block_size=256,
            dtype=torch.bfloat16,
            device="cuda",
            seed=seed,
        )
        for seed, lens in enumerate(([4000] * 12, [0, 4000, 1] * 4, [1] * 12, [77, 3000] * 6))
    ]
    first = cases[0]
    backend = make_backend(first, options)
    num_blocks = max(len(case.k_cache) for case in cases)
    cache = first.k_cache.new_empty(num_blocks, *first.k_cache.shape[1:])
    # A copy of the table, which is written below: a case's own says where its keys lie.
    metadata = replace(first.decode_metadata(4096), block_table=first.block_table.clone())
    q = first.q_THD.clone()
    outs = [first.new_out() for _ in range(2)]

    def step():
        backend.plan_decode(metadata)
        for out in outs:
            backend.run_decode(q, cache, cache[..., :512], metadata, out)

    def fill(case):
        cache[: len(case.k_cache)] = case.k_cache
        metadata.block_table.zero_()
        metadata.block_table[:, : case.block_table.shape[1]] = case.block_table
        metadata.seq_lens.copy_(torch.tensor(case.seq_lens))
        q.copy_(case.q_THD)

    fill(first)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    addresses = {name: x.data_ptr() for name, x in backend.captured_tensors().items()}
    for case in cases:
        fill(case)
        step()
        eager = outs[0].clone()
        case.assert_close(eager)
        for _ in range(50):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(out, eager) for out in outs)
    assert addresses == {name: x.data_ptr() for name, x in backend.captured_tensors().items()}


@pytest.mark.parametrize("options", KERNELS)
def test_rows_beyond_2_to_the_31_elements_are_read_right(options):
    """From the highest blocks of a large cache."""
    case = make_latent_case([700, 1], USUAL, num_heads=16, block_size=256, dtype=torch.bfloat16,
                            device="cuda")  # fmt: skip
    num_blocks = 2**31 // (256 * 576) + 64
    far = case.k_cache.new_zeros(num_blocks, 256, 1, 576)
    offset = num_blocks - len(case.k_cache)
    far[offset:] = case.k_cache
    backend, out = make_backend(case, options), case.new_out()
    metadata = replace(case.decode_metadata(), block_table=case.block_table + offset)
    backend.plan_decode(metadata)
    backend.run_decode(case.q_THD, far, far[..., :512], metadata, out)
    case.assert_close(out)


@pytest.mark.parametrize(
    ("num_heads", "sizes", "dtype", "block_size"),
    [
        (16, USUAL, torch.bfloat16, 256),
        (16, USUAL, torch.float16, 16),
        (16, USUAL, torch.float32, 256),
        (128, USUAL, torch.bfloat16, 64),
        (5, LatentSizes(latent=320, rotated=64), torch.bfloat16, 16),
        (1, LatentSizes(latent=512, rotated=128), torch.bfloat16, 32),
        (3, LatentSizes(latent=40, rotated=24), torch.float16, 16),
        (4, LatentSizes(latent=16, rotated=8), torch.bfloat16, 64),
    ],
    ids=str,
)
def test_prompts_over_rows_equal_the_reference(num_heads, sizes, dtype, block_size):
    """Whole prompts, chunks behind a context, a single query; NaN where nothing may be read."""
    queries, keys = [1, 300, 64, 0, 127, 129, 16], [1, 300, 1064, 5, 128, 4000, 17]
    for needle in (False, True):
        case = make_latent_case(
            keys, sizes, queries, num_heads=num_heads, block_size=block_size, dtype=dtype,
            device="cuda", needle=needle, finite_tail=False,
        )  # fmt: skip
        case.assert_close(run_prefill(make_backend(case), case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_prompts_equal_the_reference_at_true_sizes(dtype, causal):
    """Prompts, chunks, contexts; queries without keys and keys without queries."""
    lens = [1, 300, 64, 0, 127, 129, 700]
    others = [1, 300, 200, 5, 127, 1000, 0 if not causal else 700]
    for sizes, num_heads in (
        (USUAL, 16),
        (LatentSizes(nope=32, value=64), 3),
        (LatentSizes(rotated=16, nope=16, value=16), 3),
        (LatentSizes(rotated=16, nope=32, value=8), 1),
    ):
        case = make_packed_case(lens, others, sizes, num_heads=num_heads, causal=causal,
                                dtype=dtype, device="cuda")  # fmt: skip
        case.check(make_backend(case), "packed")


@pytest.fixture
def hopper_packed_only(monkeypatch):
    """However few scores there are, the kernel for Hopper attends; the other one does nothing."""
    monkeypatch.setattr(packed, "HOPPER_SCORES", 0)
    monkeypatch.setattr(packed, "packed_kernel", defaultdict(lambda: lambda *_, **__: None))


@on_hopper_alone
@pytest.mark.parametrize("seed", range(16))
def test_packed_prompts_by_the_kernel_for_hopper_equal_the_reference(seed, hopper_packed_only):
    """Drawn lengths around every tile, with and without keys; more heads than are drawn at once."""
    draws = Random(seed)
    lens = [0, 1, 2, 63, 64, 65, 127, 128, 129, 300, 777]
    causal = seed % 2 == 0
    query_lens = [5, *draws.choices(lens, k=draws.choice([0, 1, 6]))]
    behind = [0, 0, 100, 500] if causal else [0, 1, 5, 127, 128, 129, 1000, 2500]
    key_lens = [draws.choice(behind) + causal * queries for queries in query_lens]
    key_lens[0] += 3  # without any key the other kernel serves
    case = make_packed_case(
        query_lens, key_lens, USUAL, num_heads=draws.choice([1, 3, 16, 20]), causal=causal,
        dtype=DTYPES[seed // 2 % 2], device="cuda", seed=seed,
    )  # fmt: skip
    backend = make_backend(case)
    assert "by warp roles" in backend.describe()
    case.check(backend, "packed")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["plain", pytest.param("hopper", marks=on_hopper_alone)])
def test_a_broken_sequence_harms_no_other_by_any_kernel(kernel, causal, request):
    """NaN in the keys and values that a tile holds beside its own sequence's."""
    if kernel == "hopper":
        request.getfixturevalue("hopper_packed_only")
    lens = [200, 77, 300, 129]
    case = make_packed_case(lens, lens, USUAL, num_heads=16, causal=causal, dtype=torch.bfloat16,
                            device="cuda")  # fmt: skip
    backend = make_backend(case)
    for broken in (1, 2):
        case.check(backend, "beside NaN", broken=broken)


@on_hopper_alone
def test_programs_of_the_packed_kernel_take_several_blocks_of_rows(hopper_packed_only):
    """More work than multiprocessors: barriers and buffers are used again. Runs are equal."""
    lens = [*range(1, 900, 37), 3000]
    case = make_packed_case(lens, lens, USUAL, num_heads=16, causal=True, dtype=torch.bfloat16,
                            device="cuda")  # fmt: skip
    backend, metadata = make_backend(case), case.metadata()
    case.check(backend, "packed")
    backend.plan_packed(metadata)
    first, _ = case.run(backend, metadata, with_lse=True)
    for _ in range(20):
        assert torch.equal(case.run(backend, metadata, with_lse=True)[0], first)
    assert not metadata.plan.tickets.any()
