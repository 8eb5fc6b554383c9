"""The bugs that were seen in other engines, and the tests here that would notice each of them.

The numbers are those of the project's list. The registry is checked: every test that it names
exists, and every bug is either pinned or cannot occur here yet, with the reason.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ENGINE = "tests/engine/test_peer_bugs.py"
E2E = "tests/e2e"
KIT = "plugins/kit/nanovllm_kit"

PINNED: dict[int, tuple[str, dict[str, list[str]]]] = {
    1: (
        "the last running sequence cannot append a block",
        {
            ENGINE: [
                "test_the_last_running_request_always_gets_its_block",
                "test_what_can_never_fit_is_refused_when_it_is_added",
            ],
            f"{E2E}/test_invariance.py": ["test_giving_way_loses_no_token"],
        },
    ),
    2: (
        "max_num_seqs bounds one step rather than residents",
        {ENGINE: ["test_residents_are_bounded_and_the_surplus_is_served_in_turn"]},
    ),
    3: (
        "empty prompts, odd max_tokens and requests beyond the model's length",
        {
            ENGINE: [
                "test_an_empty_prompt_is_refused",
                "test_max_tokens_that_is_not_a_positive_whole_number_is_refused",
                "test_output_beyond_the_model_length_is_refused",
            ],
            f"{E2E}/test_llm.py": ["test_a_bad_prompt_is_refused_before_any_is_run"],
        },
    ),
    4: (
        "a block table wider than the graph's buffer at the full model length",
        {
            ENGINE: ["test_a_request_may_fill_the_model_length_exactly"],
            "tests/worker/test_runner.py": [
                "test_the_longest_sequence_fills_its_block_table_exactly"
            ],
            f"{E2E}/test_sampling.py": ["test_max_tokens_of_none_goes_on_to_the_models_length"],
        },
    ),
    5: (
        "max_num_seqs that is no multiple of the graph step",
        {
            "tests/test_config.py": [
                "test_bucket_sizes_increase_in_steps_of_at_most_8_and_end_at_the_maximum"
            ],
            "tests/worker/test_runner.py": ["test_a_maximum_that_no_step_of_8_meets_is_a_bucket"],
        },
    ),
    6: (
        "rope parameters as a dict: unhashable, or scaling ignored",
        {
            "tests/layers/test_rotary.py": [
                "test_a_rope_config_is_hashable",
                "test_scaling_is_not_ignored",
                "test_tables_equal_those_of_transformers",
            ]
        },
    ),
    7: (
        "KV sizing that subtracts other processes' memory",
        {
            "tests/worker/test_kv_cache.py": [
                "test_memory_of_other_processes_is_not_taken_off_the_share",
                "test_no_more_is_promised_than_is_free",
            ],
            "tests/worker/test_executor.py": ["test_a_given_number_of_blocks_is_honoured"],
        },
    ),
    8: (
        "two instances clash, exit() twice raises",
        {
            f"{E2E}/test_llm.py": [
                "test_two_engines_in_one_process_do_not_know_of_each_other",
                "test_the_context_manager_closes_and_closing_again_is_fine",
            ],
            "tests/worker/test_results.py": [
                "test_a_device_that_stops_without_a_result_is_an_error"
            ],
        },
    ),
    9: (
        "padding rows of a graph write into slot 0",
        {
            "tests/worker/test_runner.py": [
                "test_padding_neither_writes_nor_reads_block_0",
                "test_a_padded_decode_step_equals_one_without_padding",
            ],
            "tests/worker/test_rows.py": ["test_padded_entries_neither_read_nor_write"],
            "tests/kernels/test_reference.py": ["test_a_padded_token_writes_nothing"],
            "plugins/kernels_triton/tests/test_parity.py": ["test_a_padded_token_writes_nothing"],
        },
    ),
    10: (
        "decode position off by one, stale hashes, queries of length zero",
        {
            ENGINE: [
                "test_a_fully_cached_prompt_still_computes_a_token",
                "test_a_reused_block_is_no_longer_found_by_its_old_content",
            ],
            "tests/worker/test_rows.py": [
                "test_a_decode_entry_reads_the_id_at_its_computed_position"
            ],
        },
    ),
    11: (
        "the phase guessed after a preemption, the sampled token lost",
        {
            ENGINE: ["test_a_preempted_request_goes_on_where_it_was"],
            f"{E2E}/test_invariance.py": [
                "test_giving_way_loses_no_token",
                "test_a_preempted_stream_repeats_no_token",
            ],
        },
    ),
    12: (
        "the budget counted before the prefix hit, chunks not cut",
        {
            ENGINE: [
                "test_the_budget_is_counted_after_the_prefix_hit",
                "test_a_chunk_ends_at_the_end_of_the_prompt",
            ]
        },
    ),
    13: (
        "hashes published too early or erased by a hit, one-token prompts",
        {
            ENGINE: [
                "test_a_block_is_not_found_before_its_kv_is_computed",
                "test_a_hit_on_a_free_block_keeps_it_findable",
                "test_prompts_round_a_block_boundary_run",
            ]
        },
    ),
    14: (
        "block two hashed without its parent",
        {
            ENGINE: ["test_the_second_block_is_named_by_its_parent_too"],
            f"{E2E}/test_invariance.py": ["test_no_setting_changes_a_token"],
        },
    ),
    15: (
        "the softmax scale applied twice, KV of another dtype than the model",
        {
            f"{KIT}/attention_numbers.py": ["test_the_scale_is_applied_once"],
            f"{E2E}/test_transformers_parity.py": ["test_logprobs_are_those_of_a_forward_pass"],
            f"{E2E}/test_dtype.py": ["test_the_cache_has_the_dtype_of_the_model"],
        },
    ),
    16: (
        "row-parallel bias per rank, fewer KV heads than ranks, unknown weights skipped",
        {
            "tests/layers/test_parallel_layers.py": [
                "test_a_row_parallel_linear_adds_its_bias_once",
                "test_qkv_replicates_kv_heads_where_there_are_fewer_than_ranks",
            ],
            "tests/worker/test_weights.py": [
                "test_weights_that_do_not_fit_are_named_before_anything_is_copied"
            ],
            f"{E2E}/test_bad_input.py": ["test_a_bad_checkpoint_is_refused"],
        },
    ),
    17: (
        "CUDA graphs freed after what they read",
        {
            "tests/worker/test_graphs.py": [
                "test_graphs_are_freed_once_however_often_it_is_asked",
                "test_closing_frees_the_graphs_before_blocks_and_weights",
            ]
        },
    ),
    18: (
        "only one end-of-sequence id honoured",
        {
            ENGINE: ["test_every_end_of_sequence_id_ends_a_request"],
            f"{E2E}/test_sampling.py": [
                "test_ending_ids_of_the_checkpoint_end_a_request_unless_it_ignores_them",
                "test_any_number_of_stop_ids_is_honoured",
            ],
        },
    ),
    19: (
        "prompts too long without a reply, finish_reason always stop, stop, n and stream ignored",
        {
            ENGINE: [
                "test_finish_reasons_are_true",
                "test_a_refused_request_is_an_error_and_harms_nobody",
            ],
            f"{E2E}/test_sampling.py": [
                "test_a_stop_string_cuts_the_text",
                "test_samples_of_one_prompt_share_its_blocks",
            ],
            f"{E2E}/test_llm.py": [
                "test_a_stream_gives_every_token_as_it_comes",
                "test_streams_and_batches_on_one_engine_do_not_take_each_others_outputs",
            ],
        },
    ),
    20: (
        "duplicate blocks freed while in use, a plan buffer overwritten in flight",
        {
            ENGINE: ["test_duplicate_blocks_stay_private_and_tables_are_never_rewritten"],
            "tests/worker/test_results.py": ["test_a_result_outlives_its_slot"],
        },
    ),
    22: (
        "a captured backend whose plan makes new tensors",
        {
            "tests/worker/test_graphs.py": ["test_a_tensor_made_anew_after_capture_is_named"],
            f"{KIT}/attention_replay.py": ["test_captured_tensors_stay_where_they_are"],
            "plugins/attention_triton/tests/test_gpu.py": [
                "test_replay_with_changed_inputs_equals_eager_bitwise"
            ],
        },
    ),
}

CANNOT_OCCUR_YET = {
    21: "ranks that sample with different seeds: there is one process and one rank; the seed "
    "crosses the seam in every admission, so that any worker draws the same noise",
}


def _defined_in(file: Path) -> set[str]:
    """The names of the test functions that a file defines."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_bug_of_the_list_is_pinned_or_cannot_occur_yet() -> None:
    assert sorted([*PINNED, *CANNOT_OCCUR_YET]) == list(range(1, 23))


@pytest.mark.parametrize("number", PINNED)
def test_the_tests_that_pin_a_bug_exist(number: int) -> None:
    """And more than their names: each asserts something, or expects an error."""
    what, files = PINNED[number]
    for name, tests in files.items():
        file = ROOT / name
        assert file.is_file(), f"bug {number} ({what}): {name} is gone"
        missing = set(tests) - _defined_in(file)
        assert not missing, f"bug {number} ({what}): {name} has no {', '.join(sorted(missing))}"


def test_every_bug_that_the_engines_tests_name_is_in_the_registry() -> None:
    """The engine's own file says the number in each docstring; the registry lists those tests."""
    tree = ast.parse((ROOT / ENGINE).read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        found = re.match(r"Bug (\d+):", ast.get_docstring(node) or "")
        assert found, f"{node.name} does not say which bug it pins"
        assert node.name in PINNED[int(found[1])][1][ENGINE]
