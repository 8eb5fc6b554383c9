"""The one-shot and two-shot kernels compile for sm_90 without spills, with 16-byte accesses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from nanovllm_executor_parallel.slots import MAX_REGISTERS, warps_of_row
from nanovllm_kit.aot import AotJob, AotReport
from nanovllm_kit.registers import assert_within_list, compile_jobs

POINTERS = ("peers_ptr", "state_ptr", "limit_ptr", "failure_ptr")


def job(name: str, dtype: str, size: int, has_residual: bool) -> AotJob:
    return AotJob(
        kernel=f"nanovllm_executor_parallel.{name}:{name}_kernel",
        signature={
            **dict.fromkeys(("x_ptr", "residual_ptr"), f"*{dtype}:16"),
            **dict.fromkeys(POINTERS, "*i64:16"),
            "slots_ptr": "*i32:16",
            "rank": "i32",
            "num_units": "i32",
        },
        constexprs={
            "SIZE": size,
            "PADDED_SIZE": 1 << (size - 1).bit_length(),
            "ROW": 65536,
            "BLOCK": 128,
            "HAS_RESIDUAL": has_residual,
            "INTERPRETED": False,
            "DEPENDENT": True,
        },
        num_warps=1,
        maxnreg=MAX_REGISTERS,
        disassemble=True,
    )


def norm_job(name: str, dtype: str, size: int, words: int) -> AotJob:
    """The kernel of whole rows, which also norms them."""
    whole = job(name, dtype, size, has_residual=True)
    block = 1 << (words - 1).bit_length()
    warps = warps_of_row(words)
    pointers = dict.fromkeys(("weight_ptr", "normed_ptr"), f"*{dtype}:16")
    numbers = {"WORDS": words, "BLOCK": block, "SEND": 128 * warps, "EPS": 1e-6}
    return replace(
        whole,
        kernel=f"nanovllm_executor_parallel.{name}_norm:{name}_norm_kernel",
        signature={
            "num_rows" if key == "num_units" else key: kind
            for key, kind in {**whole.signature, **pointers}.items()
        },
        constexprs={
            key: value
            for key, value in {**whole.constexprs, **numbers}.items()
            if key != "HAS_RESIDUAL"
        },
        num_warps=warps,
    )


WORD_JOBS = {
    f"{name}-{dtype}-{size}{'-residual' * has_residual}": job(name, dtype, size, has_residual)
    for name, dtype, size, has_residual in (
        ("one_shot", "bf16", 2, True),
        ("one_shot", "bf16", 3, True),
        ("one_shot", "bf16", 4, True),
        ("one_shot", "bf16", 8, True),
        ("one_shot", "fp16", 4, False),
        ("one_shot", "fp32", 2, False),
        ("two_shot", "bf16", 2, True),
        ("two_shot", "bf16", 3, True),
        ("two_shot", "bf16", 4, True),
        ("two_shot", "bf16", 8, True),
        ("two_shot", "fp16", 4, False),
        ("two_shot", "fp32", 8, False),
    )
}
NORM_JOBS = {
    f"{name}_norm-{dtype}-{size}-{words}": norm_job(name, dtype, size, words)
    for name, dtype, size, words in (
        ("one_shot", "bf16", 2, 2048),
        ("one_shot", "bf16", 2, 2560),
        ("one_shot", "bf16", 4, 2560),
        ("one_shot", "fp32", 2, 1024),
        ("two_shot", "bf16", 4, 2048),
        ("two_shot", "bf16", 4, 2560),
        ("two_shot", "fp16", 8, 8192),
    )
}
JOBS = {**WORD_JOBS, **NORM_JOBS}


@pytest.fixture(scope="module")
def reports() -> dict[str, AotReport]:
    return compile_jobs(JOBS)


def test_no_kernel_takes_more_than_its_line(reports: dict[str, AotReport]) -> None:
    """Registers, spills and shared memory are those of the list for this version of Triton."""
    assert_within_list(__file__, reports)


@pytest.mark.parametrize("name", WORD_JOBS)
def test_a_thread_sends_and_polls_16_bytes_at_a_time(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Nothing spills, and no access to x or to a slot is narrower. Polls bypass the cache."""
    report = reports[name]
    assert report.spills == 0
    assert report.shared == 0
    assert "ld.volatile.global.v4.b32" in report.ptx
    assert "st.global.v4.b32" in report.ptx
    assert not re.search(r"(ld|st)\.(volatile\.)?global(\.v2)?\.b32", report.ptx)


@pytest.mark.parametrize("name", WORD_JOBS)
def test_a_program_sends_before_it_polls(name: str, reports: dict[str, AotReport]) -> None:
    """In machine code too: a store of 16 bytes to each other rank, then the first poll."""
    code = reports[name].sass
    size = int(name.split("-")[2])
    first_poll = code.index("LDG.E.128.STRONG.SYS")
    assert code[:first_poll].count("STG.E.128") >= size - 1
    assert code.index("ACQBULK") < code.index("LDG.E.64.STRONG.SYS")
    assert "MEMBAR" not in code
