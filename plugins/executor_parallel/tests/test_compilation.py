"""The one-shot kernel compiles for sm_90 without spills and with 16-byte accesses."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from nanovllm_kit.aot import AotJob, AotReport
from nanovllm_kit.registers import assert_within_list, compile_jobs


def one_shot_job(dtype: str, size: int, has_residual: bool) -> AotJob:
    return AotJob(
        kernel="nanovllm_executor_parallel.one_shot:one_shot_kernel",
        signature={
            **dict.fromkeys(("x_ptr", "residual_ptr"), f"*{dtype}:16"),
            **dict.fromkeys(("peers_ptr", "state_ptr", "failure_ptr"), "*i64:16"),
            "slots_ptr": "*i32:16",
            "rank": "i32",
            "num_units": "i32",
        },
        constexprs={
            "SIZE": size,
            "PADDED_SIZE": 1 << (size - 1).bit_length(),
            "CAPACITY": 65536,
            "BLOCK": 128,
            "HAS_RESIDUAL": has_residual,
            "INTERPRETED": False,
            "DEPENDENT": True,
        },
        num_warps=1,
        disassemble=True,
    )


JOBS = {
    f"one_shot-{dtype}-{size}{'-residual' * has_residual}": one_shot_job(dtype, size, has_residual)
    for dtype, size, has_residual in (
        ("bf16", 2, True),
        ("bf16", 3, True),
        ("bf16", 4, True),
        ("bf16", 8, True),
        ("fp16", 4, False),
        ("fp32", 2, False),
    )
}


@pytest.fixture(scope="module")
def reports() -> dict[str, AotReport]:
    return compile_jobs(JOBS)


def test_no_kernel_takes_more_than_its_line(reports: dict[str, AotReport]) -> None:
    """Registers, spills and shared memory are those of the list for this version of Triton."""
    assert_within_list(__file__, reports)


@pytest.mark.parametrize("name", JOBS)
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


@pytest.mark.parametrize("name", JOBS)
def test_a_program_sends_before_it_polls(name: str, reports: dict[str, AotReport]) -> None:
    """In machine code too: a store of 16 bytes to each other rank, then the first poll."""
    code = reports[name].sass
    size = int(name.split("-")[2])
    first_poll = code.index("LDG.E.128.STRONG.SYS")
    assert code[:first_poll].count("STG.E.128") >= size - 1
    assert code.index("ACQBULK") < code.index("LDG.E.64.STRONG.SYS")
    assert "MEMBAR" not in code
