"""The row kernels compile for sm_90 without spills."""

from __future__ import annotations

import re

import pytest

from nanovllm_kit.aot import AotJob, AotReport
from nanovllm_kit.registers import assert_within_list, compile_jobs

MODULE = "nanovllm_core.worker.rows_triton"
TABLES = ("num_prompt", "token_ids", "block_table")
OUTPUTS = ("out_ids", "out_positions", "out_rows", "out_seq_lens", "out_index", "out_block_table")
SIZES = {
    **dict.fromkeys(("max_model_len", "max_blocks", "table_stride"), "i32:16"),
    **dict.fromkeys(("slots_stride", "out_table_stride"), "i32"),
}


def pointers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*i32:16")


JOBS = {
    "prepare_decode": AotJob(
        kernel=f"{MODULE}:_prepare_decode_kernel",
        signature={
            **pointers("active_rows", "finished", "computed", *TABLES, *OUTPUTS),
            "out_slots": "*i64:16",
            **SIZES,
        },
        constexprs={"GROUPS": 1, "BLOCK_SIZE": 256, "BLOCK": 256, "DEPENDENT": True},
        num_warps=2,
    ),
    "prepare_prefill": AotJob(
        kernel=f"{MODULE}:_prepare_prefill_kernel",
        signature={
            **pointers("chunks", *TABLES, *OUTPUTS),
            "out_slots": "*i64:16",
            "chunk_stride": "i32",
            **SIZES,
        },
        constexprs={"GROUPS": 1, "BLOCK_SIZE": 256, "BLOCK": 256},
    ),
    "finish_step": AotJob(
        kernel=f"{MODULE}:_finish_step_kernel",
        signature={
            **pointers("skip", "rows", "seq_lens", "sampled", "token_ids", "computed"),
            **pointers("num_prompt", "max_length", "min_tokens", "finished", "stop_ids"),
            **dict.fromkeys(("words", "num_finished"), "*i64:16"),
            **dict.fromkeys(("num_rows", "num_slots"), "i32"),
            **dict.fromkeys(("max_rows", "max_model_len"), "i32:16"),
        },
        constexprs={
            "NUM_STOP_IDS": 8,
            "TAG_MASK": (1 << 30) - 1,
            "BLOCK": 256,
            "DEPENDENT": True,
        },
        num_warps=8,
    ),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, AotReport]:
    return compile_jobs(JOBS)


def test_no_kernel_takes_more_than_its_line(reports: dict[str, AotReport]) -> None:
    """Registers, spills and shared memory are those of the list for this version of Triton."""
    assert_within_list(__file__, reports)


@pytest.mark.parametrize("name", ["prepare_decode", "finish_step"])
def test_no_program_reads_or_ends_before_the_wait(reports: dict[str, AotReport], name: str) -> None:
    """Else a kernel would end before the one before it, and the next would read too early."""
    before, _, behind = reports[name].ptx.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert not re.search(r"ld\.global|st\.global|\bret;|\bbra\b", before)
    assert "st.global" in behind


@pytest.mark.parametrize("name", list(JOBS))
def test_nothing_spills(reports: dict[str, AotReport], name: str) -> None:
    """A spill would put table reads of every step through local memory."""
    assert reports[name].spills == 0
    assert reports[name].registers <= 64
