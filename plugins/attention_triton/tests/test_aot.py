"""The half-precision kernels compile for sm_90 and keep their registers (no GPU needed)."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from triton.experimental.gluon import language as gl

from nanovllm_attention_triton.decode import DecodeShape
from nanovllm_attention_triton.decode_tuning import (
    DECODE_FOUR,
    DECODE_REGISTERS,
    DECODE_SIX,
    DECODE_THREE,
    DECODE_WHOLE,
    QKV_REGISTERS,
    SMALL_RESIDENT,
    DecodeTuning,
    decode_tunings,
    half_tiles,
    program_memory,
)
from nanovllm_attention_triton.hopper_packed import hopper_packed_constants
from nanovllm_attention_triton.hopper_prefill import REGISTERS as HOPPER_REGISTERS
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.prefill import COPY_ENGINE_ALIGNMENT
from nanovllm_attention_triton.prefill_tuning import (
    HOPPER_PACKED,
    HOPPER_PREFILL,
    LARGE_CAPABILITIES,
    LARGE_TILE,
    MERGE_TILES,
    SPLIT_TILES,
    START_TILES,
    prefill_tuning,
)
from nanovllm_attention_triton.sizes import WIDE, padded_head_size
from nanovllm_attention_triton.split_work import MERGE_ROWS
from nanovllm_core.api import QKPrep
from nanovllm_kit.aot import SHARED_MEMORY, AotJob, compile_kernels
from nanovllm_kit.registers import assert_within_list, compile_jobs

KERNELS = "nanovllm_attention_triton"
# What the programs that share a multiprocessor may take each of its 65,536 registers and 228 KiB
# of shared memory, of which the system keeps 1 KiB per program: six decode programs of 64 threads
# for few rows, three where they prepare q, k and v too, two of 128 for many, three of 128 for heads
# of 256; two prefill programs of 128, one of 256 for heads of 256.
FEW_REGISTERS, FEW_SHARED = 168, 228 * 1024 // 6 - 1024
SIX_SHARED, FOUR_SHARED = 228 * 1024 // 6 - 1024, 228 * 1024 // 4 - 1024
THREE_SHARED = 228 * 1024 // 3 - 1024
WIDE_REGISTERS, WIDE_SHARED = 168, 228 * 1024 // 3 - 1024
QKV_SHARED = 228 * 1024 // 3 - 1024
MANY_REGISTERS, MANY_SHARED = 255, 228 * 1024 // 2 - 1024
PREFILL_REGISTERS, PREFILL_SHARED = 255, 228 * 1024 // 2 - 1024
WIDE_PREFILL_REGISTERS, WIDE_PREFILL_SHARED = 255, 228 * 1024 - 1024


SPLIT_POINTERS = "items_ptr", "counts_ptr", "partial_ptr", "partial_lse_ptr"


def pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}:16")


SPLIT_SIGNATURE = (
    pointers("i32", "items_ptr", "counts_ptr")
    | pointers("fp32", "partial_ptr", "partial_lse_ptr")
    | {"item_capacity": "i32:16"}
)
"""Of a prefill kernel that attends items; without, these pointers are None."""


def integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32:16")


def strides(*names: str, unit: int) -> dict[str, str]:
    """Strides that are multiples of `unit`, which Triton knows where 16 divides it."""
    return dict.fromkeys(names, "i32" if unit % 16 else "i32:16")


def decode_shape(
    head_size: int, group: int, rows: int, window: int | None, soft_cap: float | None
) -> tuple[DecodeShape, DecodeTuning]:
    """Those of steps of so many rows, with 8 KV heads."""
    _, tuning = decode_tunings(
        2, head_size, 8 * group, 8, rows, TritonOptions(),
        num_multiprocessors=132, shared_memory=228 * 1024,
    )[-1]  # fmt: skip
    shape = DecodeShape(
        num_heads=8 * group,
        num_kv_heads=8,
        head_size=head_size,
        max_num_seqs=256,
        max_seq_len=4096,
        num_multiprocessors=132,
        window=window,
        soft_cap=soft_cap,
        most_heads=tuning.most_heads,
    )
    return shape, tuning


def decode_job(
    dtype: str,
    head_size: int,
    block_size: int,
    group: int,
    rows: int,
    window: int | None = None,
    soft_cap: float | None = None,
    capability: int = 90,
) -> AotJob:
    shape, tuning = decode_shape(head_size, group, rows, window, soft_cap)
    return AotJob(
        kernel=f"{KERNELS}.decode_kernels:decode_kernel",
        signature=pointers(dtype, "q_ptr", "k_ptr", "v_ptr", "out_ptr")
        | pointers("i32", "table_ptr", "items_ptr", "num_items_ptr", "tickets_ptr")
        | pointers("fp32", "partial_ptr", "lse_ptr")
        | strides("q_stride_head", "out_stride_head", "stride_head", unit=head_size)
        | strides("q_stride_row", "out_stride_row", "stride_token", unit=8 * head_size)
        | integers("table_stride", "stride_block", "item_capacity")
        | {"log2_scale": "fp32", "programs_per_item": "i32"},
        constexprs=shape.constants(block_size, tuning.tile) | {"DEPENDENT": capability >= 90},
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        capability=capability,
        **({"maxnreg": registers} if (registers := shape.registers(tuning)) else {}),
    )


def qkv_job(
    dtype: str,
    head_size: int,
    block_size: int,
    group: int,
    window: int | None = None,
    soft_cap: float | None = None,
    rotary: int | None = None,
    norm: bool = True,
    rows: int = 4,
) -> AotJob:
    """Decode from packed q, k, v, which few rows take; `rotary` columns rotate, None: all."""
    job = decode_job(dtype, head_size, block_size, group, rows, window, soft_cap)
    own = {"q_ptr", "q_stride_row", "q_stride_head"}
    weights = ("q_weight_ptr", "k_weight_ptr")
    shape, _ = decode_shape(head_size, group, rows, window, soft_cap)
    prep = QKPrep(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=head_size,
        cos_sin_cache=torch.empty(1, rotary or head_size),
    )
    constants = shape.qkv_constants(block_size, int(job.constexprs["TILE"] or 0), prep)
    return replace(
        job,
        kernel=f"{KERNELS}.decode_qkv_kernels:decode_qkv_kernel",
        signature={name: kind for name, kind in job.signature.items() if name not in own}
        | pointers(dtype, "qkv_ptr", *(weights if norm else ()))
        | pointers("fp32", "cos_sin_ptr")
        | pointers("i32", "positions_ptr")
        | pointers("i64", "slots_ptr")
        | strides("qkv_stride", unit=8 * head_size),
        constexprs=constants | {"DEPENDENT": True} | ({} if norm else dict.fromkeys(weights)),
        maxnreg=QKV_REGISTERS,
    )


def prefill_job(
    dtype: str,
    head_size: int,
    block_size: int,
    left: int = -1,
    soft_cap: float = 0.0,
    capability: int = 90,
    by_items: bool = False,
) -> AotJob:
    """Through the copy engine where a block holds whole tiles, as `prefill_attention` does."""
    aligned = head_size * 2 % COPY_ENGINE_ALIGNMENT == 0
    large = aligned and block_size % LARGE_TILE == 0 and capability // 10 in LARGE_CAPABILITIES
    tuning = prefill_tuning(2, head_size, large, TritonOptions())
    names = ("k_desc", "v_desc")
    block_d = padded_head_size(head_size)
    tile = f"tensordesc<{dtype}[1,{tuning.block_n},1,{block_d}]>"
    described = block_size % tuning.block_n == 0 and capability >= 90 and aligned
    return AotJob(
        kernel=f"{KERNELS}.prefill_kernels:prefill_kernel",
        signature=pointers(dtype, "q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr")
        | pointers("i32", "table_ptr", "seq_lens_ptr", "query_start_ptr")
        | strides("q_stride_head", "out_stride_head", "stride_head", unit=head_size)
        | strides("q_stride_token", "out_stride_token", "stride_token", unit=8 * head_size)
        | integers("table_stride", "stride_block")
        | {"log2_scale": "fp32", "lse_stride_head": "i32", "num_seqs": "i32"}
        | (dict.fromkeys(names, tile) if described else {})
        | (SPLIT_SIGNATURE if by_items else {"item_capacity": "i32:16"}),
        constexprs=({} if described else dict.fromkeys(names))
        | (dict.fromkeys(SPLIT_POINTERS) if not by_items else {})
        | {
            "GROUP": 2,
            "HEAD_SIZE": head_size,
            "BLOCK_D": block_d,
            "BLOCK_SIZE": block_size,
            "LEFT": left,
            "RIGHT": 0,
            "SOFT_CAP": soft_cap,
            "WITH_LSE": False,
            "BLOCK_M": tuning.block_m,
            "BLOCK_N": tuning.block_n,
            "DEPENDENT": by_items and capability >= 90,
        },
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        capability=capability,
    )


def merge_job(head_size: int) -> AotJob:
    return AotJob(
        kernel=f"{KERNELS}.split_kernels:merge_splits_kernel",
        signature=pointers("fp32", "partial_ptr", "lse_ptr")
        | pointers("bf16", "out_ptr")
        | pointers("i32", "items_ptr", "first_items_ptr", "counts_ptr")
        | integers("out_stride_token", "out_stride_head", "item_capacity")
        | {"program_rows": "i32"},
        constexprs={
            "GROUP": 2,
            "BLOCK_M": 64,
            "HEAD_SIZE": head_size,
            "BLOCK_D": head_size,
            "ROWS": MERGE_ROWS,
            "DEPENDENT": True,
        },
    )


def split_plan_job(resident: int, window: int) -> AotJob:
    return AotJob(
        kernel=f"{KERNELS}.split_plan:plan_splits_kernel",
        signature=pointers("i32", "seq_lens_ptr", "query_start_ptr", "items_ptr")
        | pointers("i32", "first_items_ptr", "counts_ptr")
        | dict.fromkeys(("num_seqs", "num_multiprocessors", "num_kv_heads"), "i32")
        | integers("item_capacity"),
        constexprs={
            "GROUP": 2,
            "BLOCK_M": 64,
            "BLOCK_N": 64,
            "WINDOW": window,
            "BLOCK_SEQS": 256,
            "RESIDENT": resident,
            "START_TILES": START_TILES,
            "SPLIT_TILES": SPLIT_TILES,
            "MERGE_TILES": MERGE_TILES,
        },
    )


def hopper_job(dtype: str, head_size: int, group: int) -> AotJob:
    tuning = HOPPER_PREFILL[head_size]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    tile = f"tensordesc<{dtype}[1, {tuning.block_n}, 1, {head_size}],{layout!r}>"
    return AotJob(
        kernel=f"{KERNELS}.hopper_prefill_kernel:hopper_prefill_kernel",
        signature=pointers(dtype, "q_ptr", "out_ptr")
        | pointers("i32", "table_ptr", "seq_lens_ptr", "query_start_ptr", "ticket_ptr")
        | dict.fromkeys(("k_desc", "v_desc"), tile)
        | integers("q_stride_token", "q_stride_head", "out_stride_token", "out_stride_head")
        | dict.fromkeys(("num_seqs", "num_row_blocks", "num_kv_heads", "table_stride"), "i32")
        | {"log2_scale": "fp32"},
        constexprs={
            "GROUP": group,
            "HEAD_SIZE": head_size,
            "BLOCK_SIZE": 256,
            "BLOCK_N": tuning.block_n,
            "STAGES": tuning.num_stages,
            "IN_ORDER": tuning.in_order,
        },
        num_warps=4,
        maxnreg=HOPPER_REGISTERS,
        disassemble=True,
    )


def hopper_packed_job(dtype: str, key_size: int, value_size: int) -> AotJob:
    constants = hopper_packed_constants(key_size, value_size)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    tiles = {
        f"{name}_desc": f"tensordesc<{dtype}[{constants['BLOCK_N']}, 1, {columns}],{layout!r}>"
        for name, columns in (
            ("front", constants["FRONT"]), ("rest", constants["REST"]), ("v", value_size)
        )
    }  # fmt: skip
    return AotJob(
        kernel=f"{KERNELS}.hopper_packed_kernel:hopper_packed_kernel",
        signature=pointers(dtype, "q_ptr", "out_ptr")
        | pointers("fp32", "lse_ptr")
        | pointers("i32", "query_start_ptr", "key_start_ptr", "key_lens_ptr", "ticket_ptr")
        | tiles
        | integers("q_stride_token", "q_stride_head", "out_stride_token", "out_stride_head")
        | dict.fromkeys(("num_seqs", "num_row_blocks", "num_heads"), "i32")
        | {"causal": "u1", "lse_stride_head": "i32", "log2_scale": "fp32"},
        constexprs=constants,
        num_warps=4,
        maxnreg=HOPPER_REGISTERS,
        disassemble=True,
    )


PLAN = AotJob(
    kernel=f"{KERNELS}.decode_plan:plan_kernel",
    signature=pointers("i32", "seq_lens_ptr", "table_ptr", "items_ptr", "num_items_ptr")
    | integers("table_stride", "item_capacity")
    | dict.fromkeys(
        (
            "num_rows",
            "max_len",
            "resident_items",
            "wave_items",
            "max_items",
            "min_chunk",
            "max_chunk",
        ),
        "i32",
    ),
    constexprs={
        "BLOCK_ROWS": 256,
        "BLOCK_SIZE": 256,
        "TILE": 32,
        "WINDOW": 0,
        "ONE_WAVE": False,
        "SECOND_WAVE": 0,
        "LONGEST_FIRST": False,
        "ROUND_PARTS": 16,
        "ROUND_TOKENS": 60,
        "DEPENDENT": True,
    },
)
JOBS = {
    "plan": PLAN,
    "plan-window1024": replace(PLAN, constexprs=dict(PLAN.constexprs) | {"WINDOW": 1024}),
    "plan-longest first": replace(PLAN, constexprs=dict(PLAN.constexprs) | {"LONGEST_FIRST": True}),
    "plan-one wave": replace(PLAN, constexprs=dict(PLAN.constexprs) | {"ONE_WAVE": True}),
    "plan-two waves": replace(
        PLAN, constexprs=dict(PLAN.constexprs) | {"ONE_WAVE": True, "SECOND_WAVE": 512}
    ),
    **{
        f"decode {kind}-{dtype}-d{size}-block{block_size}-group{group}": decode_job(
            dtype, size, block_size, group, rows
        )
        for kind, rows, dtype, size, block_size, group in (
            ("few", 8, "bf16", 128, 16, 2),
            ("few", 8, "bf16", 128, 256, 2),
            ("few", 8, "fp16", 128, 64, 8),
            ("few", 8, "bf16", 64, 16, 4),
            ("few", 8, "fp16", 64, 128, 1),
            ("whole", 16, "bf16", 128, 256, 2),
            ("whole", 16, "fp16", 128, 16, 8),
            ("six", 24, "bf16", 128, 256, 2),
            ("six", 24, "fp16", 128, 16, 8),
            ("three", 48, "bf16", 128, 256, 2),
            ("three", 48, "fp16", 128, 16, 8),
            ("four", 64, "bf16", 128, 256, 2),
            ("four", 64, "fp16", 128, 16, 8),
            ("many", 256, "bf16", 128, 16, 2),
            ("many", 256, "bf16", 128, 256, 2),
            ("small six", 16, "bf16", 64, 16, 4),
            ("small six", 24, "fp16", 64, 256, 8),
            ("small three", 48, "bf16", 64, 16, 4),
            ("small many", 256, "fp16", 64, 128, 4),
            ("small many", 256, "bf16", 64, 16, 8),
            ("small six", 24, "bf16", 64, 256, 16),
        )
    },
    **{
        f"prefill-{dtype}-d{size}-block{block_size}": prefill_job(dtype, size, block_size)
        for dtype, size, block_size in (("bf16", 128, 256), ("fp16", 64, 128), ("bf16", 128, 16))
    },
    **{
        ("wide " if size > 128 else "")
        + f"split prefill-{dtype}-d{size}-block{block_size}"
        + (f"-window{left + 1}" if left >= 0 else "")
        + (f"-cap{cap:g}" if cap else ""): prefill_job(
            dtype, size, block_size, left, cap, by_items=True
        )
        for dtype, size, block_size, left, cap in (
            ("bf16", 128, 256, -1, 0.0),
            ("fp16", 64, 128, -1, 0.0),
            ("bf16", 128, 16, -1, 0.0),
            ("bf16", 80, 16, 1023, 50.0),
            ("bf16", 256, 256, -1, 0.0),
            ("bf16", 256, 16, 1023, 50.0),
        )
    },
    **{f"split merge-d{size}": merge_job(size) for size in (64, 128, 256, 512)},
    **{
        f"split plan-resident{resident}" + (f"-window{window}" if window else ""): split_plan_job(
            resident, window
        )
        for resident, window in ((1, 0), (2, 0), (2, 1024))
    },
    **{
        f"hopper prefill-{dtype}-d{size}-group{group}": hopper_job(dtype, size, group)
        for dtype, size, group in (("bf16", 128, 2), ("fp16", 128, 8), ("bf16", 128, 5))
    },
    **{
        f"hopper packed-{dtype}-{sizes[0]}-{sizes[1]}": hopper_packed_job(dtype, *sizes)
        for dtype, sizes in product(("bf16", "fp16"), HOPPER_PACKED)
    },
    **{
        f"decode {kind}-bf16-d{size}-block{block_size}-group{group}"
        + (f"-window{window}" if window else "")
        + (f"-cap{cap:g}" if cap else ""): decode_job(
            "bf16", size, block_size, group, rows, window, cap
        )
        for kind, rows, size, block_size, group, window, cap in (
            # Of those with and without a window or a cap, the ones that take the most.
            ("few", 8, 80, 16, 2, 1024, 50.0),
            ("few", 8, 128, 16, 8, 1024, 50.0),
            ("whole", 16, 80, 256, 1, None, None),
            ("whole", 16, 128, 16, 8, 1024, 50.0),
            ("six", 24, 80, 256, 1, None, None),
            ("six", 24, 128, 16, 8, 1024, 50.0),
            ("three", 48, 80, 256, 1, None, None),
            ("three", 48, 128, 16, 8, 1024, 50.0),
            ("four", 64, 128, 16, 8, 1024, 50.0),
            ("many", 256, 80, 16, 1, None, None),
            ("many", 256, 96, 256, 2, None, 50.0),
            ("many", 256, 128, 256, 2, 1024, 50.0),
            ("small six", 24, 64, 16, 8, 1024, 50.0),
            ("small six", 24, 48, 256, 1, None, None),
            ("small many", 256, 64, 256, 8, 1024, 50.0),
            ("small many", 256, 32, 16, 1, None, None),
            ("wide one", 1, 256, 256, 2, 1024, 50.0),
            ("wide one", 8, 256, 16, 16, None, None),
            ("wide few", 8, 256, 256, 2, 1024, 50.0),
            ("wide few", 8, 256, 16, 4, None, None),
            ("whole", 16, 256, 256, 2, 1024, 50.0),
            ("whole", 16, 256, 16, 16, None, None),
            ("wide six", 24, 256, 256, 2, 1024, 50.0),
            ("wide six", 24, 256, 16, 4, None, None),
            ("wide three", 48, 256, 256, 2, 1024, 50.0),
            ("wide three", 48, 256, 16, 16, None, None),
            *(("wide many", 256, size, 16, 1, None, None) for size in (192, 256)),
            *(("wide many", 256, size, 256, 2, 1024, 50.0) for size in (192, 256)),
        )
    },
    **{
        f"qkv {dtype}-d{size}-block{block_size}-group{group}"
        + (f"-window{window}" if window else "")
        + (f"-cap{cap:g}" if cap else "")
        + (f"-rotary{rotary}" if rotary else "")
        + ("" if norm else "-plain"): qkv_job(
            dtype, size, block_size, group, window, cap, rotary, norm
        )
        for dtype, size, block_size, group, window, cap, rotary, norm in (
            ("bf16", 128, 256, 2, None, None, None, True),
            ("bf16", 128, 16, 4, None, None, None, True),
            ("bf16", 128, 256, 8, None, None, None, True),
            ("fp16", 64, 128, 4, None, None, None, False),
            ("bf16", 80, 256, 1, None, None, 32, False),
            ("bf16", 96, 16, 2, 1024, 50.0, None, True),
            ("bf16", 256, 256, 2, 1024, None, None, True),
            ("bf16", 192, 16, 1, None, 50.0, None, False),
            ("bf16", 256, 16, 4, None, None, None, True),
        )
    },
    **{
        f"qkv one row-bf16-d{size}-block256-group{group}": qkv_job("bf16", size, 256, group, rows=1)
        for size, group in ((128, 4), (128, 8), (256, 2), (256, 4), (256, 16))
    },
    "qkv four rows-bf16-d128-block256-group16": qkv_job("bf16", 128, 256, 16, rows=4),
    **{
        ("wide " if size > 128 else "")
        + f"prefill-bf16-d{size}-block{block_size}"
        + (f"-window{left + 1}" if left >= 0 else "")
        + (f"-cap{cap:g}" if cap else ""): prefill_job("bf16", size, block_size, left, cap)
        for size, block_size, left, cap in (
            (80, 16, 1023, 50.0),
            (96, 256, 1023, 0.0),
            (128, 16, 1023, 0.0),
            (128, 256, 1023, 50.0),
            (256, 16, -1, 0.0),
            (256, 256, 1023, 50.0),
            (256, 16, 1023, 50.0),
            (192, 256, -1, 0.0),
            (192, 16, 1023, 50.0),
        )
    },
}


@pytest.fixture(scope="module")
def reports():
    return compile_jobs(JOBS)


def of_kind(reports, kind):
    """The reports whose names begin with `kind`, in the order of the jobs."""
    return [report for name, report in reports.items() if name.startswith(kind)]


def test_no_kernel_takes_more_than_its_line(reports):
    """Registers, spills and shared memory are those of the list for this version of Triton."""
    assert_within_list(__file__, reports)


@pytest.mark.parametrize(
    ("kind", "registers", "shared"),
    [
        ("plan", 255, 48 * 1024),
        ("decode few", FEW_REGISTERS, FEW_SHARED),
        ("decode whole", MANY_REGISTERS, WIDE_PREFILL_SHARED),
        ("decode six", DECODE_REGISTERS, SIX_SHARED),
        ("decode three", DECODE_REGISTERS, THREE_SHARED),
        ("decode four", DECODE_REGISTERS, FOUR_SHARED),
        ("decode many", MANY_REGISTERS, MANY_SHARED),
        ("decode wide", WIDE_REGISTERS, WIDE_SHARED),
        ("qkv", QKV_REGISTERS, QKV_SHARED),
        ("prefill", PREFILL_REGISTERS, PREFILL_SHARED),
        ("wide prefill", WIDE_PREFILL_REGISTERS, WIDE_PREFILL_SHARED),
        ("split prefill", PREFILL_REGISTERS, PREFILL_SHARED),
        ("wide split prefill", WIDE_PREFILL_REGISTERS, WIDE_PREFILL_SHARED),
        ("split plan", 64, 48 * 1024),
        ("split merge", 128, 16 * 1024),
        ("hopper prefill", HOPPER_REGISTERS, WIDE_PREFILL_SHARED),
        ("hopper packed", HOPPER_REGISTERS, WIDE_PREFILL_SHARED),
    ],
)
def test_kernels_spill_nothing_and_leave_room_for_their_neighbours(
    reports, kind, registers, shared
):
    """A spilled register costs a trip to memory; a lone program that waits leaves a gap."""
    for name, report in reports.items():
        if not name.startswith(kind):
            continue
        # A few numbers of an item, outside the loop over its tiles.
        most = 16 if name.startswith(("wide split prefill-bf16-d256", "hopper packed")) else 0
        assert report.spills <= most, f"{name}: {report.spills} bytes spilled"
        assert report.registers <= registers, f"{report.registers} registers, at most {registers}"
        assert report.shared <= shared, f"{report.shared} bytes shared, at most {shared}"


def test_the_plan_waits_and_gives_no_signal(reports):
    """Kernels behind it read its list before they wait, so they may not begin before it ends."""
    for report in of_kind(reports, "plan"):
        before, _, behind = report.ptx.partition("griddepcontrol.wait")
        assert not re.search(r"ld\.global|st\.global|\bret;|\bbra\b", before)
        assert "st.global" in behind
        assert "griddepcontrol.launch_dependents" not in report.ptx


def test_merging_reads_the_plan_past_the_l1_before_it_waits(reports):
    """Which may hold what was there in the step before; so may the parts of the layer before."""
    for report in of_kind(reports, "split merge"):
        before, _, _ = report.ptx.partition("griddepcontrol.wait")
        assert len(re.findall(r"ld\.global", before)) == 3
        # Whether the row block is there; whether it is split is asked behind the wait.
        assert len(re.findall(r"@%p\d+ bra", before)) == 1
        assert all(".cg" in load for load in re.findall(r"ld\.global\S*", report.ptx))


def test_split_prompts_let_the_merge_begin_and_wait_for_nothing(reports):
    """They are launched behind the plan in the usual order."""
    for kind in ("split prefill", "wide split prefill"):
        for report in of_kind(reports, kind):
            assert "griddepcontrol.launch_dependents" in report.ptx
            assert "griddepcontrol.wait" not in report.ptx


def test_decode_keeps_several_tiles_in_flight(reports):
    """The loop waits for a tile while later ones are still loading, in copies of 16 bytes.

    A block id loaded in the round that needs it would leave `wait_group 0` alone. Programs that are
    resident at once, six or four on a multiprocessor, keep one tile: their neighbours load too.
    So do those of one row of wide heads.
    """
    deep = ("few", "whole", "three", "many", "small three", "small many")
    deep += ("wide few", "wide three", "wide many")
    kinds = (*(f"decode {kind}" for kind in deep), "qkv bf16", "qkv fp16", "qkv one row-bf16-d128")
    for report in [report for kind in kinds for report in of_kind(reports, kind)]:
        assert "cp.async.wait_group \t2" in report.ptx or "cp.async.wait_group 2" in report.ptx
        assert "0x10" in report.ptx.split("cp.async.cg.shared.global", 1)[1][:80]


def test_programs_that_shall_be_resident_at_once_take_no_more_than_their_share(reports):
    """One program too many begins when all others have ended."""
    alike = {
        "whole": DECODE_WHOLE, "six": DECODE_SIX, "three": DECODE_THREE, "four": DECODE_FOUR,
        "small six": SMALL_RESIDENT[0][1], "small three": DECODE_THREE,
    }  # fmt: skip
    for kind, tuning in alike.items():
        for name, report in reports.items():
            named = re.match(rf"decode (wide )?{kind}-.*-d(\d+)", name)
            if named and not re.search("window|cap|d80|d48", name):
                columns = int(named[2])
                mine = half_tiles(tuning) if columns > WIDE else tuning
                assert report.registers <= mine.registers, name
                assert report.shared + 1024 <= program_memory(mine, columns), name


def test_decode_from_qkv_loads_keys_before_the_wait_and_q_behind_it(reports):
    """In front of the wait: K and V tiles on their way, and of other tensors scalars alone.

    Behind it every load is issued before a barrier could wait for one of them.
    """
    for name, report in reports.items():
        if name.startswith("qkv") and "block16" not in name:
            assert report.ptx.count("griddepcontrol.wait") == 1
            entry, _, rest = report.ptx.partition("griddepcontrol.wait")
            assert "cp.async.commit_group" in entry
            assert not re.search(r"ld\.global(\.\w+)?\.v\d", entry), name
            loads = rest.partition("bar.sync")[0]
            assert len(re.findall(r"ld\.global", loads)) >= 7, name


def test_prefill_runs_on_the_warpgroup_tensor_cores(reports):
    """wgmma, the only way to Hopper's full rate."""
    kinds = ("prefill", "wide prefill", "split prefill", "wide split prefill", "hopper")
    for report in [report for kind in kinds for report in of_kind(reports, kind)]:
        assert "wgmma.mma_async" in report.ptx


