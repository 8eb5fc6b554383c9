"""The kernels compile for sm_90 without spills and with 16-byte accesses, at the models' sizes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nanovllm_kit.aot import AotJob, AotReport, compile_kernels
from nanovllm_kit.registers import assert_within_list, compile_jobs

ROWS = "nanovllm_kernels_triton.elementwise"
PREPARE = "nanovllm_kernels_triton.prepare_qkv"


def rms_norm_job(dtype: str, size: int) -> AotJob:
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}:16")
    return AotJob(
        kernel=f"{ROWS}:rms_norm_kernel",
        signature={**pointers, "x_stride": "i32:16"},
        constexprs={"EPS": 1e-6, "SIZE": size, "BLOCK": size, "DEPENDENT": True},
        num_warps=min(max(size // 256, 1), 16),
    )


def add_norm_job(size: int, parts: int) -> AotJob:
    pointers = dict.fromkeys(("residual_ptr", "weight_ptr", "out_ptr"), "*bf16:16")
    return AotJob(
        kernel=f"{ROWS}:add_norm_kernel",
        signature={
            **pointers,
            "parts_ptr": "*fp32:16",
            "num_tokens": "i32",
            "residual_stride": "i32:16",
        },
        constexprs={"PARTS": parts, "EPS": 1e-6, "SIZE": size, "BLOCK": size, "DEPENDENT": True},
        num_warps=min(max(size // 128, 1), 16),
    )


def norm_add_norm_job(size: int, dtype: str) -> AotJob:
    """With weights of this dtype."""
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr"), "*bf16:16")
    weights = dict.fromkeys(("weight_ptr", "next_weight_ptr"), f"*{dtype}:16")
    strides = dict.fromkeys(("x_stride", "residual_stride"), "i32:16")
    block = 1 << (size - 1).bit_length()
    return AotJob(
        kernel=f"{ROWS}:norm_add_norm_kernel",
        signature={**pointers, **weights, **strides},
        constexprs={
            "EPS": 1e-6, "NEXT_EPS": 1e-6, "SIZE": size, "BLOCK": block, "DEPENDENT": True,
        },
        num_warps=min(max(block // 256, 1), 16),
        enable_fp_fusion=False,
    )  # fmt: skip


def activation_job(dtype: str, size: int, *, gelu: bool = False) -> AotJob:
    pointers = dict.fromkeys(("gate_up_ptr", "out_ptr"), f"*{dtype}:16")
    return AotJob(
        kernel=f"{ROWS}:activate_and_mul_kernel",
        signature={**pointers, "gate_up_stride": "i32:16"},
        constexprs={"SIZE": size, "BLOCK": 1024, "GELU": gelu, "DEPENDENT": True},
    )


def embed_job(dtype: str, size: int) -> AotJob:
    pointers = dict.fromkeys(("weight_ptr", "out_ptr"), f"*{dtype}:16")
    return AotJob(
        kernel=f"{ROWS}:embed_kernel",
        signature={**pointers, "ids_ptr": "*i32:16"},
        constexprs={"SIZE": size, "BLOCK": 1024, "DEPENDENT": True},
    )


def prepare_job(dtype: str, heads: tuple[int, int], head_size: int) -> AotJob:
    arrays = ("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "q_ptr", "k_cache_ptr", "v_cache_ptr")
    strides = ("qkv_stride", *(f"{c}_{d}_stride" for c in "kv" for d in ("block", "token", "head")))
    return AotJob(
        kernel=f"{PREPARE}:prepare_qkv_kernel",
        signature={
            **dict.fromkeys(arrays, f"*{dtype}:16"),
            **dict.fromkeys(strides, "i32:16"),
            "cos_sin_ptr": "*fp32:16",
            "positions_ptr": "*i32:16",
            "slot_mapping_ptr": "*i64:16",
        },
        constexprs={
            "EPS": 1e-6,
            "NUM_HEADS": heads[0],
            "NUM_KV_HEADS": heads[1],
            "HEAD_SIZE": head_size,
            "HALF": head_size // 2,
            "BLOCK_SIZE": 64,
            "DEPENDENT": True,
            "BLOCK_HEADS": 8,
            "BLOCK_HALF": head_size // 2,
            "BLOCK_REST": 0,
            "BLOCK_HEAD": head_size,
        },
        num_warps=1,
    )


def prepare_latent_job(dtype: str, num_heads: int) -> AotJob:
    arrays = ("q_ptr", "rows_ptr", "weight_ptr", "out_ptr", "cache_ptr")
    strides = ("q_stride", "head_stride", "row_stride", "block_stride", "token_stride")
    return AotJob(
        kernel="nanovllm_kernels_triton.prepare_latent:prepare_latent_kernel",
        signature={
            **dict.fromkeys(arrays, f"*{dtype}:16"),
            **dict.fromkeys(strides, "i32:16"),
            "cos_sin_ptr": "*fp32:16",
            "positions_ptr": "*i32:16",
            "slot_mapping_ptr": "*i64:16",
        },
        constexprs={
            "EPS": 1e-6,
            "NUM_HEADS": num_heads,
            "HEAD_SIZE": 192,
            "LATENT": 512,
            "ROTATED": 64,
            "BLOCK_SIZE": 64,
            "BLOCK_HEADS": 4,
            "BLOCK_NOPE": 128,
            "BLOCK_LATENT": 512,
            "BLOCK_PAIRS": 32,
            "DEPENDENT": True,
        },
        num_warps=1,
    )


def per_head_job(dtype: str, inputs: int, outputs: int, rest: int, in_stride: int) -> AotJob:
    """16 heads of V2-Lite: `in_stride` is 1 where the inputs lie side by side, else outputs do."""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}:16")
    strides = dict.fromkeys(("x_row_stride", "x_head_stride", "weight_head_stride"), "i32:16")
    one, other = ("weight_in_stride", "weight_out_stride")[:: 1 if in_stride == 1 else -1]
    return AotJob(
        kernel="nanovllm_kernels_triton.per_head:per_head_kernel",
        signature={**pointers, **strides, other: "i32:16"},
        constexprs={
            one: 1, "OUTPUTS": outputs, "INPUTS": inputs, "REST": rest,
            "BLOCK_N": 8192 // inputs, "BLOCK_K": inputs, "BLOCK_REST": max(rest, 1),
            "DEPENDENT": True,
        },
    )  # fmt: skip


PER_HEAD = {
    f"per_head-{dtype}-{name}": per_head_job(dtype, *sizes)
    for dtype in ("bf16", "fp32")
    for name, sizes in {"absorb": (128, 512, 64, 512), "expand": (512, 128, 0, 1)}.items()
}
JOBS = {
    **PER_HEAD,
    **{
        f"rms_norm-{dtype}-{size}": rms_norm_job(dtype, size)
        for dtype, size in (("bf16", 1024), ("fp16", 4096), ("bf16", 8192), ("fp32", 2048))
    },
    **{f"add_norm-{size}": add_norm_job(size, parts) for size, parts in ((1024, 6), (4096, 2))},
    **{
        f"norm_add_norm-{dtype}-{size}": norm_add_norm_job(size, dtype)
        for dtype, size in (("fp32", 2304), ("bf16", 2304), ("fp32", 5376))
    },
    "gelu-bf16": activation_job("bf16", 9216, gelu=True),
    **{f"embed-{dtype}": embed_job(dtype, 1024) for dtype in ("bf16", "fp32")},
    **{f"silu-{dtype}": activation_job(dtype, 3072) for dtype in ("bf16", "fp16", "fp32")},
    **{
        f"prepare_qkv-{dtype}-{heads}-{size}": prepare_job(dtype, heads, size)
        for dtype, heads, size in (
            ("bf16", (16, 8), 128),
            ("fp16", (32, 8), 128),
            ("bf16", (4, 2), 64),
            ("fp32", (16, 8), 128),
        )
    },
    **{
        f"prepare_latent-{dtype}-{heads}": prepare_latent_job(dtype, heads)
        for dtype, heads in (("bf16", 16), ("fp16", 128), ("fp32", 16))
    },
}


@pytest.fixture(scope="module")
def reports() -> dict[str, AotReport]:
    return compile_jobs(JOBS)


def test_no_kernel_takes_more_than_its_line(reports: dict[str, AotReport]) -> None:
    """Registers, spills and shared memory are those of the list for this version of Triton."""
    assert_within_list(__file__, reports)


@pytest.mark.parametrize("name", JOBS)
def test_a_kernel_does_not_spill(name: str, reports: dict[str, AotReport]) -> None:
    """Every value lives in a register, with room for 8 warps and more per scheduler."""
    assert reports[name].spills == 0
    assert reports[name].registers <= 128


@pytest.mark.parametrize("name", JOBS)
def test_a_kernel_reads_and_writes_16_bytes_at_a_time(
    name: str, reports: dict[str, AotReport]
) -> None:
    """Four 32-bit words per access. Some threads have fewer numbers to write."""
    assert "ld.global.v4" in reports[name].ptx
    assert "st.global.v4" in reports[name].ptx or name in {*PER_HEAD, "add_norm-1024"}


@pytest.mark.parametrize(
    ("name", "loads"), [("add_norm-1024", 1), ("add_norm-4096", 1), ("norm_add_norm-fp32-2304", 4)]
)
def test_a_norm_that_sums_reads_its_weights_alone_before_the_wait(
    name: str, loads: int, reports: dict[str, AotReport]
) -> None:
    """The residual may still be written, and what is added: float32 weights are two loads each."""
    before = reports[name].ptx.partition("griddepcontrol.wait")[0]
    assert len(re.findall(r"ld\.global", before)) == loads


def test_a_sum_is_of_the_rounded_norm(reports: dict[str, AotReport]) -> None:
    """A multiply-add of half precision would add the product by the weight unrounded."""
    assert "fma.rn.bf16" not in reports["norm_add_norm-bf16-2304"].ptx
    fused = replace(norm_add_norm_job(2304, "bf16"), enable_fp_fusion=True)
    [report] = compile_kernels([fused])
    assert "fma.rn.bf16" in report.ptx, "Triton fuses no more: leave enable_fp_fusion out"


@pytest.mark.parametrize("name", PER_HEAD)
def test_the_weights_of_heads_are_on_their_way_before_the_wait(
    name: str, reports: dict[str, AotReport]
) -> None:
    """All of them, 64 of a thread, whichever way they lie."""
    ptx = reports[name].ptx
    loads = 8 if "bf16" in name else 16
    assert ptx[: ptx.index("griddepcontrol.wait")].count("ld.global.v4") == loads
