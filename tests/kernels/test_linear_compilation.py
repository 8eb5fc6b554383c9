"""The products for few rows compile for sm_90 as they are meant to, at Qwen3-0.6B's shapes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from nanovllm_core.kernels.linear_choice import TilePlan, VectorPlan, choose
from nanovllm_core.testing.aot import AotJob, AotReport, compile_many_for_sm90

MODULE = "nanovllm_core.kernels.triton_linear"
PRODUCTS = {  # weight rows, inputs, what is fused
    "qkv": (4096, 1024, "norm"),
    "o_proj": (1024, 2048, "add"),
    "gate_up": (6144, 1024, "gated"),
    "down": (1024, 3072, "add"),
}


def linear_job(name: str, rows: int, *, dependent: bool = False, dtype: str = "bf16") -> AotJob:
    """The kernel that is chosen for a product, as the launcher calls it."""
    weight_rows, inputs, kind = PRODUCTS[name]
    plan = choose(rows, weight_rows, inputs, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    pointers = dict.fromkeys(("x_ptr", "norm_weight_ptr", "weight_ptr", "out_ptr"), f"*{dtype}:16")
    signature = {**pointers, "x_stride": "i32:16", "out_stride": "i32:16"}
    constexprs: dict[str, int | float | bool | None] = {
        "EPS": 1e-6,
        "OUTPUTS": weight_rows // 2 if kind == "gated" else weight_rows,
        "INPUTS": inputs,
        "GATED": kind == "gated",
        "ADD": kind == "add",
        "DEPENDENT": dependent,
    }
    if kind == "add":
        del signature["norm_weight_ptr"]
        constexprs["norm_weight_ptr"] = None
    if isinstance(plan, VectorPlan):
        constexprs |= {"ROWS": rows, "BLOCK_N": plan.block_n}
        constexprs["BLOCK_K"] = 1 << (inputs - 1).bit_length()
        kernel = f"{MODULE}:vector_linear_kernel"
        return AotJob(
            kernel=kernel, signature=signature, constexprs=constexprs, num_warps=plan.num_warps
        )
    assert isinstance(plan, TilePlan)
    signature["num_rows"] = "i32"
    if plan.splits > 1:
        signature |= {"partial_ptr": "*fp32:16", "tickets_ptr": "*i32:16"}
    else:
        constexprs |= {"partial_ptr": None, "tickets_ptr": None}
    constexprs |= {"BLOCK_M": 16, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
    constexprs |= {"SPLITS": plan.splits, "PREFETCH": dependent or kind != "add"}
    job = AotJob(kernel=f"{MODULE}:tile_linear_kernel", signature=signature, constexprs=constexprs)
    return replace(job, num_warps=plan.num_warps, num_stages=plan.num_stages)


JOBS = {
    **{f"vector-{name}": linear_job(name, 1) for name in PRODUCTS},
    **{f"vector-{name}-fp32": linear_job(name, 1, dtype="fp32") for name in PRODUCTS},
    **{f"vector-{name}-dependent": linear_job(name, 1, dependent=True) for name in PRODUCTS},
    **{f"tile-{name}": linear_job(name, 16) for name in PRODUCTS},
    **{f"tile-{name}-dependent": linear_job(name, 16, dependent=True) for name in PRODUCTS},
}


@pytest.fixture(scope="module")
def reports() -> dict[str, AotReport]:
    return dict(zip(JOBS, compile_many_for_sm90(list(JOBS.values())), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_a_product_does_not_spill(name: str, reports: dict[str, AotReport]) -> None:
    """And leaves room for two programs per multiprocessor at least, four of the vector kernel's."""
    assert reports[name].spills == 0
    assert reports[name].registers <= (128 if name.startswith("vector") else 255)
    assert reports[name].shared <= 112 * 1024


@pytest.mark.parametrize("name", PRODUCTS)
def test_few_rows_use_hopper_s_matrix_instruction_and_asynchronous_copies(
    name: str, reports: dict[str, AotReport]
) -> None:
    """The weight is the 64-row operand, and its tiles go from memory to shared memory."""
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in reports[f"tile-{name}"].ptx
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", reports[f"tile-{name}"].ptx)


@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_are_asked_for_before_another_kernel_is_waited_for(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Signal, then weights, then wait: nothing but weights is read before the wait."""
    vector = _positions(reports[f"vector-{name}-dependent"].ptx, "ld.global.v4")
    signal, wait, loads = vector
    assert signal < min(loads)
    assert sum(load < wait for load in loads) >= 8  # 64 weights a thread, 8 a load
    signal, wait, loads = _positions(reports[f"tile-{name}-dependent"].ptx, "prefetch.global.L2")
    assert signal < min(loads)
    assert max(loads) < wait


def _positions(ptx: str, access: str) -> tuple[int, int, list[int]]:
    """Where a kernel signals, waits, and accesses memory."""
    return (
        ptx.index("griddepcontrol.launch_dependents"),
        ptx.index("griddepcontrol.wait"),
        [match.start() for match in re.finditer(re.escape(access), ptx)],
    )
