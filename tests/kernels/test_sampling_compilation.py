"""The sampler's kernels compile for sm_90 without spills and with 16-byte accesses."""

from __future__ import annotations

import re

import pytest

from nanovllm_core.interfaces.tail import NUM_ROW_COLUMNS
from nanovllm_core.kernels import sampling_triton as sampling, truncation_triton as truncation
from nanovllm_kit.aot import AotJob, AotReport
from nanovllm_kit.registers import assert_within_list, compile_jobs

MODULE = sampling.__name__
POINTERS = {
    "rows_ptr": "*i32:16",
    "skip_ptr": "*i32:16",
    "scores_ptr": "*fp32:16",
    "ids_ptr": "*i32:16",
}


def reduce_job(step: int, lanes: int) -> AotJob:
    """Splits of one rank lie in two tensors, pairs of two ranks in one."""
    return AotJob(
        kernel=f"{MODULE}:sample_reduce_kernel",
        signature={
            **POINTERS,
            "ids_ptr": "*i32:16" if step == 1 else "*i32",
            "out_ptr": "*i32:16",
            "count": "i32",
            "row_size": "i32",
        },
        constexprs={"STEP": step, "LANES": lanes, "DEPENDENT": True},
        num_warps=1,
    )


def partial_job(dtype: str, asked: bool = False, aligned: bool = True) -> AotJob:
    """With `asked` it leaves out the rows that a captured tail samples."""
    return AotJob(
        kernel=f"{MODULE}:sample_partial_kernel",
        signature={
            **POINTERS,
            "temperature_ptr": "*fp32:16",
            "seed_ptr": "*i64:16",
            "output_index_ptr": "*i32:16",
            "logits_ptr": f"*{dtype}:16",
            "num_ids": "i32:16" if aligned else "i32",
            "num_tiles": "i32",
            "row_size": "i32:16" if aligned else "i32",
            "first_id": "i32",
            **({"asked_ptr": "*i32:16"} if asked else {}),
        },
        constexprs={
            **({} if asked else {"asked_ptr": None}),
            "MAX_SPLITS": sampling.MAX_SPLITS,
            "NUM_COLUMNS": NUM_ROW_COLUMNS,
            "TILE": sampling.TILE,
            "CHUNK": sampling.CHUNK,
            "ALIGNED": aligned,
            "APPROXIMATE": True,
            "DEPENDENT": True,
        },
        num_warps=sampling.NUM_WARPS,
    )


JOBS = {
    **{f"partial-{dtype}": partial_job(dtype) for dtype in ("bf16", "fp16", "fp32")},
    "partial-asked-bf16": partial_job("bf16", asked=True),
    "partial-unaligned-bf16": partial_job("bf16", aligned=False),
    "reduce": reduce_job(step=1, lanes=sampling.MAX_SPLITS),
    "choose-pair": reduce_job(step=2, lanes=2),
    "best-pair": AotJob(
        kernel=f"{MODULE}:best_pair_kernel",
        signature={
            **{name: POINTERS[name] for name in ("skip_ptr", "scores_ptr", "ids_ptr")},
            "out_ptr": "*i32:16",
            "count": "i32",
        },
        constexprs={"LANES": sampling.MAX_SPLITS, "DEPENDENT": True},
        num_warps=1,
    ),
    "top-k-top-p": AotJob(
        kernel=f"{truncation.__name__}:cut_top_k_top_p_kernel",
        signature={
            "logits_ptr": "*fp32:16",
            "which_ptr": "*i64:16",
            "top_k_ptr": "*i64:16",
            "top_p_ptr": "*fp32:16",
            "temperature_ptr": "*fp32:16",
            "row_stride": "i32:16",
            "vocab_size": "i32:16",
        },
        constexprs={"TILE": truncation.TILE},
        num_warps=truncation.NUM_WARPS,
    ),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, AotReport]:
    return compile_jobs(JOBS)


def test_no_kernel_takes_more_than_its_line(reports: dict[str, AotReport]) -> None:
    """Registers, spills and shared memory are those of the list for this version of Triton."""
    assert_within_list(__file__, reports)


@pytest.mark.parametrize("name", JOBS)
def test_a_sampling_kernel_does_not_spill(name: str, reports: dict[str, AotReport]) -> None:
    """But for 8 bytes where a thousand threads have 64 registers each; all leave room for more."""
    assert reports[name].spills <= (8 if name == "top-k-top-p" else 0)
    assert reports[name].registers <= 64


@pytest.mark.parametrize("name", sorted(JOBS.keys() - {"top-k-top-p"}))
def test_no_program_reads_or_ends_before_the_wait(name: str, reports: dict[str, AotReport]) -> None:
    """Else a kernel would end before the one before it, and the next would read too early."""
    before, _, behind = reports[name].ptx.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert not re.search(r"ld\.global|st\.global|\bret;|\bbra\b", before)
    assert "st.global" in behind


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_logits_are_read_16_bytes_at_a_time(dtype: str, reports: dict[str, AotReport]) -> None:
    """Four 32-bit words per access."""
    assert "ld.global.v4" in reports[f"partial-{dtype}"].ptx
