"""The products for few rows compile for sm_90 as they are meant to, at shapes of Qwen3 models."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from nanovllm_kernels_triton.linear import LARGE_BYTES
from nanovllm_kernels_triton.linear_choice import (
    TilePlan,
    VectorPlan,
    behind_experts,
    choose,
    choose_few_rows,
    choose_gated,
    choose_parts,
)
from nanovllm_kernels_triton.strides import in_units
from nanovllm_kit.aot import SHARED_MEMORY, AotJob, AotReport, compile_kernels
from nanovllm_kit.registers import assert_within_list, compile_jobs

MODULE = "nanovllm_kernels_triton.linear"
PRODUCTS = {  # weight rows, inputs, what is fused
    "qkv": (4096, 1024, "norm"),
    "o_proj": (1024, 2048, "add"),
    "gate_up": (6144, 1024, "gated"),
    "down": (1024, 3072, "add"),
}
ROUTERS = {  # of Qwen3-30B-A3B, DeepSeek-V2-Lite and V3
    "128-router": (128, 2048, "router"),
    "64-router": (64, 2048, "router"),
    "256-router": (256, 7168, "router"),
}
LARGE = {  # of 1.7B, 8B, 14B, 30B-A3B and 32B, and rows of 8 numbers more than a multiple of 16
    "1.7b-gate_up": (12288, 2048, "gated"),
    "8b-qkv": (6144, 4096, "norm"),
    "8b-gate_up": (24576, 4096, "gated"),
    "8b-down": (4096, 12288, "add"),
    "14b-down": (5120, 17408, "add"),
    "30b-a3b-o_proj": (2048, 4096, "add"),
    "32b-gate_up": (51200, 5120, "gated"),
    "32b-down": (5120, 25600, "add"),
    "odd": (1544, 1544, "plain"),
}
BIASED = {  # at the widths of Qwen2.5-1.5B
    "biased-qkv": (2048, 1536, "norm"),
    "biased-gate_up": (17920, 1536, "gated"),
    "biased-o_proj": (1536, 1536, "add"),
}
GELU = {"gemma-gate_up": (18432, 2304, "gelu")}  # of Gemma 2 2B, of what is normed already
HEADS = {  # the second has nearly as many weights as the kernels can count
    "head": (151936, 1024, "plain"),
    "long-head": (131071, 16384, "plain"),
}


def linear_job(
    name: str, rows: int, *, dependent: bool = False, dtype: str = "bf16", capability: int = 90
) -> AotJob:
    """The kernel that is chosen for a product, as the launcher calls it."""
    weight_rows, inputs, kind = (PRODUCTS | LARGE | BIASED | GELU | ROUTERS | HEADS)[name]
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}
    gated = kind in ("gated", "gelu")
    rule = choose_gated if gated else choose
    plan = rule(rows, weight_rows, inputs, types[dtype])
    pointers = dict.fromkeys(("x_ptr", "norm_weight_ptr", "weight_ptr", "out_ptr"), f"*{dtype}:16")
    signature = {**pointers, "x_stride": "i32:16", "out_stride": "i32:16"}
    constexprs: dict[str, int | float | bool | None] = {
        "bias_ptr": None,
        "EPS": 1e-6,
        "OUTPUTS": weight_rows // 2 if gated else weight_rows,
        "INPUTS": inputs,
        "GATED": gated,
        "GELU": kind == "gelu",
        "ADD": kind == "add",
        "DEPENDENT": dependent,
    }
    if kind == "router":
        signature["out_ptr"] = "*fp32:16"
    if name in BIASED:
        del constexprs["bias_ptr"]
        signature["bias_ptr"] = f"*{dtype}:16"
    if kind in ("add", "router", "plain", "gelu"):
        del signature["norm_weight_ptr"]
        constexprs["norm_weight_ptr"] = None
    if isinstance(plan, VectorPlan):
        padded = 1 << (inputs - 1).bit_length()
        constexprs |= {"ROWS": rows, "BLOCK_N": plan.block_n, "REST": plan.rest}
        constexprs["BLOCK_K"] = padded // 2 if plan.rest else padded
        kernel = f"{MODULE}:vector_linear_kernel"
        job = AotJob(kernel=kernel, signature=signature, constexprs=constexprs)
        return replace(job, num_warps=plan.num_warps, capability=capability)
    assert isinstance(plan, TilePlan)
    signature["num_rows"] = "i32"
    for normed in ("norm_weight_ptr", "EPS"):
        signature.pop(normed, None)
        constexprs.pop(normed, None)
    if plan.splits > 1:
        signature |= {"partial_ptr": "*fp32:16", "tickets_ptr": "*i32:16"}
    else:
        constexprs |= {"partial_ptr": None, "tickets_ptr": None}
    units, unit = in_units(inputs)
    signature["x_stride"] = "i32" if units % 16 else "i32:16"
    constexprs |= {"X_UNIT": unit, "BLOCK_M": max(rows, 16)}
    constexprs |= {"BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
    constexprs |= {"SPLITS": plan.splits}
    job = AotJob(kernel=f"{MODULE}:tile_linear_kernel", signature=signature, constexprs=constexprs)
    return replace(job, num_warps=plan.num_warps, num_stages=plan.num_stages, capability=capability)


def parts_job(name: str, rows: int) -> AotJob:
    """A product whose parts the norm behind it sums, as `run_parts` calls it."""
    weight_rows, inputs, _ = (PRODUCTS | LARGE)[name]
    plan = choose_parts(rows, weight_rows, inputs, torch.bfloat16)
    assert plan is not None
    job = linear_job(name, min(rows, 64), dependent=True)
    constexprs = dict(job.constexprs) | {"ADD": False, "tickets_ptr": None, "SPLITS": plan.splits}
    constexprs |= {"BLOCK_M": rows, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
    signature = {name: kind for name, kind in job.signature.items() if name != "tickets_ptr"}
    signature["out_stride"] = "i32"
    return replace(job, constexprs=constexprs, signature=signature, num_stages=plan.num_stages)


def few_rows_job(name: str, *, capability: int = 90) -> AotJob:
    """The kernel in Gluon, as it is launched for two to eight rows."""
    weight_rows, inputs, kind = (PRODUCTS | LARGE | BIASED | GELU)[name]
    gated = kind in ("gated", "gelu")
    plan = choose_few_rows(4, weight_rows, inputs, torch.bfloat16, gated=gated)
    assert plan is not None
    signature = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16:16")
    units, unit = in_units(inputs)
    signature |= {"num_rows": "i32", "x_stride": "i32" if units % 16 else "i32:16"}
    signature["out_stride"] = "i32:16"
    constexprs: dict[str, int | float | bool | None] = {
        "bias_ptr": None,
        "X_UNIT": unit,
        "OUTPUTS": weight_rows // 2 if gated else weight_rows,
        "INPUTS": inputs,
        "GATED": gated,
        "GELU": kind == "gelu",
        "ADD": kind == "add",
        "DEPENDENT": True,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "HELD": plan.held,
    }
    if name in BIASED:
        del constexprs["bias_ptr"]
        signature["bias_ptr"] = "*bf16:16"
    kernel = "nanovllm_kernels_triton.few_rows_kernel:few_rows_kernel"
    job = AotJob(kernel=kernel, signature=signature, constexprs=constexprs)
    return replace(job, num_warps=plan.num_warps, capability=capability)


def job_behind_experts(outputs: int, inputs: int) -> AotJob:
    """A norm and a product of one row whose weight the mixture before it was told."""
    plan = behind_experts(choose(1, outputs, inputs, torch.bfloat16))
    assert isinstance(plan, VectorPlan)
    job = linear_job("qkv", 1, dependent=True)
    constexprs = dict(job.constexprs) | {"OUTPUTS": outputs, "INPUTS": inputs}
    constexprs |= {"BLOCK_N": plan.block_n, "BLOCK_K": inputs, "REST": plan.rest}
    return replace(job, constexprs=constexprs, num_warps=plan.num_warps)


FEW = (*PRODUCTS, *BIASED, *GELU, "1.7b-gate_up", "8b-qkv", "30b-a3b-o_proj", "odd")
WIDE = ("gate_up", "1.7b-gate_up", "32b-gate_up")
"""Each of another plan, at 65 to 128 rows."""
JOBS = {
    **{
        f"parts-{name}-{rows}": parts_job(name, rows)
        for name in ("o_proj", "down", "8b-down")
        for rows in (16, 64)
    },
    **{f"parts-{name}-128": parts_job(name, 128) for name in ("o_proj", "down")},
    **{f"tile-{name}-128-dependent": linear_job(name, 128, dependent=True) for name in WIDE},
    **{f"vector-{name}": linear_job(name, 1) for name in PRODUCTS},
    **{f"vector-{name}-fp32": linear_job(name, 1, dtype="fp32") for name in PRODUCTS},
    **{f"vector-{name}-dependent": linear_job(name, 1, dependent=True) for name in PRODUCTS},
    **{f"tile-{name}": linear_job(name, 16) for name in PRODUCTS},
    **{f"tile-{name}-dependent": linear_job(name, 16, dependent=True) for name in PRODUCTS},
    **{f"tile-{name}-64-dependent": linear_job(name, 64, dependent=True) for name in PRODUCTS},
    **{f"vector-{name}-dependent": linear_job(name, 1, dependent=True) for name in LARGE},
    **{f"tile-{name}-dependent": linear_job(name, 16, dependent=True) for name in LARGE},
    **{f"tile-{name}-64-dependent": linear_job(name, 64, dependent=True) for name in LARGE},
    **{f"few-{name}-dependent": few_rows_job(name) for name in FEW},
    **{f"vector-{name}-dependent": linear_job(name, 1, dependent=True) for name in BIASED},
    **{f"tile-{name}-dependent": linear_job(name, 16, dependent=True) for name in BIASED},
    **{f"tile-{name}-64-dependent": linear_job(name, 64, dependent=True) for name in BIASED},
    **{f"vector-{name}-dependent": linear_job(name, 1, dependent=True) for name in GELU},
    **{f"tile-{name}-dependent": linear_job(name, 16, dependent=True) for name in GELU},
    **{f"tile-{name}-64-dependent": linear_job(name, 64, dependent=True) for name in GELU},
    "vector-behind-experts-30b-a3b": job_behind_experts(5120, 2048),
    **{f"vector-{name}": linear_job(name, 1) for name in HEADS},
    **{f"tile-{name}-64": linear_job(name, 64) for name in HEADS},
}


@pytest.fixture(scope="module")
def reports() -> dict[str, AotReport]:
    return compile_jobs(JOBS)


def test_no_kernel_takes_more_than_its_line(reports: dict[str, AotReport]) -> None:
    """Registers, spills and shared memory are those of the list for this version of Triton."""
    assert_within_list(__file__, reports)


@pytest.mark.parametrize("name", JOBS)
def test_a_product_does_not_spill(name: str, reports: dict[str, AotReport]) -> None:
    """And leaves room for other programs, three more where it is the vector kernel; two more where
    that loads a row in two parts, which are more of its weights."""
    assert reports[name].spills == 0
    most_registers = 168 if JOBS[name].constexprs.get("REST") else 128
    assert reports[name].registers <= (most_registers if name.startswith("vector") else 255)
    most = 160 if "-128" in name else 128 if "-64" in name else 112
    assert reports[name].shared <= most * 1024


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_router_s_sums_reach_memory_unrounded(rows: int) -> None:
    """Beside weights of half precision, which are no more to read for it."""
    jobs = [linear_job(name, rows, dependent=True) for name in ROUTERS]
    for job, report in zip(jobs, compile_kernels(jobs), strict=True):
        assert report.spills == 0, job
        assert report.shared <= 128 * 1024, job
        assert "cvt.rn.bf16" not in report.ptx, job


@pytest.mark.slow
def test_every_product_fits_the_shared_memory_of_other_gpus() -> None:
    """What takes more than the GPU grants a program does not start."""
    jobs = [
        linear_job(name, rows, dependent=capability >= 90, capability=capability)
        for capability in (86, 100, 120)
        for name, rows in (("gate_up", 64), ("o_proj", 64), *((name, 128) for name in WIDE))
    ]
    for job, report in zip(jobs, compile_kernels(jobs), strict=True):
        assert report.shared <= SHARED_MEMORY[job.capability], f"{report.shared} bytes: {job}"


@pytest.mark.parametrize("name", PRODUCTS)
def test_few_rows_use_the_tensor_cores_and_asynchronous_copies(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Weights go from memory to shared memory, 16 bytes an access."""
    for rows in ("", "-64"):
        ptx = reports[f"tile-{name}{rows}-dependent"].ptx
        assert "mma.sync.aligned.m16n8k16" in ptx or "wgmma.mma_async" in ptx
        assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx)


