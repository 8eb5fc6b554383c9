"""The kernels of latent attention compile for sm_90 and keep their registers (no GPU needed)."""

from __future__ import annotations

import re

import pytest
from triton.experimental.gluon import language as gl

from nanovllm_attention_triton.decode_tuning import HOPPER_LATENT, latent_tuning
from nanovllm_attention_triton.hopper_latent import REGISTERS as HOPPER_REGISTERS, EvenShape
from nanovllm_attention_triton.latent_decode import MERGE_COLUMNS, MERGE_ELEMENTS, LatentShape
from nanovllm_attention_triton.latent_prefill import latent_prefill_constants
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.packed import packed_constants
from nanovllm_attention_triton.plugin import MAX_LATENT_SIZES
from nanovllm_attention_triton.prefill_tuning import (
    LARGE_CAPABILITIES,
    latent_prefill_tuning,
    packed_tuning,
)
from nanovllm_kit.aot import SHARED_MEMORY, AotJob, compile_kernels
from nanovllm_kit.registers import assert_within_list, compile_jobs

KERNELS = "nanovllm_attention_triton"
# Two decode programs on a multiprocessor, one of prompts or of the kernel for Hopper; the system
# keeps 1 KiB of each.
DECODE_REGISTERS, DECODE_SHARED = 255, 228 * 1024 // 2 - 1024
LONE_SHARED = 228 * 1024 - 1024
SPILLED = {
    "decode bf16-heads128-block16": 112,
    "hopper bf16-heads32-512+128": 112,
    "rows bf16-heads128-block16-512+64": 128,
    "rows bf16-heads5-block16-320+64": 152,
    "rows bf16-heads16-block256-512+64": 24,
    "rows fp16-heads16-block256-512+64": 24,
    "rows bf16-heads128-block256-512+64": 24,
}


def pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}:16")


def integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32:16")


def latent_shape(num_heads: int, sizes: tuple[int, int]) -> LatentShape:
    return LatentShape(
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=sizes[0],
        max_num_seqs=256,
        max_seq_len=4096,
        num_multiprocessors=132,
        rest_size=sizes[1],
        most_heads=latent_tuning(2, num_heads, TritonOptions()).most_heads,
    )


def decode_job(
    dtype: str,
    num_heads: int,
    block_size: int,
    sizes: tuple[int, int] = (512, 64),
    capability: int = 90,
) -> AotJob:
    tuning = latent_tuning(2, num_heads, TritonOptions())
    return AotJob(
        kernel=f"{KERNELS}.latent_kernels:latent_decode_kernel",
        signature=pointers(dtype, "q_ptr", "cache_ptr", "out_ptr")
        | pointers("i32", "table_ptr", "items_ptr", "num_items_ptr")
        | pointers("fp32", "partial_ptr", "lse_ptr")
        | integers("q_stride_row", "q_stride_head", "out_stride_row", "out_stride_head")
        | integers("table_stride", "stride_block", "stride_token", "item_capacity")
        | {"log2_scale": "fp32"},
        constexprs=latent_shape(num_heads, sizes).latent_constants(block_size, tuning.tile)
        | {"DEPENDENT": capability >= 90},
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        capability=capability,
    )


def hopper_job(dtype: str, num_heads: int, sizes: tuple[int, int] = (512, 64)) -> AotJob:
    shape = EvenShape(
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=sizes[0],
        max_num_seqs=256,
        max_seq_len=4096,
        num_multiprocessors=132,
        rest_size=sizes[1],
        most_heads=HOPPER_LATENT.most_heads,
    )
    constants = shape.latent_constants(256, HOPPER_LATENT.tile)

    def tiles(columns: int) -> str:
        layout = gl.NVMMASharedLayout(min(2 * columns, 128), element_bitwidth=16, rank=4)
        return f"tensordesc<{dtype}[1, {HOPPER_LATENT.tile}, 1, {columns}],{layout!r}>"

    return AotJob(
        kernel=f"{KERNELS}.hopper_latent_kernel:hopper_latent_kernel",
        signature=pointers(dtype, "q_ptr", "out_ptr")
        | pointers("i32", "table_ptr", "items_ptr", "part_starts_ptr")
        | pointers("fp32", "partial_ptr", "lse_ptr")
        | {"value_desc": tiles(shape.block_d), "rest_desc": tiles(int(constants["BLOCK_R"]))}
        | integers("q_stride_row", "q_stride_head", "out_stride_row", "out_stride_head")
        | integers("table_stride", "item_capacity")
        | {"log2_scale": "fp32"},
        constexprs=constants | {"DEPENDENT": True},
        num_warps=4,
        maxnreg=HOPPER_REGISTERS,
    )


