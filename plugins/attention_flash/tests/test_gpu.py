"""FlashAttention-4 on a GPU: the full matrix, chunks over blocks, captured decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanovllm_attention_flash.backend import FlashAttention
from nanovllm_attention_flash.plugin import FlashOptions
from nanovllm_attention_flash.providers import PROVIDERS
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
    pytest.mark.skipif(
        PROVIDERS["fa4"].missing() is not None, reason=f"{PROVIDERS['fa4'].missing()}"
    ),
]

DTYPES = [torch.bfloat16, torch.float16]


def make_backend(config: AttentionConfig) -> FlashAttention:
    return FlashAttention(FlashOptions(), config)


@pytest.mark.parametrize("num_heads", [8, 16, 32])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_matrix(num_heads: int, head_size: int, group: int) -> None:
    """Batches and lengths of the matrix, ragged, padded, with needles, in both dtypes."""
    compared = check_matrix(
        make_backend, num_heads=num_heads, num_kv_heads=num_heads // group, head_size=head_size,
        block_size=128, dtypes=DTYPES,
    )  # fmt: skip
    assert compared == 4 * 7 * 2 * (2 + 1)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (14, 2), (8, 1)])
def test_other_blocks_and_groups(block_size: int, num_heads: int, num_kv_heads: int) -> None:
    """Blocks of other sizes than a key tile, and groups beside the matrix."""
    check_matrix(
        make_backend, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=128,
        block_size=block_size, dtypes=[torch.bfloat16], batches=[5], lengths=[1, 300, 1000],
    )  # fmt: skip


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    """Each chunk sees what its positions see in the whole prompt, also from a block's middle."""
    whole = make_case(
        [1000], [1000], num_heads=16, num_kv_heads=8, head_size=128, block_size=128,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    expected = whole.expected()
    backend = make_backend(replace(whole.config(), max_num_batched_tokens=1000))
    backend.allocate()
    for start, stop in [(0, 512), (512, 513), (513, 640), (640, 1000)]:
        chunk = replace(
            whole, q_THD=whole.q_THD[start:stop], query_lens=(stop - start,), seq_lens=(stop,)
        )
        chunk.assert_close(run_prefill(backend, chunk), expected[start:stop])


def test_padded_rows_disturb_no_other_row() -> None:
    """Rows of length 0 anywhere, the first among them, with blocks of NaN in their block table."""
    lens = [0, 300, 0, 128, 1, 0]
    case = make_case(
        [1] * 6, lens, num_heads=16, num_kv_heads=8, head_size=128, block_size=128,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    backend = make_backend(case.config())
    backend.allocate()
    case.assert_close(run_decode(backend, case, case.decode_metadata()))
    torch.cuda.synchronize()


def test_queries_may_be_a_slice_of_packed_qkv() -> None:
    """q is a strided view."""
    case = make_case(
        [1] * 3, [300, 128, 1], num_heads=16, num_kv_heads=8, head_size=128, block_size=128,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    packed = torch.cat((case.q_THD, torch.full_like(case.q_THD, float("nan"))), dim=1)
    strided = replace(case, q_THD=packed[:, :16])
    backend = make_backend(strided.config())
    backend.allocate()
    strided.assert_close(run_decode(backend, strided, strided.decode_metadata()))


@pytest.mark.parametrize("plan_is_captured", [True, False])
@pytest.mark.parametrize("batch", [1, 8, 300])
def test_replay_follows_its_inputs(plan_is_captured: bool, batch: int) -> None:
    """Captured decode equals eager decode bit for bit while everything changes.

    Above 256 rows FlashAttention-4 schedules varlen batches in another way.
    """
    check_replay(
        make_backend, block_size=128, dtype=torch.bfloat16, plan_is_captured=plan_is_captured,
        batch=batch, longest=512 if batch > 8 else 1024,
    )  # fmt: skip


def test_blocks_beyond_2_31_elements() -> None:
    """Offsets are 64 bits wide."""
    check_blocks_beyond_2_31_elements(make_backend, block_size=128)


def test_decode_never_synchronises() -> None:
    """The host runs ahead."""
    check_decode_never_synchronises(make_backend, block_size=128)


def test_many_prompts_in_one_step() -> None:
    """More sequences than FlashAttention-4's scheduler searches one by one."""
    lens = [1 + (i * 7) % 40 for i in range(300)]
    case = make_case(
        lens, lens, num_heads=16, num_kv_heads=8, head_size=128, block_size=128,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    backend = make_backend(case.config())
    backend.allocate()
    case.assert_close(run_prefill(backend, case))