@pytest.mark.parametrize("name", PRODUCTS)
def test_64_rows_take_the_product_of_a_whole_warp_group(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Its first operand has 64 rows: of the weight, or of x where tiles are narrower."""
    assert "wgmma.mma_async" in reports[f"tile-{name}-64-dependent"].ptx


@pytest.mark.parametrize("name", WIDE)
def test_gate_and_up_of_more_rows_leave_room_for_as_many_programs_as_are_meant(
    name: str, reports: dict[str, AotReport]
) -> None:
    """One on a multiprocessor of tiles in one wave, two of smaller or shorter ones."""
    report = reports[f"tile-{name}-128-dependent"]
    assert "wgmma.mma_async" in report.ptx
    assert 227 * 1024 // report.shared == (2 if name.startswith("32b") else 1)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_vector_program_fetches_its_weights_before_it_waits(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Signal, then weights, then wait: nothing but weights is read before the wait."""
    ptx = reports[f"vector-{name}-dependent"].ptx
    signal, wait = _signal_and_wait(ptx)
    loads = [match.start() for match in re.finditer(re.escape("ld.global.v4"), ptx)]
    assert signal < min(loads)
    assert sum(load < wait for load in loads) >= 8  # 64 weights a thread, 8 a load


@pytest.mark.parametrize("name", FEW)
def test_weights_of_few_rows_go_to_the_tensor_cores_as_they_come(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Signal, then all weights that are held, 16 bytes to a load, then wait; neither operand passes
    shared memory, in which warps put their sums alone."""
    job, report = JOBS[f"few-{name}-dependent"], reports[f"few-{name}-dependent"]
    signal, wait = _signal_and_wait(report.ptx)
    loads = [match.start() for match in re.finditer(re.escape("ld.global.v4"), report.ptx)]
    held = job.constexprs["HELD"]
    assert isinstance(held, int)
    assert signal < min(loads)
    assert sum(load < wait for load in loads) == 4 * held  # of 16 rows and 64 inputs
    assert "mma.sync.aligned.m16n8k16" in report.ptx
    assert "ldmatrix" not in report.ptx
    assert "cp.async" not in report.ptx
    assert report.shared <= 4 * 16 * 8 * job.num_warps


@pytest.mark.slow
def test_the_kernel_of_few_rows_compiles_for_other_gpus() -> None:
    """Those that have dependent launch."""
    jobs = [few_rows_job(name, capability=by) for by in (100, 120) for name in PRODUCTS]
    for job, report in zip(jobs, compile_kernels(jobs), strict=True):
        assert report.spills == 0, job
        assert "mma.sync.aligned.m16n8k16" in report.ptx, job


@pytest.mark.parametrize("name", [*PRODUCTS, *LARGE])
def test_a_large_weight_leaves_the_cache_first(name: str, reports: dict[str, AotReport]) -> None:
    """Of one row; a smaller one may still be there when the next step reads it."""
    weight_rows, inputs, _ = (PRODUCTS | LARGE)[name]
    is_large = 2 * weight_rows * inputs >= LARGE_BYTES.value
    assert ("L2::cache_hint" in reports[f"vector-{name}-dependent"].ptx) == is_large


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_tile_program_waits_first_and_signals_behind_its_loop(
    name: str, reports: dict[str, AotReport]
) -> None:
    """What waits for the signal does not stand in the loop's way."""
    ptx = reports[f"tile-{name}-dependent"].ptx
    signal, wait = _signal_and_wait(ptx)
    products = [match.start() for match in re.finditer(r"mma\.sync|wgmma\.mma", ptx)]
    assert wait < min(products)
    assert max(products) < signal


@pytest.mark.parametrize("rows", ["", "-64"])
def test_rows_that_begin_at_whole_16_bytes_are_loaded_so(
    rows: str, reports: dict[str, AotReport]
) -> None:
    """Though the distance of rows is no multiple of 16 numbers, which is all that Triton asks."""
    ptx = reports[f"tile-odd{rows}-dependent"].ptx
    assert "cp.async.cg.shared.global" in ptx
    assert "ld.global.b16" not in ptx


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("parts")])
def test_parts_are_stored_16_bytes_at_a_time_without_a_ticket(
    name: str, reports: dict[str, AotReport]
) -> None:
    """No program reads what another one of the launch wrote."""
    ptx = reports[name].ptx
    assert "st.global.v4" in ptx
    assert "atom" not in ptx


def _signal_and_wait(ptx: str) -> tuple[int, int]:
    return ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
