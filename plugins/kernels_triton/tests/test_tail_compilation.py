"""The captured tail's kernels compile for sm_90 within the registers of their launches."""

from __future__ import annotations

import re

import pytest

from nanovllm_kernels_triton import captured_tail as tail
from nanovllm_kit.aot import AotJob, AotReport
from nanovllm_kit.registers import assert_within_list, compile_jobs

MODULE = "nanovllm_kernels_triton.tail"
INTEGERS = ("rows", "output_index", "num_known", "skip", "params", "biases", "stop_ids")
INTEGERS += ("min_tokens", "score_ids", "stats", "ids")
SHARED = {
    **{f"{name}_ptr": "*i32:16" for name in INTEGERS},
    **dict.fromkeys(("temperature_ptr", "scores_ptr", "values_ptr"), "*fp32:16"),
    "seed_ptr": "*i64:16",
    "halves_ptr": "*i16:16",
    "num_words": "i32:16",
    "max_entries": "i32",
}
COLUMNS = dict.fromkeys(("num_columns", "num_ids"), "i32:16")
SECOND_HALF = 75968
"""The first id of the second of two ranks that share 151,936."""
CONSTANTS = {
    "TILE": tail.TILE,
    "MAX_SPLITS": tail.MAX_SPLITS,
    "PLAIN_SPLITS": 64,
    "APPROXIMATE": True,
    "DEPENDENT": True,
}


def partial_job(dtype: str, first_id: int = 0) -> AotJob:
    pointers = dict.fromkeys(("num_prompt_ptr", "token_ids_ptr", "words_ptr"), "*i32:16")
    sizes = dict.fromkeys(("num_tiles", "max_model_len", "max_top_k"), "i32")
    return AotJob(
        kernel=f"{MODULE}:tail_partial_kernel",
        signature={
            **SHARED,
            **pointers,
            **sizes,
            **COLUMNS,
            "logits_ptr": f"*{dtype}:16",
        },
        constexprs=CONSTANTS | {"FIRST_ID": first_id},
        num_warps=tail.NUM_WARPS,
        maxnreg=tail.PARTIAL_REGISTERS,
    )


def merge_job(dtype: str) -> AotJob:
    pointers = dict.fromkeys(("out_ptr", "logprobs_ptr"), "*i32:16")
    sizes = dict.fromkeys(("num_splits", "plain_splits"), "i32")
    return AotJob(
        kernel=f"{MODULE}_merge:tail_merge_kernel",
        signature={
            **SHARED,
            **pointers,
            **sizes,
            "vocab_size": "i32:16",
            "logits_ptr": f"*{dtype}:16",
        },
        constexprs=CONSTANTS,
        num_warps=tail.NUM_WARPS,
        maxnreg=tail.MERGE_REGISTERS,
    )


def part_job() -> AotJob:
    """A rank's part of each entry."""
    sizes = dict.fromkeys(("num_splits", "plain_splits"), "i32")
    types = {"parts_ptr": "*i32:16", "logits_ptr": "*bf16:16", **COLUMNS}
    return AotJob(
        kernel=f"{MODULE}_parts:make_part_kernel",
        signature={**SHARED, **sizes, **types},
        constexprs=CONSTANTS | {"FIRST_ID": SECOND_HALF},
        num_warps=tail.NUM_WARPS,
        maxnreg=tail.MERGE_REGISTERS,
    )


def join_job(num_ranks: int) -> AotJob:
    integers = ("parts", "rows", "output_index", "num_known", "skip", "params", "out", "logprobs")
    return AotJob(
        kernel=f"{MODULE}_parts:join_parts_kernel",
        signature={
            **{f"{name}_ptr": "*i32:16" for name in integers},
            "temperature_ptr": "*fp32:16",
            "seed_ptr": "*i64:16",
            "rank_stride": "i32",
        },
        constexprs={
            "RANKS": num_ranks,
            "BLOCK_RANKS": num_ranks,
            "APPROXIMATE": True,
            "DEPENDENT": True,
        },
        num_warps=tail.NUM_WARPS,
    )


JOBS = {
    **{f"partial-{dtype}": partial_job(dtype) for dtype in ("bf16", "fp32")},
    "partial-rank-bf16": partial_job("bf16", SECOND_HALF),
    "merge-bf16": merge_job("bf16"),
    "part-bf16": part_job(),
    **{f"join-{num_ranks}": join_job(num_ranks) for num_ranks in (2, 8)},
}


@pytest.fixture(scope="module")
def reports() -> dict[str, AotReport]:
    return compile_jobs(JOBS)


def test_no_kernel_takes_more_than_its_line(reports: dict[str, AotReport]) -> None:
    """Registers, spills and shared memory are those of the list for this version of Triton."""
    assert_within_list(__file__, reports)


@pytest.mark.parametrize("name", JOBS)
def test_no_program_reads_or_ends_before_the_wait(name: str, reports: dict[str, AotReport]) -> None:
    """Else a kernel would end before the one before it, and the next would read too early."""
    before, _, behind = reports[name].ptx.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert not re.search(r"ld\.global|st\.global|\bret;|\bbra\b", before)
    assert "st.global" in behind


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "rank-bf16"])
def test_the_logits_are_read_16_bytes_at_a_time(dtype: str, reports: dict[str, AotReport]) -> None:
    """Four 32-bit words per access."""
    assert "ld.global.v4" in reports[f"partial-{dtype}"].ptx