def test_the_hopper_kernel_computes_weights_before_it_waits_for_the_last_product(reports):
    """In the loop's machine code: products, the wait for the scores, exponentials, the other wait.

    ptxas may move a wait before arithmetic; here it would leave the tensor cores idle meanwhile.
    """
    for name, report in reports.items():
        if name.startswith("hopper"):
            marks = re.findall(r"HGMMA|WARPGROUP.DEPBAR.LE gsb0, 0x[01]|MUFU.EX2", report.sass)
            short = "".join({"H": "p", "M": "e"}.get(mark[0], mark[-1]) for mark in marks)
            assert re.search(r"p+1e{60,}0", short), short


def test_prefill_loads_whole_tiles_by_the_copy_engine_where_blocks_hold_them(reports):
    """Blocks of 256 and 128 tokens through descriptors, blocks of 16 by the threads."""
    for name, report in reports.items():
        if "prefill" in name:
            by_copy_engine = "cp.async.bulk.tensor" in report.ptx
            assert by_copy_engine == ("block16" not in name), name


def test_every_kernel_fits_the_shared_memory_of_other_gpus():
    """What takes more than a GPU grants does not start there, and only a user would see it."""
    # sm_89 grants what sm_86 does, and the list above is of sm_90.
    jobs = {
        f"{phase} of heads of {head_size}, sm_{capability}": job
        for capability, head_size in (*product((80, 86, 100, 120), (128, 256)), (86, 192))
        for phase, job in {
            "decode": decode_job("bf16", head_size, 256, 2, 256, capability=capability),
            "prefill": prefill_job("bf16", head_size, 256, capability=capability),
        }.items()
    }
    # One KV head of many query heads, and the largest tiles of small heads.
    jobs["decode of a group of 64, sm_86"] = decode_job("bf16", 256, 256, 64, 64, capability=86)
    for group in (8, 64):
        name = f"decode of heads of 64, a group of {group}, sm_86"
        jobs[name] = decode_job("bf16", 64, 256, group, 256, capability=86)
    for (name, job), report in zip(jobs.items(), compile_kernels(list(jobs.values())), strict=True):
        assert report.shared <= SHARED_MEMORY[job.capability], f"{name}: {report.shared} bytes"
