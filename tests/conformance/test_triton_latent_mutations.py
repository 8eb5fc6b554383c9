"""Bugs of latent attention, planted in the triton backend, on a CPU by Triton's interpreter.

Mutations keep every read within the row's tables and caches: the interpreter reads real memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .mutation import Mutation, numbered
from .test_triton_mutations import TRITON

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there, and are not interpreted"
)

ROWS = "test_latent_rows_are_keys_and_values"
SIZES = "test_latent_sizes_and_heads_are_parameters"
SCALE = "test_latent_scores_have_the_configured_scale"
PACKED_SCALE = "test_packed_scores_have_the_configured_scale"
APART = "test_latent_rows_may_lie_apart"
REPLAYS = "test_latent_steps_follow_changed_inputs"
PROMPTS = "test_packed_prompts_are_causal"
CONTEXT = "test_packed_context_is_seen_whole"
PACKED_SIZES = "test_packed_sizes_and_heads_are_parameters"
OVER_ROWS = "test_latent_prompts_attend_to_rows"
OVER_ANY_ROWS = "test_latent_prompts_may_have_any_sizes_and_heads"
LAYERS = "test_a_latent_plan_serves_every_layer"
LARGE = "test_latent_scores_may_be_large"
MANY = "test_latent_batches_may_be_long_or_many"
OVER_ROWS_REPLAYS = "test_latent_prompts_follow_changed_chunks"
DECODE, PACKED, OVER = "latent_kernels.py", "packed_kernels.py", "latent_prefill_kernel.py"


def bug(name: str, file: str, caught_by: str, *edits: tuple[str, str]) -> Mutation:
    return Mutation(name=name, file=file, edits=edits, caught_by=caught_by)


MUTATIONS = [
    bug(
        "the rest of the row is left out of the scores", DECODE, ROWS,
        ("scores = tl.dot(key_rest, tl.trans(q_rest), scores, input_precision=\"ieee\")", "pass"),
    ),
    bug(
        "the last tile's keys beyond the row count", DECODE, ROWS,
        ("scores = tl.where(live[:, None], scores * log2_scale, float(\"-inf\"))",
         "scores = scores * log2_scale"),
    ),
    bug(
        "the tail of the last block is read", DECODE, ROWS,
        ("value = tl.load(rows + values[None, :], mask=live[:, None] & value_mask, other=0.0)",
         "value = tl.load(rows + values[None, :], mask=value_mask, other=0.0)"),
    ),
    bug(
        "what was summed before is not rescaled", DECODE, ROWS,
        ("        acc = acc * rescale\n", ""),
    ),
    bug(
        "the mass of a tile replaces that of those before", DECODE, ROWS,
        ("mass = mass * rescale + weights", "mass = weights"),
    ),
    bug(
        "chunks are averaged, whatever their mass", DECODE, ROWS,
        ("weights = tl.exp2(lse - new_peak)\n        mass",
         "weights = tl.where(live, 1.0, 0.0)\n        mass"),
    ),
    bug(
        "a row's first chunk stands for all", DECODE, ROWS,
        ("slots = first_slot + chunks.to(tl.int64) * (HEAD_BLOCKS * PARTIAL_HEADS)",
         "slots = first_slot + 0 * chunks.to(tl.int64)"),
    ),
    bug(
        "log-sum-exps of the two bases are mixed", DECODE, ROWS,
        ("peak + tl.log2(denominator)", "peak * 0.6931471805599453 + tl.log(denominator)"),
    ),
    bug(
        "the second block of heads gets the queries of the first", DECODE, SIZES,
        ("q_ptr + row * q_stride_row + heads[:, None] * q_stride_head",
         "q_ptr + row * q_stride_row + lanes[:, None] * q_stride_head"),
    ),
    bug(
        "the last column of the value is lost", DECODE, SIZES,
        ("value_mask = values[None, :] < VALUE_SIZE",
         "value_mask = values[None, :] < VALUE_SIZE - 1"),
    ),
    bug(
        "the scale twice, in decode", "latent_decode.py", SCALE,
        ("scale * LOG2_E", "scale * scale * LOG2_E"),
    ),
    bug(
        "the scale of the row's size, in prompts", "packed.py", PACKED_SCALE,
        ("scale * LOG2_E", "(q_THD.shape[2] ** -0.5) * LOG2_E"),
    ),
    bug(
        "rows are taken to lie side by side", "latent_decode.py", APART,
        ("            cache.stride(1),\n", "            cache.shape[3],\n"),
    ),
    bug(
        "the merge keeps the plan of the first step", "latent_decode.py", REPLAYS,
        ("    def _merge_chunks(self, out_BHD: Tensor) -> None:\n",
         "    def _merge_chunks(self, out_BHD: Tensor) -> None:\n"
         "        if hasattr(self, 'kept'):\n"
         "            self.items.copy_(self.kept)\n"
         "        self.kept = self.items.clone()\n"),
    ),
    bug(
        "a query sees one key too many", PACKED, PROMPTS,
        ("bounds = rows + (key_len - query_len + 1)", "bounds = rows + (key_len - query_len + 2)"),
    ),
    bug(
        "queries are aligned to the first key", PACKED, PROMPTS,
        ("bounds = rows + (key_len - query_len + 1)", "bounds = rows + 1"),
    ),
    bug(
        "no tile is masked but the last", PACKED, PROMPTS,
        ("if start + BLOCK_N > seen_by_all:", "if start + BLOCK_N > key_len:"),
    ),
    bug(
        "the log-sum-exp in base 2", PACKED, CONTEXT,
        ("lse = (peak + tl.log2(mass)) * LN2", "lse = peak + tl.log2(mass)"),
    ),
    bug(
        "a context is causal too", "packed.py", CONTEXT,
        ("packed_constants(key_size, v_LHV.shape[2], causal,",
         "packed_constants(key_size, v_LHV.shape[2], True,"),
    ),
    bug(
        "keys of the sequence behind count in the last tile", PACKED, CONTEXT,
        ("visible = whole_end + keys[None, :] < tl.minimum(bounds, key_len)[:, None]",
         "visible = whole_end + keys[None, :] < BLOCK_N + tl.minimum(bounds, key_len)[:, None]"),
    ),
    bug(
        "the second part of a key's columns is left out", PACKED, PACKED_SIZES,
        ("k_rest = _load_whole(", "k_rest = 0.0 * _load_whole("),
    ),
    bug(
        "the last column of the values is not stored", PACKED, PACKED_SIZES,
        ("out, mask=real & (values < VALUE_SIZE)[None, :])",
         "out, mask=real & (values < VALUE_SIZE - 1)[None, :])"),
    ),
    bug(
        "a prompt's query sees the row behind its own", OVER, OVER_ROWS,
        ("scores = tl.where(start + keys[None, :] <= positions[:, None],",
         "scores = tl.where(start + keys[None, :] <= positions[:, None] + 1,"),
    ),
    bug(
        "heads are taken for tokens", OVER, OVER_ROWS,
        ("positions = context + queries // NUM_HEADS", "positions = context + queries"),
    ),
    bug(
        "a chunk forgets its context", OVER, OVER_ROWS,
        ("context = seq_len - query_len", "context = 0"),
    ),
    bug(
        "the rest of a row is left out of a prompt's scores", OVER, OVER_ROWS,
        ("scores = tl.dot(q_rest, tl.trans(key_rest), scores, input_precision=\"ieee\")", "pass"),
    ),
    bug(
        "a prompt reads the tail of its last block", OVER, OVER_ROWS,
        ("value = tl.load(rows + values[None, :], mask=live[:, None] & value_mask, other=0.0)",
         "value = tl.load(rows + values[None, :], mask=value_mask, other=0.0)"),
    ),
    bug(
        "a prompt's scale is that of a row", "latent_prefill.py", OVER_ROWS,
        ("scale * LOG2_E", "(row_size ** -0.5) * LOG2_E"),
    ),
    bug(
        "rows are taken to lie side by side, in prompts", "latent_prefill.py", APART,
        ("        cache_NP1R.stride(1),\n", "        cache_NP1R.shape[3],\n"),
    ),
    bug(
        "all layers of a step read the rows of the first", "latent_prefill.py", LAYERS,
        ("        cache_NP1R,\n        out_THL,\n",
         "        _of(metadata, cache_NP1R),\n        out_THL,\n"),
        ("def latent_prefill_constants(",
         "_SEEN = {}\n\n\ndef _of(metadata, cache):\n"
         "    return _SEEN.setdefault(id(metadata), cache)\n\n\n"
         "def latent_prefill_constants("),
    ),
    bug(
        "scores are not taken from their peak, in prompts", "prefill_kernels.py", LARGE,
        ("weights = tl.exp2(scores * log2_scale - anchor[:, None])",
         "weights = tl.exp2(scores * log2_scale)"),
        ("rescale = tl.exp2(peak - anchor)", "rescale = tl.where(peak > 1e30, 0.0, 1.0)"),
    ),
    bug(
        "chunks behind the 32nd are left out", "latent_prefill.py", MANY,
        ("num_seqs = len(metadata.seq_lens)", "num_seqs = min(len(metadata.seq_lens), 32)"),
    ),
    bug(
        "a block whose heads do not fill it ends a token early", OVER, OVER_ANY_ROWS,
        ("real = queries < num_queries", "real = queries < query_len // 2 * 2 * NUM_HEADS"),
    ),
    bug(
        "a captured step keeps the tokens of its first chunks", "latent_prefill.py",
        OVER_ROWS_REPLAYS,
        ("        metadata.query_start_loc,\n", "        _first(metadata.query_start_loc),\n"),
        ("def latent_prefill_constants(",
         "_SEEN = {}\n\n\ndef _first(starts):\n"
         "    return _SEEN.setdefault(starts.data_ptr(), starts.clone())\n\n\n"
         "def latent_prefill_constants("),
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=12))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    TRITON.assert_caught(tmp_path, number, MUTATIONS[number])
