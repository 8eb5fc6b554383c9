"""The sdpa backend agrees with a float64 reference and reads nothing that is not a row's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from nanovllm_attention_sdpa.backend import SdpaAttention
from nanovllm_attention_sdpa.plugin import Kernel, SdpaOptions
from nanovllm_core.api import InconsistentStateError, UnsupportedError
from nanovllm_kit.latent_attention import LatentSizes, make_packed_case
from nanovllm_kit.paged_attention import PagedCase, make_case

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def backend_for(case: PagedCase, kernel: Kernel = "auto") -> SdpaAttention:
    backend = SdpaAttention(SdpaOptions(kernel=kernel), case.config())
    backend.allocate()
    return backend


def decode(case: PagedCase, backend: SdpaAttention) -> Tensor:
    metadata = case.decode_metadata()
    out = torch.full_like(case.q_THD, float("nan"))
    backend.plan_decode(metadata)
    backend.run_decode(case.q_THD, case.k_cache, case.v_cache, metadata, out)
    return out


def prefill(case: PagedCase, backend: SdpaAttention) -> Tensor:
    metadata = case.prefill_metadata()
    out = torch.full_like(case.q_THD, float("nan"))
    backend.plan_prefill(metadata)
    backend.run_prefill(case.q_THD, case.k_cache, case.v_cache, metadata, out)
    return out


def decode_case(seq_lens: list[int], **kwargs: object) -> PagedCase:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64} | kwargs
    return make_case([1] * len(seq_lens), seq_lens, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("needle", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["auto", "math", "flash"])
def test_decode_matches_float64(kernel: Kernel, dtype: torch.dtype, needle: bool) -> None:
    """Ragged rows, one token and block edges among them, in every dtype and CPU kernel."""
    case = decode_case([1, 2, 16, 17, 127, 128, 512], dtype=dtype, needle=needle)
    case.assert_close(decode(case, backend_for(case, kernel)))


@pytest.mark.parametrize("needle", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["auto", "math", "flash"])
def test_prefill_matches_float64(kernel: Kernel, dtype: torch.dtype, needle: bool) -> None:
    """Whole prompts and chunks with context: the mask is aligned to the last key."""
    case = make_case(
        [1, 17, 128, 5, 100, 1],
        [1, 17, 128, 69, 333, 200],
        num_heads=4, num_kv_heads=2, head_size=64, dtype=dtype, needle=needle,
    )  # fmt: skip
    case.assert_close(prefill(case, backend_for(case, kernel)))


WINDOWS = [None, 1, 5, 16, 17, 100, 1000]
"""None, one key, within a block, a block, over its edge, across blocks, beyond every sequence."""


@pytest.mark.parametrize("needle", [False, True])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_windows_and_soft_caps_match_float64(
    kernel: Kernel, window: int | None, cap: float | None, needle: bool
) -> None:
    """Decode, whole prompts and chunks behind a prefix, shorter and longer than the window."""
    rules = {"needle": needle, "sliding_window": window, "soft_cap": cap}
    rows = decode_case([1, 2, 16, 0, 17, 127, 300], **rules)
    rows.assert_close(decode(rows, backend_for(rows, kernel)))
    chunks = make_case(
        [1, 17, 128, 5, 100, 1], [1, 17, 128, 69, 333, 200],
        num_heads=4, num_kv_heads=2, head_size=64, **rules,
    )  # type: ignore[arg-type]  # fmt: skip
    chunks.assert_close(prefill(chunks, backend_for(chunks, kernel)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "cap"), [(40, None), (None, 3.0), (40, 3.0)])
def test_windows_and_soft_caps_in_every_dtype(
    window: int | None, cap: float | None, dtype: torch.dtype
) -> None:
    """Half precision rounds once more, and no more than that."""
    rules = {"dtype": dtype, "sliding_window": window, "soft_cap": cap}
    rows = decode_case([40, 41, 200], **rules)
    rows.assert_close(decode(rows, backend_for(rows)))
    chunks = make_case([30, 90], [70, 90], num_heads=4, num_kv_heads=1, head_size=80, **rules)  # type: ignore[arg-type]
    chunks.assert_close(prefill(chunks, backend_for(chunks)))


def test_blocks_before_the_window_are_not_gathered() -> None:
    """Neither their contents, which are NaN here, nor their entries in the block table."""
    for queries, run in ((1, decode), (20, prefill)):
        case = make_case(
            [queries], [200], num_heads=4, num_kv_heads=2, head_size=64, sliding_window=40
        )
        expected = case.expected()
        first = (200 - queries - 40 + 1) // 16
        case.k_cache[case.block_table[0, :first].long()] = float("nan")
        case.v_cache[case.block_table[0, :first].long()] = float("nan")
        case.block_table[0, :first] = 2**30
        out = run(case, backend_for(case))
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_window_bounds_what_decode_keeps_and_gathers() -> None:
    """Tables are as wide as the window's blocks, whatever the longest sequence."""
    case = decode_case([2000], sliding_window=40)
    backend = backend_for(case)
    assert backend.captured_tensors()["bias"].shape == (1, 4 * 16)
    case.assert_close(decode(case, backend))
    # A device knows only the host's bound; the window bounds it too.
    assert max(backend._length_bounds(case.decode_metadata())) <= 64