def merge_job(columns: int) -> AotJob:
    return AotJob(
        kernel=f"{KERNELS}.latent_kernels:latent_merge_kernel",
        signature=pointers("bf16", "out_ptr")
        | pointers("i32", "items_ptr")
        | pointers("fp32", "partial_ptr", "lse_ptr")
        | integers("out_stride_row", "out_stride_head", "item_capacity"),
        constexprs=latent_shape(16, (512, 64)).merge_constants()
        | {"COLUMNS": columns, "CHUNKS": MERGE_ELEMENTS // columns, "DEPENDENT": True},
        num_warps=2 if columns <= 128 else 4,
    )


def packed_job(
    dtype: str, sizes: tuple[int, int], causal: bool, with_lse: bool, capability: int = 90
) -> AotJob:
    tuning = packed_tuning(2, *sizes, large=capability // 10 in LARGE_CAPABILITIES)
    places = [f"{name}_stride_{of}" for name in ("q", "k", "v", "out") for of in ("token", "head")]
    return AotJob(
        kernel=f"{KERNELS}.packed_kernels:packed_kernel",
        signature=pointers(dtype, "q_ptr", "k_ptr", "v_ptr", "out_ptr")
        | pointers("fp32", "lse_ptr")
        | pointers("i32", "query_start_ptr", "key_start_ptr")
        | integers(*places)
        | {"num_seqs": "i32", "log2_scale": "fp32", "lse_stride_head": "i32"},
        constexprs=packed_constants(*sizes, causal, with_lse, tuning),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        capability=capability,
    )


def rows_job(
    dtype: str,
    num_heads: int,
    block_size: int,
    sizes: tuple[int, int] = (512, 64),
    capability: int = 90,
    by_items: bool = True,
) -> AotJob:
    """Prompts over rows; by the items of a plan, as a short step is, or by row blocks."""
    names = "items_ptr", "counts_ptr", "partial_ptr", "partial_lse_ptr"
    items = pointers("i32", *names[:2]) | pointers("fp32", *names[2:])
    tuning = latent_prefill_tuning(2, sizes[1], hopper=capability == 90)
    return AotJob(
        kernel=f"{KERNELS}.latent_prefill_kernel:latent_prefill_kernel",
        signature=pointers(dtype, "q_ptr", "cache_ptr", "out_ptr")
        | pointers("i32", "table_ptr", "seq_lens_ptr", "query_start_ptr")
        | integers("q_stride_token", "q_stride_head", "out_stride_token", "out_stride_head")
        | integers("table_stride", "stride_block", "stride_token")
        | integers("item_capacity")
        | {"num_seqs": "i32", "log2_scale": "fp32"}
        | (items if by_items else {}),
        constexprs=latent_prefill_constants(num_heads, *sizes, block_size, tuning)
        | {"DEPENDENT": by_items and capability >= 90}
        | ({} if by_items else dict.fromkeys(names)),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        capability=capability,
    )


JOBS = {
    **{
        f"decode {dtype}-heads{heads}-block{block_size}": decode_job(dtype, heads, block_size)
        for dtype, heads, block_size in (
            ("bf16", 16, 256),
            ("fp16", 16, 256),
            ("bf16", 16, 16),
            ("bf16", 5, 64),
            ("bf16", 32, 256),
            ("bf16", 128, 256),
            ("bf16", 128, 16),
        )
    },
    "decode bf16-heads16-block256-256+32": decode_job("bf16", 16, 256, (256, 32)),
    **{
        f"hopper {dtype}-heads{heads}-{value_size}+{rest_size}": hopper_job(
            dtype, heads, (value_size, rest_size)
        )
        for dtype, heads, value_size, rest_size in (
            ("bf16", 16, 512, 64),
            ("fp16", 5, 512, 64),
            ("bf16", 128, 512, 64),
            ("bf16", 32, 512, 128),
            ("bf16", 16, 40, 24),
        )
    },
    "even plan": AotJob(
        kernel=f"{KERNELS}.even_plan:even_plan_kernel",
        signature=pointers("i32", "seq_lens_ptr", "table_ptr", "items_ptr", "num_items_ptr")
        | pointers("i32", "part_starts_ptr")
        | integers("table_stride", "item_capacity")
        | dict.fromkeys(("num_rows", "max_len", "num_parts", "min_tiles"), "i32"),
        constexprs={"BLOCK_ROWS": 256, "BLOCK_PARTS": 256, "BLOCK_SIZE": 256, "TILE": 64}
        | {"DEPENDENT": True},
    ),
    **{f"merge {columns}": merge_job(columns) for columns in MERGE_COLUMNS},
    **{
        f"packed {dtype}-{size}-{value_size}"
        + ("-causal" if causal else "")
        + ("-lse" if with_lse else ""): packed_job(dtype, (size, value_size), causal, with_lse)
        for dtype, size, value_size, causal, with_lse in (
            ("bf16", 192, 128, True, False),
            ("bf16", 192, 128, True, True),
            ("bf16", 192, 128, False, True),
            ("fp16", 192, 128, True, False),
            ("bf16", 96, 64, True, False),
            ("bf16", 256, 256, True, True),
        )
    },
    **{
        f"rows {dtype}-heads{heads}-block{block_size}-{sizes[0]}+{sizes[1]}": rows_job(
            dtype, heads, block_size, sizes
        )
        for dtype, heads, block_size, sizes in (
            ("bf16", 16, 256, (512, 64)),
            ("fp16", 16, 256, (512, 64)),
            ("bf16", 128, 256, (512, 64)),
            ("bf16", 128, 16, (512, 64)),
            ("bf16", 5, 16, (320, 64)),
            ("bf16", 16, 256, MAX_LATENT_SIZES),
        )
    },
    "rows, unsplit": rows_job("bf16", 16, 256, by_items=False),
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


def test_kernels_spill_nothing_and_two_decode_programs_share_a_multiprocessor(reports):
    for name, report in reports.items():
        # Of many heads a few numbers of an item are spilled, outside the loop over its tiles.
        most = SPILLED.get(name, 0)
        assert report.spills <= most, f"{name}: {report.spills} bytes spilled"
    for report in of_kind(reports, "decode"):
        assert report.registers <= DECODE_REGISTERS
        assert report.shared <= DECODE_SHARED
    for kind in ("packed", "hopper", "rows"):
        for report in of_kind(reports, kind):
            assert report.shared <= LONE_SHARED


def test_decode_loads_rows_asynchronously_and_multiplies_on_the_tensor_cores(reports):
    """Copies of 16 bytes, of which a later tile's are on their way while the loop waits for one."""
    for name, report in reports.items():
        if name.startswith("decode"):
            assert "cp.async.wait_group \t2" in report.ptx or "cp.async.wait_group 2" in report.ptx
            assert "0x10" in report.ptx.split("cp.async.cg.shared.global", 1)[1][:80]
            assert "wgmma.mma_async" in report.ptx, name


def test_decode_reads_a_row_once_for_both_products(reports):
    """The copies of a loop round are those of one tile: 32 rows of 72 pieces of 16 bytes."""
    job, report = JOBS["decode bf16-heads16-block256"], reports["decode bf16-heads16-block256"]
    threads = 32 * job.num_warps
    pieces = int(job.constexprs["TILE"] or 0) * 576 * 2 // 16
    # Two tiles before the loop, one in it.
    assert report.ptx.count("cp.async.cg.shared.global") == 3 * pieces // threads


def test_the_kernel_for_hopper_loads_by_the_copy_engine_and_waits_for_queries(reports):
    """Eight pieces of 64 values and one of the rest a tile. Before their waits, one for the newest
    row and one for queries, its warps read the plan alone, past the L1, and block tables.
    """
    report = reports["hopper bf16-heads16-512+64"]
    assert report.ptx.count("cp.async.bulk.tensor") == 9
    # 32 products of 16 columns of the value, 4 of the rest, and 8 x 4 for the output.
    assert report.ptx.count("wgmma.mma_async") == 68
    *before, rest = report.ptx.split("griddepcontrol.wait")
    assert len(before) == 2
    assert not any("ld.global.v4" in part for part in before)
    assert sum(part.count("ld.global.b32") for part in before) == 1  # of the block table
    assert "ld.global.v4" in rest


def test_merging_reads_the_plan_past_the_l1_before_it_waits(reports):
    """Which may hold the plan of the step before."""
    for report in of_kind(reports, "merge"):
        before, _ = report.ptx.split("griddepcontrol.wait")
        loads = re.findall(r"ld\.global\S*", before)
        assert len(loads) == 2
        assert all("ld.global.cg" in load for load in loads)


def test_prompts_multiply_on_hopper_s_tensor_cores(reports):
    for report in of_kind(reports, "packed") + of_kind(reports, "rows"):
        assert "wgmma.mma_async" in report.ptx


def test_every_kernel_fits_the_shared_memory_of_other_gpus():
    """What takes more than a GPU grants does not start there, and only a user would see it."""
    jobs = {
        f"{name}, sm_{capability}": job
        for capability in (80, 86, 100, 120)
        for name, job in {
            "decode of 16 heads": decode_job("bf16", 16, 256, capability=capability),
            "decode of the largest": decode_job("bf16", 128, 256, MAX_LATENT_SIZES, capability),
            "prompts": packed_job("bf16", (192, 128), True, True, capability),
            "prompts over rows": rows_job("bf16", 16, 256, (512, 64), capability),
            "prompts over the largest": rows_job("bf16", 5, 16, MAX_LATENT_SIZES, capability),
        }.items()
    }
    for (name, job), report in zip(jobs.items(), compile_kernels(list(jobs.values())), strict=True):
        assert report.shared <= SHARED_MEMORY[job.capability], f"{name}: {report.shared} bytes"
