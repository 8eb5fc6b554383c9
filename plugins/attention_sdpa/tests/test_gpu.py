"""The sdpa backend on a GPU: the full matrix, every kernel, captured decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanovllm_attention_sdpa.backend import SdpaAttention
from nanovllm_attention_sdpa.plugin import Kernel, SdpaOptions
from nanovllm_attention_sdpa.workspace import WORKSPACE_LIMIT
from nanovllm_core.api import AttentionConfig
from nanovllm_kit.attention_checks import (
    check_blocks_beyond_2_31_elements,
    check_decode_never_synchronises,
    check_matrix,
    check_replay,
    run_decode,
    run_prefill,
)
from nanovllm_kit.paged_attention import make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_backend(config: AttentionConfig) -> SdpaAttention:
    return SdpaAttention(SdpaOptions(), config)


@pytest.mark.parametrize("num_heads", [8, 16, 32])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_matrix(num_heads: int, head_size: int, group: int) -> None:
    """Batches and lengths of the matrix, ragged, padded, with needles, in three dtypes."""
    compared = check_matrix(
        make_backend, num_heads=num_heads, num_kv_heads=num_heads // group, head_size=head_size,
        block_size=16, dtypes=DTYPES,
    )  # fmt: skip
    assert compared == 4 * 7 * 2 * (3 + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size"),
    [(16, 8, 128, 256), (14, 2, 64, 32), (8, 1, 128, 48), (6, 6, 80, 16), (4, 2, 96, 16)],
)
def test_other_shapes(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    """Head sizes, groups and blocks beside the matrix."""
    check_matrix(
        make_backend, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
        block_size=block_size, dtypes=[dtype], batches=[5], lengths=[1, 300],
    )  # fmt: skip


@pytest.mark.parametrize("kernel", ["math", "efficient", "flash", "cudnn"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_kernels_by_name(kernel: Kernel, phase: str) -> None:
    """A kernel that `check` promises runs, and is right."""
    if kernel == "flash" and phase == "decode":
        pytest.skip("torch's flash kernel takes no mask: `check` refuses it for decode")
    options = SdpaOptions(kernel=kernel)
    queries = [1] * 3 if phase == "decode" else [300, 128, 7]
    case = make_case(
        queries, [300, 200, 7], num_heads=16, num_kv_heads=8, head_size=128,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    backend = SdpaAttention(options, case.config())
    backend.allocate()
    if phase == "decode":
        case.assert_close(run_decode(backend, case, case.decode_metadata()))
    else:
        case.assert_close(run_prefill(backend, case))


@pytest.mark.parametrize("plan_is_captured", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replay_follows_its_inputs(plan_is_captured: bool, dtype: torch.dtype) -> None:
    """Captured decode equals eager decode bit for bit while everything changes."""
    check_replay(make_backend, block_size=16, dtype=dtype, plan_is_captured=plan_is_captured)


def test_blocks_beyond_2_31_elements() -> None:
    """Offsets are 64 bits wide."""
    check_blocks_beyond_2_31_elements(make_backend, block_size=16)


def test_decode_never_synchronises() -> None:
    """The host runs ahead."""
    check_decode_never_synchronises(make_backend, block_size=16)


def test_padded_rows_give_zeros() -> None:
    """Though the blocks that their block table names hold NaN."""
    case = make_case(
        [1] * 4, [5, 0, 40, 0], num_heads=4, num_kv_heads=2, head_size=64, device="cuda"
    )
    backend = make_backend(case.config())
    backend.allocate()
    out = run_decode(backend, case, case.decode_metadata())
    assert torch.equal(out[[1, 3]], torch.zeros_like(out[[1, 3]]))


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_a_large_step_stays_within_the_limit(kernel: Kernel) -> None:
    """64 rows of 4,096 tokens, and a prompt of 8,192: what torch allocates in the step is counted.

    Beside the workspace a step holds the output of one slice and torch's own small buffers.
    """
    for queries, lens in (([1] * 64, [4096] * 64), ([8192], [8192]), ([512], [8192])):
        case = make_case(
            queries, lens, num_heads=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16,
            device="cuda",
        )  # fmt: skip
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        backend = SdpaAttention(SdpaOptions(kernel=kernel), replace(case.config(), max_num_seqs=64))
        backend.allocate()
        out = torch.empty_like(case.q_THD)
        torch.cuda.reset_peak_memory_stats()
        if len(queries) > 1:
            decode = case.decode_metadata()
            backend.plan_decode(decode)
            backend.run_decode(case.q_THD, case.k_cache, case.v_cache, decode, out)
        else:
            prefill = case.prefill_metadata()
            backend.plan_prefill(prefill)
            backend.run_prefill(case.q_THD, case.k_cache, case.v_cache, prefill, out)
        peak = torch.cuda.max_memory_allocated() - before - out.nbytes
        assert peak <= WORKSPACE_LIMIT + 4 * case.q_THD.nbytes, f"{peak / 2**20:.0f} MiB"
