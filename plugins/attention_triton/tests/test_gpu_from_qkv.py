"""On a GPU: decode from packed q, k, v: captured, behind late producers, one kernel per layer."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_core.kernels import launch_options, supports_dependent_launch
from nanovllm_kit.attention_preparation import UnpreparedCase, drawn_prep, unprepared
from nanovllm_kit.paged_attention import make_case

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 - only where Triton is
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
REPEATS, REPLAYS = 50, 20
SHAPES = [
    {"heads": (16, 8), "head_size": 128, "block_size": 256},
    {"heads": (32, 8), "head_size": 128, "block_size": 16},
    {"heads": (32, 8), "head_size": 64, "block_size": 256},
    {"heads": (28, 4), "head_size": 128, "block_size": 256},
    {"heads": (32, 2), "head_size": 128, "block_size": 16},
    {"heads": (6, 2), "head_size": 80, "block_size": 64, "sliding_window": 100},
    {"heads": (80, 1), "head_size": 96, "block_size": 256, "soft_cap": 20.0},
    {"heads": (8, 4), "head_size": 256, "block_size": 256},
    {"heads": (4, 1), "head_size": 256, "block_size": 16, "sliding_window": 300},
]


@triton.jit
def late_copy_kernel(source_ptr, target_ptr, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Signals first, then sleeps 5 to 10 µs, then writes."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + lanes, mask=lanes < size)
    tl.inline_asm_elementwise(
        "nanosleep.u32 5000; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(target_ptr + lanes, values, mask=lanes < size)


def copy_late(source: Tensor, target: Tensor) -> None:
    options = launch_options(supports_dependent_launch(source.device))
    late_copy_kernel[(-(-source.numel() // 1024),)](
        source, target, source.numel(), BLOCK=1024, **options
    )


def make_step(lens: list[int], heads: tuple[int, int], seed: int = 0, **shape) -> UnpreparedCase:
    draws = Random(seed)
    case = make_case(
        [1] * len(lens), lens, num_heads=heads[0], num_kv_heads=heads[1], dtype=torch.bfloat16,
        device="cuda", finite_tail=False, seed=seed, **shape,
    )  # fmt: skip
    return unprepared(case, drawn_prep(case, draws), draws, float("nan"))


def backend_of(step: UnpreparedCase) -> TritonAttention:
    backend = TritonAttention(TritonOptions(), step.case.config())
    backend.allocate()
    return backend


def ragged(rows: int, longest: int) -> list[int]:
    return [0 if row % 7 == 5 else max(1, longest - row * 37 % longest) for row in range(rows)]


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['heads']} of {s['head_size']}")
def test_decode_from_qkv_equals_the_reference(shape, rows):
    """Rows cut in chunks, and whole ones."""
    step = make_step(ragged(rows, 700), **shape)
    expected = step.prepared()
    expected.assert_close(step.decode(backend_of(step)))
    torch.testing.assert_close(
        step.case.k_cache, expected.k_cache, equal_nan=True, rtol=1e-2, atol=1e-5
    )
    torch.testing.assert_close(step.case.v_cache, expected.v_cache, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(
    "shape", [*SHAPES[:5], *SHAPES[-2:]], ids=lambda s: f"{s['heads']} of {s['head_size']}"
)
def test_a_thousand_late_products_change_no_bit(shape, rows):
    """Captured behind a kernel that writes q, k, v late, and before one that overwrites them."""
    step = make_step(ragged(rows, 900), **shape)
    backend = backend_of(step)
    truth, late = step.qkv_BX, torch.empty_like(step.qkv_BX)
    expected = step.decode(backend)
    out = torch.empty_like(expected)
    metadata = step.case.decode_metadata(max_seq_len=backend.config.max_model_len)
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    poison = torch.full_like(truth, float("nan"))

    def run() -> None:
        copy_late(poison, late)
        copy_late(truth, late)
        backend.run_decode_from_qkv(
            late, step.prep, step.positions, step.slots, step.case.k_cache, step.case.v_cache,
            metadata, out.fill_(float("nan")),
        )  # fmt: skip
        copy_late(poison, late)
        wrong.add_((out != expected).sum())

    backend.plan_decode(metadata)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    wrong.zero_()
    for _ in range(REPLAYS):
        graph.replay()
    assert wrong.item() == 0
    assert torch.equal(step.run(backend), expected)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_captured_steps_follow_their_inputs_from_step_to_step(rows):
    """Plan, then layers right behind one another: each step reads the items that it planned.

    The chain has no kernel that is launched in the usual order but the plan.
    """
    lens = ragged(rows, 900)
    step = make_step(lens, **SHAPES[0])
    backend = backend_of(step)
    metadata = step.case.decode_metadata(max_seq_len=backend.config.max_model_len)
    late, outs = torch.empty_like(step.qkv_BX), [torch.empty_like(step.case.q_THD) for _ in "123"]

    def run() -> None:
        backend.plan_decode(metadata)
        for out in outs:
            copy_late(step.qkv_BX, late)
            backend.run_decode_from_qkv(
                late, step.prep, step.positions, step.slots, step.case.k_cache, step.case.v_cache,
                metadata, out,
            )  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed, longest in enumerate((900, 1, 300, 64, 65, 900), start=1):
        shorter = [min(keys, longest) for keys in lens]
        now = unprepared(
            replace(step.case, seq_lens=tuple(shorter)), step.prep, Random(seed), float("nan")
        )
        step.qkv_BX.copy_(now.qkv_BX)
        step.positions.copy_(now.positions)
        step.slots.copy_(now.slots)
        metadata.seq_lens.copy_(torch.tensor(shorter))
        expected = now.prepared()
        graph.replay()
        for out in outs:
            expected.assert_close(out)


def test_a_layer_takes_one_kernel():
    """Plan, and one launch for each run, whatever the number of rows."""
    step = make_step(ragged(5, 300), **SHAPES[0])
    backend = backend_of(step)
    step.decode(backend)
    out, metadata = torch.empty_like(step.case.q_THD), step.case.decode_metadata()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            backend.run_decode_from_qkv(
                step.qkv_BX, step.prep, step.positions, step.slots, step.case.k_cache,
                step.case.v_cache, metadata, out,
            )  # fmt: skip
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert kernels == ["decode_qkv_kernel"] * 3
