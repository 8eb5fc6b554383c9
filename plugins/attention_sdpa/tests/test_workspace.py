"""The backend holds at most 256 MiB, whatever it is asked for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm_attention_sdpa import backend as backend_module
from nanovllm_attention_sdpa.backend import SdpaAttention
from nanovllm_attention_sdpa.plugin import Kernel, SdpaOptions
from nanovllm_attention_sdpa.workspace import (
    BIAS_LIMIT,
    GATHER_LIMIT,
    WORKSPACE_LIMIT,
    queries_per_slice,
    slice_rows_and_heads,
    slot_bytes,
)
from nanovllm_core.api import AttentionConfig, InconsistentStateError, UnsupportedError
from nanovllm_kit.paged_attention import make_case


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 300),
    keys=st.integers(1, 5000),
    heads=st.integers(1, 16),
    max_slots=st.integers(5000, 50_000),
)
def test_slices_cover_everything_once_and_fit(
    rows: int, keys: int, heads: int, max_slots: int
) -> None:
    """Every (row, head) lies in exactly one slice, and no slice exceeds the workspace."""
    seen = torch.zeros(rows, heads, dtype=torch.int32)
    for part in slice_rows_and_heads(rows, keys, heads, max_slots):
        seen[part.rows, part.heads] += 1
        size = (part.rows.stop - part.rows.start) * (part.heads.stop - part.heads.start)
        assert size * keys <= max_slots
    assert (seen == 1).all()


def test_a_row_too_large_is_cut_over_heads() -> None:
    """Whole rows while they fit, then one row's heads."""
    assert [s.rows for s in slice_rows_and_heads(4, 10, 2, 40)] == [slice(0, 2), slice(2, 4)]
    parts = slice_rows_and_heads(2, 10, 4, 30)
    assert [(s.rows.start, s.heads) for s in parts] == [
        (0, slice(0, 3)), (0, slice(3, 4)), (1, slice(0, 3)), (1, slice(3, 4)),
    ]  # fmt: skip


def test_one_head_too_large_is_an_inconsistency() -> None:
    """The backend refuses such a length when it is made, so a slice never meets it."""
    with pytest.raises(InconsistentStateError, match="41 keys of one KV head exceed"):
        slice_rows_and_heads(1, 41, 2, 40)


@given(keys=st.integers(1, 2**21), score_bytes=st.integers(4, 4096))
def test_masks_are_bounded(keys: int, score_bytes: int) -> None:
    """A slice of queries keeps its mask within the limit, down to one query."""
    queries = queries_per_slice(keys, score_bytes)
    assert queries >= 1
    assert queries == 1 or queries * keys * score_bytes <= BIAS_LIMIT


