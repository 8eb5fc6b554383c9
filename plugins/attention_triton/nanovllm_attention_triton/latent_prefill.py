"""Launches the kernel of prompts over latent rows; see `latent_prefill_kernel`."""

from __future__ import annotations

from torch import Tensor

from nanovllm_attention_triton.decode import LOG2_E
from nanovllm_attention_triton.hopper_prefill import on_hopper
from nanovllm_attention_triton.latent_prefill_kernel import latent_prefill_kernel
from nanovllm_attention_triton.prefill import check_scale, count_row_blocks
from nanovllm_attention_triton.prefill_tuning import PackedTuning, latent_prefill_tuning
from nanovllm_attention_triton.sizes import padded_head_size
from nanovllm_attention_triton.split_work import SplitWork, item_arguments
from nanovllm_core.api import PrefillMetadata


def latent_prefill(
    q_THR: Tensor,
    cache_NP1R: Tensor,
    metadata: PrefillMetadata,
    scale: float,
    out_THL: Tensor,
    tuning: PackedTuning | None = None,
    splits: SplitWork | None = None,
) -> None:
    """Attend packed queries causally to the rows of their sequences, into `out_THL`.

    A row's first L numbers are its value. The innermost dimension of every tensor is contiguous;
    lengths are read on the device alone. `tuning` None is that of the GPU. `splits`, which serves
    the step and has its plan, for such rows and tiles: its items are attended. Raises
    UnsupportedError for a `scale` that is not positive, and for more queries than a grid holds.
    """
    check_scale(scale)
    num_seqs = len(metadata.seq_lens)
    num_tokens, num_heads, row_size = q_THR.shape
    num_tokens = min(num_tokens, num_seqs * metadata.max_query_len)
    if num_tokens == 0:
        return
    block_table, value_size = metadata.block_table, out_THL.shape[-1]
    rest_size = row_size - value_size
    tuning = tuning or latent_prefill_tuning(
        q_THR.element_size(), rest_size, on_hopper(q_THR.device)
    )
    row_blocks = count_row_blocks(num_tokens, num_seqs, num_heads, tuning.block_m)
    latent_prefill_kernel[(splits.shape.most_items(row_blocks) if splits else row_blocks,)](
        q_THR,
        cache_NP1R,
        out_THL,
        block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        num_seqs,
        scale * LOG2_E,
        q_THR.stride(0),
        q_THR.stride(1),
        out_THL.stride(0),
        out_THL.stride(1),
        block_table.stride(0),
        cache_NP1R.stride(0),
        cache_NP1R.stride(1),
        **latent_prefill_constants(num_heads, value_size, rest_size, cache_NP1R.shape[1], tuning),
        **item_arguments(splits),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if splits:
        splits.merge(row_blocks, out_THL)


def latent_prefill_constants(
    num_heads: int, value_size: int, rest_size: int, block_size: int, tuning: PackedTuning
) -> dict[str, int]:
    """The compile-time arguments of `latent_prefill_kernel`."""
    return {
        "NUM_HEADS": num_heads,
        "VALUE_SIZE": value_size,
        "BLOCK_V": padded_head_size(value_size),
        "REST_SIZE": rest_size,
        "BLOCK_R": padded_head_size(rest_size),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tuning.block_m,
        "BLOCK_N": tuning.block_n,
    }