@pytest.mark.parametrize("kernel", ["auto", "math", "flash"])
def test_padded_rows_give_zeros(kernel: Kernel) -> None:
    """A row of length 0 gives zeros though block 0, which its block table names, holds NaN."""
    case = decode_case([5, 0, 40, 0])
    assert case.k_cache[0].isnan().all()
    out = decode(case, backend_for(case, kernel))
    assert torch.equal(out[[1, 3]], torch.zeros_like(out[[1, 3]]))
    case.assert_close(out)


def test_block_table_beyond_a_row_is_never_read() -> None:
    """Entries past a row's last block may hold anything, even ids outside the cache."""
    case = decode_case([5, 40, 0])
    expected = decode(case, backend_for(case))
    table = case.block_table.clone()
    table[0, 1:] = 2**30
    table[2] = -7
    wild = replace(case, block_table=table)
    assert torch.equal(decode(wild, backend_for(wild)), expected)


def test_queries_may_be_a_slice_of_packed_qkv() -> None:
    """q is a strided view, and so may be the output."""
    case = decode_case([5, 40])
    packed = torch.cat((case.q_THD, torch.full_like(case.q_THD, float("nan"))), dim=1)
    strided = replace(case, q_THD=packed[:, :4])
    assert not strided.q_THD.is_contiguous()
    case.assert_close(decode(strided, backend_for(strided)))


def test_caches_may_be_strided_over_blocks() -> None:
    """K and V interleaved in one tensor are read through their strides."""
    case = decode_case([5, 40])
    both = torch.stack((case.k_cache, case.v_cache), dim=1)
    view = replace(case, k_cache=both[:, 0], v_cache=both[:, 1])
    case.assert_close(decode(view, backend_for(view)))


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=5),
    block_size=st.sampled_from([16, 32]),
    seed=st.integers(0, 2**16),
)
def test_any_chunking_matches_float64(
    lens: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    """Chunks of any length over any context."""
    case = make_case(
        [queries for queries, _ in lens],
        [queries + context for queries, context in lens],
        num_heads=2, num_kv_heads=1, head_size=16, block_size=block_size, seed=seed,
    )  # fmt: skip
    case.assert_close(prefill(case, backend_for(case)))


def test_run_without_its_plan_is_an_error() -> None:
    """A plan made for another batch is not silently used."""
    case, other = decode_case([5, 6]), decode_case([5])
    backend = backend_for(case)
    with pytest.raises(InconsistentStateError, match="2 rows without a plan_decode"):
        backend.run_decode(
            case.q_THD, case.k_cache, case.v_cache, case.decode_metadata(), case.q_THD
        )
    backend.plan_decode(other.decode_metadata())
    with pytest.raises(InconsistentStateError, match="2 rows without a plan_decode"):
        backend.run_decode(
            case.q_THD, case.k_cache, case.v_cache, case.decode_metadata(), case.q_THD
        )
    with pytest.raises(InconsistentStateError, match="without a plan_prefill"):
        backend.run_prefill(
            case.q_THD, case.k_cache, case.v_cache, case.prefill_metadata(), case.q_THD
        )
    packed = make_packed_case([2], [2], LatentSizes(), num_heads=1, causal=True)
    with pytest.raises(InconsistentStateError, match="without a plan_packed"):
        packed.run(backend, packed.metadata(), with_lse=False)


def test_longer_uniform_queries_are_refused() -> None:
    """The speculative decode length is refused with its value and the remedy."""
    case = decode_case([5])
    metadata = replace(case.decode_metadata(), query_len=3)
    with pytest.raises(UnsupportedError, match="query_len is 3; send longer queries as prefill"):
        backend_for(case).plan_decode(metadata)


def test_a_kernel_that_cannot_serve_is_named() -> None:
    """Torch's refusal becomes a typed error with the kernel, the shapes and the remedy."""
    case = decode_case([5])
    with pytest.raises(UnsupportedError, match=r"no sdpa kernel 'efficient'.*kernel: auto"):
        decode(case, backend_for(case, "efficient"))


def test_describe_names_torch_and_the_kernel() -> None:
    """Benchmarks print what ran."""
    case = decode_case([5])
    assert backend_for(case, "math").describe() == f"torch {torch.__version__} sdpa, kernel math"
