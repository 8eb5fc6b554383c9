"""The half-precision kernels compile for sm_90 and keep their registers (no GPU needed)."""

from __future__ import annotations

import pytest

from nanovllm_attention_triton.decode import DecodeShape
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.tuning import decode_tuning, prefill_tuning
from nanovllm_core.testing.aot import AotJob, compile_many_for_sm90

KERNELS = "nanovllm_attention_triton"
# Registers per thread above which fewer programs share a multiprocessor than the tuning assumes:
# three decode programs of 128 threads, one prefill program of 256.
DECODE_REGISTERS = 168
PREFILL_REGISTERS = 255


def pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}:16")


def integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32:16")


def decode_job(dtype: str, head_size: int, page: int, group: int) -> AotJob:
    shape = DecodeShape(
        num_heads=8 * group,
        num_kv_heads=8,
        head_size=head_size,
        max_num_seqs=256,
        max_seq_len=4096,
        num_multiprocessors=132,
    )
    tuning = decode_tuning(2, head_size, TritonOptions())
    return AotJob(
        kernel=f"{KERNELS}.decode_kernels:decode_kernel",
        signature=pointers(dtype, "q_ptr", "k_ptr", "v_ptr", "out_ptr")
        | pointers("i32", "table_ptr", "items_ptr", "num_items_ptr", "tickets_ptr")
        | pointers("fp32", "partial_ptr", "lse_ptr")
        | integers("q_stride_row", "q_stride_head", "out_stride_row", "out_stride_head")
        | integers("table_stride", "stride_page", "stride_token", "stride_head", "item_capacity")
        | {"log2_scale": "fp32", "programs_per_item": "i32"},
        constexprs=shape.constants(page, tuning.tile),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def prefill_job(dtype: str, head_size: int, page: int, max_query_len: int) -> AotJob:
    tuning = prefill_tuning(2, head_size, max_query_len, TritonOptions())
    return AotJob(
        kernel=f"{KERNELS}.prefill_kernels:prefill_kernel",
        signature=pointers(dtype, "q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr")
        | pointers("i32", "table_ptr", "seq_lens_ptr", "query_start_ptr")
        | integers("q_stride_token", "q_stride_head", "out_stride_token", "out_stride_head")
        | integers("table_stride", "stride_page", "stride_token", "stride_head")
        | {"log2_scale": "fp32", "lse_stride_head": "i32"},
        constexprs={
            "GROUP": 2,
            "HEAD_SIZE": head_size,
            "PAGE": page,
            "CAUSAL": True,
            "WITH_LSE": False,
            "BLOCK_M": tuning.block_m,
            "BLOCK_N": tuning.block_n,
        },
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


@pytest.fixture(scope="module")
def reports():
    """Every compilation of this module, in one process: (job, report) by kind."""
    decode = [
        decode_job("bf16", 128, 16, 2),
        decode_job("bf16", 128, 256, 2),
        decode_job("fp16", 128, 64, 8),
        decode_job("bf16", 64, 16, 4),
        decode_job("fp16", 64, 128, 1),
    ]
    prefill = [
        prefill_job("bf16", 128, 16, 1000),
        prefill_job("fp16", 128, 256, 1000),
        prefill_job("bf16", 64, 64, 1000),
        prefill_job("bf16", 128, 16, 64),
    ]
    found = compile_many_for_sm90(decode + prefill)
    return {"decode": found[: len(decode)], "prefill": found[len(decode) :]}


@pytest.mark.parametrize(
    ("kind", "limit"), [("decode", DECODE_REGISTERS), ("prefill", PREFILL_REGISTERS)]
)
def test_kernels_keep_everything_in_registers(reports, kind, limit):
    """A spilled register costs a trip to memory in the innermost loop."""
    for report in reports[kind]:
        assert report.spills == 0, f"{report.spills} bytes spilled"
        assert report.registers <= limit, f"{report.registers} registers, at most {limit}"


def test_decode_keeps_several_tiles_in_flight(reports):
    """The loop waits for a tile while later ones are still loading, in copies of 16 bytes.

    A page id loaded in the round that needs it would leave `wait_group 0` alone.
    """
    for report in reports["decode"]:
        assert "cp.async.wait_group \t2" in report.ptx or "cp.async.wait_group 2" in report.ptx
        assert "0x10" in report.ptx.split("cp.async.cg.shared.global", 1)[1][:80]


def test_prefill_runs_on_the_warpgroup_tensor_cores(reports):
    """wgmma, the only way to Hopper's full rate."""
    for report in reports["prefill"]:
        assert "wgmma.mma_async" in report.ptx