@settings(max_examples=60, deadline=None)
@given(
    max_num_seqs=st.sampled_from([1, 7, 64, 512, 4096]),
    max_model_len=st.sampled_from([1, 512, 4096, 40960, 131072]),
    kv_heads=st.sampled_from([1, 8, 32]),
    head_size=st.sampled_from([64, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kernel=st.sampled_from(["auto", "math"]),
)
def test_what_is_allocated_is_bounded_at_any_shape(
    max_num_seqs: int,
    max_model_len: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    kernel: Kernel,
) -> None:
    """From one short row to 4,096 rows of 131,072 tokens: 256 MiB, or refused at the start."""
    config = AttentionConfig(
        device=torch.device("meta"), dtype=dtype, num_heads=2 * kv_heads, num_kv_heads=kv_heads,
        head_size=head_size, scale=1.0, block_size=16, max_num_seqs=max_num_seqs,
        max_model_len=max_model_len, max_num_batched_tokens=8192,
    )  # fmt: skip
    per_slot = slot_bytes(head_size, dtype.itemsize, copies_in_fp32=kernel == "math")
    if max_model_len * per_slot > GATHER_LIMIT:
        with pytest.raises(UnsupportedError, match=rf"max_model_len {max_model_len} needs"):
            SdpaAttention(SdpaOptions(kernel=kernel), config)
        return
    backend = SdpaAttention(SdpaOptions(kernel=kernel), config)
    backend.allocate()
    assert 0 < backend.workspace_bytes <= WORKSPACE_LIMIT


@pytest.mark.parametrize("max_slots", [64, 128, 200, 1000])
def test_sliced_results_equal_unsliced_ones(
    max_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace of a few slots, cut over rows and heads, changes no result."""
    case = make_case([1] * 5, [5, 64, 0, 33, 16], num_heads=8, num_kv_heads=4, head_size=32)
    chunks = make_case([9, 40], [60, 40], num_heads=8, num_kv_heads=4, head_size=32)
    per_slot = slot_bytes(32, 4, copies_in_fp32=False)
    monkeypatch.setattr(backend_module, "GATHER_LIMIT", max_slots * per_slot)
    monkeypatch.setattr(backend_module, "TABLE_LIMIT", 0)
    monkeypatch.setattr("nanovllm_attention_sdpa.workspace.BIAS_LIMIT", 1024)
    config = replace(case.config(), max_num_seqs=5)
    backend = SdpaAttention(SdpaOptions(), config)
    backend.allocate()
    assert "bias" not in backend.captured_tensors()
    out = torch.empty_like(case.q_THD)
    metadata = case.decode_metadata()
    backend.plan_decode(metadata)
    backend.run_decode(case.q_THD, case.k_cache, case.v_cache, metadata, out)
    case.assert_close(out)
    out = torch.empty_like(chunks.q_THD)
    prefill_metadata = chunks.prefill_metadata()
    backend.plan_prefill(prefill_metadata)
    backend.run_prefill(chunks.q_THD, chunks.k_cache, chunks.v_cache, prefill_metadata, out)
    chunks.assert_close(out)


CAPPED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
import torch
from nanovllm_attention_sdpa.backend import SdpaAttention
from nanovllm_attention_sdpa.plugin import SdpaOptions
from nanovllm_core.interfaces.attention import AttentionConfig, DecodeMetadata

torch.set_num_threads(1)
rows, tokens, block_size = 64, 4096, 16
config = AttentionConfig(
    device=torch.device("cpu"), dtype=torch.float32, num_heads=16, num_kv_heads=8, head_size=128,
    scale=1.0, block_size=block_size, max_num_seqs=rows, max_model_len=tokens,
    max_num_batched_tokens=tokens,
)
backend = SdpaAttention(SdpaOptions(), config)
backend.allocate()
assert backend.workspace_bytes <= 256 << 20, backend.workspace_bytes
num_blocks = rows * tokens // block_size
k_cache = torch.zeros(num_blocks, block_size, 8, 128)
v_cache = torch.zeros(num_blocks, block_size, 8, 128)
table = torch.arange(num_blocks, dtype=torch.int32).flip(0).view(rows, -1)
# One key in each row outweighs all others: the output is that key's value.
for row in range(rows):
    position = 61 * row + 7
    block, offset = table[row, position // block_size], position % block_size
    k_cache[block, offset] = 1.0
    v_cache[block, offset] = float(row + 1)
q = torch.ones(rows, 16, 128)
metadata = DecodeMetadata(table, torch.full((rows,), tokens, dtype=torch.int32), tokens)
out = torch.empty_like(q)
backend.plan_decode(metadata)
backend.run_decode(q, k_cache, v_cache, metadata, out)
expected = torch.arange(1, rows + 1).float()[:, None, None].expand_as(out)
torch.testing.assert_close(out, expected)
print("done")
"""


@pytest.mark.slow
def test_batch_64_of_4096_tokens_runs_under_8_gib() -> None:
    """A process that may map 8 GiB holds the 2 GiB cache, torch and this step."""
    result = subprocess.run(
        [sys.executable, "-c", CAPPED], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stdout.strip() == "done", result.stderr[-2000:]
