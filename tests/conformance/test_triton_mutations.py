"""Bugs planted in the triton backend: the attention suite catches each by the check that names it.

Everything runs on a CPU, by Triton's interpreter and by recordings that stand for CUDA graphs.
Mutations keep every read within the row's tables and caches: the interpreter reads real memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .mutation import Mutation, Subject, numbered

pytest.importorskip("nanovllm_attention_triton", reason="needs the triton plugin")
from nanovllm_attention_triton.plugin import nanovllm_attention

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there, and are not interpreted"
)

TRITON = Subject(
    package="nanovllm_attention_triton",
    suite="""
import pytest
from nanovllm_kit import AttentionConformance, PluginUnderTest
from COPY.plugin import nanovllm_attention

class TestCopy(AttentionConformance):
    @pytest.fixture
    def plugin(self):
        [spec] = nanovllm_attention()
        return PluginUnderTest(spec, spec.options(), "COPY.plugin")
""",
)

DECODE = "test_decode_equals_the_reference"
PREFILL = "test_prefill_equals_the_reference"
CHUNKS = "test_chunks_continue_the_context_in_the_blocks"
NEEDLES = "test_no_key_is_lost_wherever_it_lies"
LARGE_SCORES = "test_large_scores_neither_overflow_nor_vanish"
SCALE = "test_the_scale_is_applied_once"
DTYPES = "test_every_declared_dtype_computes"
HEAD_SIZES = "test_every_declared_head_size_computes"
WINDOWS = "test_sliding_windows_end_where_they_should"
SOFT_CAPS = "test_soft_caps_bend_the_scores"
HEADS = "test_query_heads_read_their_own_kv_head"
BLOCK_SIZES = "test_every_block_size_is_read"
ANYWHERE = "test_blocks_may_lie_anywhere"
OWN_BLOCKS = "test_only_the_rows_own_blocks_are_read"
FREED = "test_blocks_before_the_window_may_belong_to_others"
TAIL = "test_nothing_is_read_behind_the_last_key"
FULL_ROWS = "test_a_sequence_may_fill_the_model_length"
SLICES = "test_block_tables_may_be_slices"
BEYOND = "test_blocks_beyond_2_to_the_31_elements_are_read"
WRITES = "test_only_the_output_is_written"
PLANS = "test_plans_follow_their_inputs"
LAYERS = "test_a_plan_serves_every_layer"
REPLAYS = "test_recorded_steps_follow_changed_inputs"
PROMPT_REPLAYS = "test_recorded_prefill_follows_changed_chunks"
ADDRESSES = "test_captured_tensors_stay_where_they_are"
NEWEST = "test_decode_from_qkv_at_the_edges_of_tiles_and_blocks"
FROM_QKV = "test_decode_from_qkv_equals_preparation_and_decode"
BOTH_PARTS = "test_both_parts_of_a_step_and_all_its_layers"

DECODE_KERNEL, PREFILL_KERNEL = "decode_kernels.py", "prefill_kernels.py"
DECODE_PLAN, QKV_KERNEL = "decode_plan.py", "decode_qkv_kernels.py"


def bug(
    name: str, file: str, caught_by: str, *edits: tuple[str, str], peers: int | None = None
) -> Mutation:
    return Mutation(name=name, file=file, edits=edits, caught_by=caught_by, peers=peers)


MUTATIONS = [
    # What the other engines had.
    bug(
        "the block table's copy has no column for a last, partial block", "backend.py", FULL_ROWS,
        (
            "        workspace.plan(",
            "        self._table = metadata.block_table.clone()\n"
            "        self._table[:, self.config.max_model_len // self.config.block_size :] = 0\n"
            "        workspace.plan(",
        ),
        ("            q_BHD,\n            k_cache,\n            v_cache,\n"
         "            metadata.block_table,\n",
         "            q_BHD,\n            k_cache,\n            v_cache,\n"
         "            self._table,\n"),
        peers=4,
    ),
    bug(
        "a padded row stores a key in slot 0", DECODE_KERNEL, WRITES,
        (
            "    store_result(\n",
            "    if end == begin:\n"
            "        tl.store(k_ptr + dims, tl.zeros([HEAD_SIZE], k_ptr.dtype.element_ty))\n"
            "    store_result(\n",
        ),
        peers=9,
    ),
    bug(
        "the decode position is off by one", DECODE_PLAN, DECODE,
        ("lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)",
         "lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)\n"
         "    lens = tl.maximum(lens - 1, 0)"),
        peers=10,
    ),
    bug(
        "the scale twice, in decode", "decode.py", SCALE,
        ("scale * LOG2_E", "scale * scale * LOG2_E"), peers=15,
    ),
    bug(
        "the scale twice, in prefill", "prefill.py", SCALE,
        ("scale * LOG2_E", "scale * scale * LOG2_E"), peers=15,
    ),
    bug(
        "keys through fp16", DECODE_KERNEL, DTYPES,
        ("scores = tl.dot(q, tl.trans(k),", "scores = tl.dot(q, tl.trans(k.to(tl.float16)"
         ".to(q.dtype)),"),
        peers=15,
    ),
    bug(
        "values through fp16, in prefill", PREFILL_KERNEL, DTYPES,
        ("weights.to(v.dtype), v, acc", "weights.to(v.dtype), v.to(tl.float16).to(v.dtype), acc"),
        peers=15,
    ),
    bug(
        "the plan is overwritten before the last layer has read it", "decode.py", LAYERS,
        ("            num_stages=self.tuning.num_stages,\n        )\n",
         "            num_stages=self.tuning.num_stages,\n        )\n"
         "        self.num_items.zero_()\n"),
        peers=20,
    ),
    bug(
        "a plan makes its tensors anew", "decode.py", REPLAYS,
        ("        fixed = tuning.fixed_chunk\n",
         "        fixed = tuning.fixed_chunk\n        self.items = torch.zeros_like(self.items)\n"),
        peers=22,
    ),
    bug(
        "a plan makes the tensors anew that it names", "decode.py", ADDRESSES,
        ("        fixed = tuning.fixed_chunk\n",
         "        fixed = tuning.fixed_chunk\n        self.lse = torch.zeros_like(self.lse)\n"),
        peers=22,
    ),
    bug(
        "a captured prompt step keeps the lengths of its warm-up", "prefill.py", PROMPT_REPLAYS,
        ("        seq_lens_S,\n        query_start_loc,\n",
         "        _SEEN.setdefault(num_queries, seq_lens_S.clone()),\n        query_start_loc,\n"),
        ("def check_scale(", "_SEEN: dict[int, Tensor] = {}\n\n\ndef check_scale("),
        peers=22,
    ),
    bug(
        "a lazy plan that the warm-up uses up", "decode.py", REPLAYS,
        (
            "        fixed = tuning.fixed_chunk\n",
            "        fixed = tuning.fixed_chunk\n"
            "        if getattr(self, 'planned', None) is seq_lens_B:\n            return\n"
            "        self.planned = seq_lens_B\n",
        ),
        peers=22,
    ),
    bug(
        "a table of blocks set up at the first plan only", "backend.py", PLANS,
        (
            "        workspace.plan(",
            "        if not hasattr(self, '_table'):\n"
            "            self._table = metadata.block_table.new_zeros(self.config.max_num_seqs,"
            " 2 * metadata.block_table.shape[1])\n"
            "            self._table[: metadata.num_rows, : metadata.block_table.shape[1]] ="
            " metadata.block_table\n"
            "        workspace.plan(",
        ),
        ("            q_BHD,\n            k_cache,\n            v_cache,\n"
         "            metadata.block_table,\n",
         "            q_BHD,\n            k_cache,\n            v_cache,\n"
         "            self._table,\n"),
        peers=22,
    ),
    # Masks and positions.
    bug(
        "a query does not see its own key", PREFILL_KERNEL, PREFILL,
        ("visible = start + keys[None, :] <= positions",
         "visible = start + keys[None, :] < positions"),
    ),
    bug(
        "a query sees the next key", PREFILL_KERNEL, NEEDLES,
        ("(whole_end + keys[None, :] <= positions", "(whole_end + keys[None, :] <= 1 + positions"),
    ),
    bug(
        "a chunk forgets its context", PREFILL_KERNEL, CHUNKS,
        ("    positions = context + rows // GROUP", "    positions = rows // GROUP"),
    ),
    bug(
        "the last, partial tile is dropped", PREFILL_KERNEL, NEEDLES,
        ("    if whole_end < end:", "    if whole_end < 0:"),
    ),
    # Blocks.
    bug(
        "the order of the block table is ignored", DECODE_KERNEL, ANYWHERE,
        ("tl.load(table_ptr + tokens // BLOCK_SIZE,",
         "tl.load(table_ptr + tl.maximum((end - 1) // BLOCK_SIZE - tokens // BLOCK_SIZE, 0),"),
    ),
    bug(
        "the block of a row's first token for every chunk of it", DECODE_PLAN, BLOCK_SIZES,
        ("row * table_stride + begin // BLOCK_SIZE, mask", "row * table_stride, mask"),
    ),
    bug(
        "a tile in the middle of a block is read from its start", PREFILL_KERNEL, BLOCK_SIZES,
        ("k = k_desc.load([block_id, start % BLOCK_SIZE, kv_head, 0])",
         "k = k_desc.load([block_id, 0, kv_head, 0])"),
    ),
    bug(
        "the tail of a last block is read", DECODE_KERNEL, TAIL,
        ("live = start + tl.arange(0, TILE) < end",
         "live = start + tl.arange(0, TILE) < tl.cdiv(end, BLOCK_SIZE) * BLOCK_SIZE"),
    ),
    bug(
        "a tile in which a window begins is read from its start", DECODE_KERNEL, FREED,
        ("        if first is not None:\n            tokens = tl.maximum(tokens, first)\n"
         "        block_ids", "        block_ids"),
    ),
    bug(
        "the last tile is read from before the window", PREFILL_KERNEL, FREED,
        ("live = live & (whole_end + keys >= first_key)", "live = live & (keys >= 0)"),
    ),
    bug(
        "the host's bound instead of the lengths on the device", "backend.py", OWN_BLOCKS,
        ("        workspace.plan(metadata.seq_lens,",
         "        width = metadata.block_table.shape[1] * self.config.block_size\n"
         "        workspace.plan(metadata.seq_lens.new_full((metadata.num_rows,), width),"),
    ),
    bug(
        "the stride of the block table is ignored", "decode.py", SLICES,
        ("            out_BHD.stride(1),\n            block_table.stride(0),",
         "            out_BHD.stride(1),\n            block_table.shape[1],"),
    ),
    bug(
        "offsets of 31 bits", DECODE_KERNEL, BEYOND,
        ("return block_ids * stride_block + slots.to(tl.int64) * stride_token",
         "return (block_ids * stride_block + slots.to(tl.int64) * stride_token) & 0x7FFFFFFF"),
    ),
    # Heads.
    bug(
        "query heads are dealt out to KV heads in turn, in decode", DECODE_KERNEL, HEADS,
        ("heads = kv_head * GROUP + members",
         "heads = kv_head + members * (programs_per_item // HEAD_BLOCKS)"),
    ),
    bug(
        "query heads are dealt out to KV heads in turn, in prefill", PREFILL_KERNEL, HEADS,
        ("heads = kv_head * GROUP + rows % GROUP",
         "heads = kv_head + rows % GROUP * tl.num_programs(0)"),
    ),
    # The running softmax, and its parts.
    bug(
        "the merge of a row's parts drops the last", DECODE_KERNEL, NEEDLES,
        ("live = chunks < num_chunks", "live = chunks < num_chunks - 1"),
    ),
    bug(
        "the parts of a row are averaged without their masses", DECODE_KERNEL, DECODE,
        ("weights = tl.exp2(lse - anchor[None, :])",
         "weights = tl.where(mask, 1.0, 0.0)"),
        ("mass = mass * rescale + tl.sum(weights, 0)\n        acc = acc * rescale[:, None]",
         "mass = mass + tl.sum(weights, 0)\n        acc = acc"),
    ),
    bug(
        "the largest score is not subtracted, in decode", DECODE_KERNEL, LARGE_SCORES,
        ("new_peak = tl.maximum(peak, tl.max(scores, 1))", "new_peak = tl.zeros_like(peak)"),
    ),
    bug(
        "the largest score is not subtracted, in prefill", PREFILL_KERNEL, LARGE_SCORES,
        ("new_peak = tl.maximum(peak, tl.max(scores, 1) * log2_scale)",
         "new_peak = tl.zeros_like(peak)"),
    ),
    bug(
        "sums are not rescaled to a new largest score", PREFILL_KERNEL, PREFILL,
        ("    acc = acc * rescale[:, None]\n", ""),
    ),
    bug(
        "the ticket of a merged row is left as it is", DECODE_KERNEL, LAYERS,
        ("            tl.store(ticket, 0)\n", ""),
    ),
    bug(
        "prefill reads the queries of the whole step", "prefill.py", BOTH_PARTS,
        ("    num_seqs = block_table.shape[0]\n",
         "    num_seqs = block_table.shape[0]\n"
         "    q_THD = torch.as_strided(q_THD, q_THD.shape, q_THD.stride(), 0)\n"),
    ),
    # What it says about itself.
    bug(
        "a dtype is accepted that is computed wrongly here", "plugin.py", DTYPES,
        ('if requirements.dtype == "bfloat16":', "if False:"),
    ),
    bug(
        "the last column of a padded head is lost", DECODE_KERNEL, HEAD_SIZES,
        ("(tl.arange(0, BLOCK_D) < HEAD_SIZE)", "(tl.arange(0, BLOCK_D) < HEAD_SIZE - 1)"),
    ),
    bug(
        "a window is one key too long in decode", DECODE_PLAN, WINDOWS,
        ("begin = tl.maximum(begin + skipped, lens - WINDOW)",
         "begin = tl.maximum(begin + skipped, lens - WINDOW - 1)"),
    ),
    bug(
        "a window is counted from the chunk, not from the position", PREFILL_KERNEL, WINDOWS,
        ("            if start < seen_from:", "            if start < seen_from - context:"),
    ),
    bug(
        "a soft cap is applied to scores before their scale", DECODE_KERNEL, SOFT_CAPS,
        ("tanh(scores / (SOFT_CAP", "tanh(scores / log2_scale / (SOFT_CAP"),
    ),
    # Decode from packed q, k, v.
    bug(
        "the newest key is not stored", QKV_KERNEL, FROM_QKV,
        ("    tl.store(k_head + places, new_k, mask=stored)\n", ""),
    ),
    bug(
        "the newest value is stored in the first slot of its block", QKV_KERNEL, FROM_QKV,
        ("tl.store(v_head + places,",
         "tl.store(v_head + places - slot % BLOCK_SIZE * stride_token,"),
    ),
    bug(
        "heads are normed twice", QKV_KERNEL, FROM_QKV,
        ("x = x * (scale * weight.to(tl.float32))",
         "x = x * (scale * weight.to(tl.float32) * weight.to(tl.float32))"),
    ),
    bug(
        "squares of a head are summed in the dtype of the heads", QKV_KERNEL, FROM_QKV,
        ("scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_SIZE + EPS)",
         "scale = tl.rsqrt(tl.sum(x.to(dtype) * x.to(dtype), 1).to(tl.float32) / HEAD_SIZE + EPS)"),
    ),
    bug(
        "the newest key is also read where it was to be stored", QKV_KERNEL, FROM_QKV,
        ("old_end = tl.where(is_new, end - 1, end)", "old_end = end"),
    ),
    bug(
        "the newest key counts in every chunk of its row", QKV_KERNEL, NEWEST,
        ("(item - first_item == num_chunks - 1) & (begin < end)", "begin < end"),
    ),
    bug(
        "columns that do not rotate are lost", QKV_KERNEL, FROM_QKV,
        ("mask=dims < 2 * HALF, other=1.0)", "mask=dims < 2 * HALF, other=0.0)"),
    ),
    bug(
        "a row rotates by its length, not by its position", QKV_KERNEL, FROM_QKV,
        ("tl.load(positions_ptr + row).to(tl.int64)", "end.to(tl.int64)"),
    ),
    bug(
        "a dtype under a name that is none of torch's", "plugin.py",
        "test_capabilities_are_in_the_cores_terms",
        ('"bfloat16", "float32"})', '"bf16", "float32"})'),
    ),
    bug(
        "no block layout on a CPU", "plugin.py", "test_layouts_name_blocks_that_both_phases_read",
        ("else (16,)", "else ()"),
    ),
    bug(
        "a check that raises instead of giving its reason", "plugin.py",
        "test_questions_about_what_is_declared_get_an_answer",
        ('        if requirements.dtype == "bfloat16":\n            reasons.append(',
         '        if requirements.dtype == "bfloat16":\n            raise ValueError('),
    ),
    bug(
        "listing the plugin imports torch", "plugin.py",
        "test_reading_the_spec_imports_nothing_heavy",
        ("import os\n", "import os\nimport torch\n"),
    ),
    bug(
        "a misspelt option is ignored", "options.py", "test_the_options_model_forbids_unknown_keys",
        ('extra="forbid"', 'extra="ignore"'),
    ),
    bug(
        "several queries per row are taken for one", "backend.py",
        "test_more_queries_per_row_are_refused_or_right",
        ("if metadata.query_len != 1:", "if False:"),
    ),
]  # fmt: skip

WINDOWS_AND_SOFT_CAPS = [
    bug(
        "a window one key too long, in decode", DECODE_PLAN, WINDOWS,
        ("begin = tl.maximum(begin + skipped, lens - WINDOW)",
         "begin = tl.maximum(begin + skipped, lens - WINDOW - 1)"),
    ),
    bug(
        "a window without the query's own key, in decode", DECODE_PLAN, WINDOWS,
        ("begin = tl.maximum(begin + skipped, lens - WINDOW)",
         "begin = tl.maximum(begin + skipped, lens - WINDOW + 1)"),
    ),
    bug(
        "a window one key too long, in prefill", PREFILL_KERNEL, WINDOWS,
        ("visible = start + keys[None, :] >= positions",
         "visible = start + keys[None, :] >= -1 + positions"),
    ),
    bug(
        "the window ends with the last whole tile", PREFILL_KERNEL, WINDOWS,
        ("visible = visible & (whole_end + keys[None, :] >= positions[:, None] - LEFT)", "pass"),
    ),
    bug(
        "the soft cap is ignored, in decode", DECODE_KERNEL, SOFT_CAPS,
        ("tanh(scores / (SOFT_CAP * LOG2_E), k.dtype) * (SOFT_CAP * LOG2_E)", "scores"),
    ),
    bug(
        "the soft cap bends the scores before their scale", PREFILL_KERNEL, SOFT_CAPS,
        ("cap_scale = log2_scale / (SOFT_CAP * LOG2_E)", "cap_scale = 1.0 / SOFT_CAP"),
    ),
]  # fmt: skip
# A suite checks what is declared.
if nanovllm_attention()[0].capabilities.sliding_window:
    MUTATIONS += WINDOWS_AND_SOFT_CAPS


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=18))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    TRITON.assert_caught(tmp_path, number, MUTATIONS[number])


@pytest.mark.slow
def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """Copying breaks nothing: a check of each sort passes, so what a check catches is the bug.

    The plugin's own tests run every check on the plugin itself, which takes minutes.
    """
    checks = [LAYERS, WRITES, FULL_ROWS, ADDRESSES, PROMPT_REPLAYS]
    outcomes = TRITON.run(tmp_path, "nanovllm_attention_triton_copy", None, checks)
    assert {check: outcomes.of[check] for check in checks} == {c: {"passed"} for c in checks}


def test_the_bugs_of_the_other_engines_that_a_backend_can_have_are_all_planted() -> None:
    assert {m.peers for m in MUTATIONS} - {None} == {4, 9, 10, 15, 20, 22}
