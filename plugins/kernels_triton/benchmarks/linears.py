"""Products of few rows at the shapes of several models: the plans, cuBLAS, and the stream's time.

    python plugins/kernels_triton/benchmarks/linears.py [--models 8B 32B] [--rows 1 16] \
        [--plans] [--json linears.json]

The four products of a layer in bfloat16, with dependent launch, inside CUDA graphs, each call with
another weight so that the L2 cache does not help. Every plan is compared with a float32 product
before it is timed, and gives a row the same bits whatever the other rows hold. Then whole layers
without attention: cuBLAS, the operations of the kernel set as models call them (norms that sum
parts among them) and, with `--plans`, the fastest plan of each product. Two minutes for two models
at three rows with `--plans` on one H200 with 16 CPU cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from nanovllm_kernels_triton.kernel_set import TritonKernels
from nanovllm_kernels_triton.linear import LinearLauncher
from nanovllm_kernels_triton.linear_choice import (
    TILE_ROWS,
    WIDE_ROWS,
    FewRowsPlan,
    LinearPlan,
    TilePlan,
    VectorPlan,
    choose,
    choose_few_rows,
    choose_gated,
)
from nanovllm_kernels_triton.multiprocessors import MULTIPROCESSORS
from nanovllm_kit.numerics import assert_close_report

BANDWIDTH = 4.3e12
"""Bytes per second that a copy reaches on an H200."""
MATMUL_RATE = 8e14
"""Operations per second, about, of a large product in bfloat16 there."""
STREAMED_BYTES = 320e6
"""Weights in rotation: several times the L2 cache."""
SHARED_BYTES = 226 * 1024
"""Of a multiprocessor, for the stages of its programs."""
EPS, DTYPE, DEVICE = 1e-6, torch.bfloat16, torch.device("cuda")

MODELS = {  # hidden size, inputs of o_proj, outputs of qkv, intermediate size
    "0.6B": (1024, 2048, 4096, 3072),
    "1.7B": (2048, 2048, 4096, 6144),
    "4B": (2560, 4096, 6144, 9728),
    "8B": (4096, 4096, 6144, 12288),
    "14B": (5120, 5120, 7168, 17408),
    "32B": (5120, 8192, 10240, 25600),
    "Llama-8B": (4096, 4096, 6144, 14336),
    "Qwen2.5-32B": (5120, 5120, 7168, 27648),
    "32B/2": (5120, 4096, 5120, 12800),  # of one of two ranks
    "32B/4": (5120, 2048, 2560, 6400),
}
WIDE_PLANS = tuple(
    TilePlan(block_n, block_k, 1, num_warps, num_stages)
    for block_n, block_k, num_warps, num_stages in (
        (64, 64, 4, 4), (64, 64, 8, 4), (64, 128, 4, 3),
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4),
    )
)  # fmt: skip
POWERS = (1, 2, 4, 8, 16)
"""Rows, and warps, of a vector program."""
KERNELS = TritonKernels(dependent_launch=True, few_rows=True)
LAUNCHER = LinearLauncher(dependent_launch=True)


@dataclass(frozen=True)
class Product:
    """x [rows, inputs] by a weight [outputs, inputs]; `kind` says what is before and behind it."""

    name: str
    kind: str  # "norm", "gated" (with norm) or "add"
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        """Bytes of the weight."""
        return self.inputs * self.outputs * DTYPE.itemsize


def products(model: str) -> tuple[Product, ...]:
    hidden, attended, qkv, intermediate = MODELS[model]
    return (
        Product("norm + qkv", "norm", hidden, qkv),
        Product("o_proj + residual", "add", attended, hidden),
        Product("norm + gate_up + silu", "gated", hidden, 2 * intermediate),
        Product("down + residual", "add", intermediate, hidden),
    )


def floor_of(size: float, rows: int) -> float:
    """Microseconds to stream a weight of so many bytes, or to multiply so many rows by it."""
    operations = 2 * rows * size / DTYPE.itemsize
    return max(size / BANDWIDTH, operations / MATMUL_RATE) * 1e6


def candidates(product: Product, rows: int) -> Iterator[LinearPlan]:
    """Plans worth a measurement: 32 to 128 weights a thread, or 192 of rows that are not padded; up
    to three programs a processor.

    Above TILE_ROWS of gate and up alone, and none above WIDE_ROWS.
    """
    if rows > TILE_ROWS:
        if rows <= WIDE_ROWS and product.kind == "gated":
            yield from WIDE_PLANS
        return
    padded = 1 << (product.inputs - 1).bit_length()
    if rows <= 2:
        rest = 1 << (product.inputs - padded // 2 - 1).bit_length()
        held_by_rest = {0: padded} | ({rest: padded // 2 + rest} if rest < padded // 2 else {})
        for rest, block_n, num_warps in itertools.product(held_by_rest, POWERS, POWERS):
            per_thread = block_n * held_by_rest[rest] // (32 * num_warps)
            if block_n > (product.kind == "gated") and 32 <= per_thread <= (192 if rest else 128):
                yield VectorPlan(block_n, num_warps, rest)
    yield from dict.fromkeys(_tile_plans(product, max(16, 1 << (rows - 1).bit_length())))


def _tile_plans(product: Product, block_m: int) -> Iterator[TilePlan]:
    count, steps = -(-product.outputs // 64), -(-product.inputs // 128)
    if count >= 96:
        for per_processor in (1, 2, 3):
            yield from _tile_plan(64, 128, 1, block_m, per_processor)
        if block_m == 64:
            yield from _tile_plan(64, 64, 1, block_m, 3)
            yield from _tile_plan(128, 64, 1, block_m, 2)
            yield from _tile_plan(128, 128, 1, block_m, 1)
        if count < MULTIPROCESSORS:
            yield from _tile_plan(64, 128, 2, block_m, 2)
        return
    for splits in (1, 2, 3, 4, 6, 8):
        if steps // splits >= 2 and count * splits <= 3 * MULTIPROCESSORS:
            per_processor = -(-count * splits // MULTIPROCESSORS)
            yield from _tile_plan(64, 128, splits, block_m, per_processor)
        if count < 40 and steps // splits >= 4 and count * splits <= MULTIPROCESSORS:
            yield from _tile_plan(32, 256 if block_m < 64 else 128, splits, block_m, 1)


def _tile_plan(
    block_n: int, block_k: int, splits: int, block_m: int, per_processor: int
) -> Iterator[TilePlan]:
    """With as many stages as so many resident programs have memory for, from two to four."""
    stage = (block_n + block_m) * block_k * DTYPE.itemsize
    num_stages = min(SHARED_BYTES // per_processor // stage, 4)
    if num_stages >= 2:
        num_warps = 8 if block_n == block_k == 128 else 4
        yield TilePlan(block_n, block_k, splits, num_warps, num_stages)


class Case:
    """One product at one number of rows, with its tensors."""

    def __init__(self, product: Product, rows: int, weights: Sequence[Tensor]) -> None:
        self.product, self.weights = product, weights
        self.x = torch.randn(rows, product.inputs, device=DEVICE).to(DTYPE)
        self.norm_weight = torch.randn(product.inputs, device=DEVICE).to(DTYPE)
        self.residual = torch.randn(rows, product.outputs, device=DEVICE).to(DTYPE)

    def run(
        self, plan: LinearPlan | None, index: int,
        x: Tensor | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The product by one plan, as `TritonKernels` runs it; None is cuBLAS."""
        x, weight = self.x if x is None else x, self.weights[index % len(self.weights)]
        gated = self.product.kind == "gated"
        if self.product.kind == "add":
            residual = self.residual if residual is None else residual
            if plan is None:
                return residual.addmm_(x, weight.t())
            return LAUNCHER.run(plan, x, weight, residual_TN=residual)
        if isinstance(plan, VectorPlan):
            return LAUNCHER.run(
                plan, x, weight, norm_weight_K=self.norm_weight, eps=EPS, gated=gated
            )
        x = KERNELS.rms_norm(x, self.norm_weight, EPS)
        if plan is not None:
            return LAUNCHER.run(plan, x, weight, gated=gated)
        out = torch.mm(x, weight.t())
        return KERNELS.silu_and_mul(out) if gated else out

    def reference(self) -> Tensor:
        """The product in float32, with the roundings that `KernelSet` promises."""
        x = self.x.float()
        if self.product.kind != "add":
            scaled = (x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS)).to(DTYPE)
            x = (scaled.float() * self.norm_weight.float()).to(DTYPE).float()
        y = x @ self.weights[0].float().t()
        if self.product.kind == "gated":
            gate, up = y.to(DTYPE).float().chunk(2, dim=1)
            return silu(gate) * up
        return y + 1 if self.product.kind == "add" else y

    def check(self, plan: LinearPlan, reference: Tensor) -> None:
        """Near the reference, and the first row has the same bits beside other rows."""
        others = torch.randn_like(self.x) * 3
        others[0] = self.x[0]
        ones = torch.ones_like(self.residual)
        result, again = (self.run(plan, 0, x, ones.clone()) for x in (self.x, others))
        assert_close_report(result.float(), reference, rel_norm=8e-3)
        if not torch.equal(result[0], again[0]):
            raise AssertionError(f"{self.product.name}, {plan}: two runs differ")


def make_weights(product: Product, copies: int) -> list[Tensor]:
    shape, scale = (product.outputs, product.inputs), product.inputs**-0.5
    return [torch.randn(shape, device=DEVICE, dtype=DTYPE) * scale for _ in range(copies)]


def compile_plan(job: tuple[Product, int, LinearPlan]) -> str | None:
    """Run a plan once in a process of its own, for the compiled kernel in Triton's cache."""
    product, rows, plan = job
    weight = torch.empty(product.outputs, product.inputs, dtype=DTYPE, device=DEVICE)
    try:
        Case(product, rows, [weight]).run(plan, 0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{product.name}, {rows} rows, {plan}: {type(error).__name__}: {error}"[:200]
    return None


def measure(runs: Mapping[str, Callable[[int], object]], calls: int) -> dict[str, float]:
    """Microseconds of a captured call of each: the middle of three means, which take turns.

    Whatever runs first runs at a clock that the power of others has not lowered yet.
    """
    graphs = {name: captured(run, calls) for name, run in runs.items()}
    repeats, means = max(2, 100 // calls), defaultdict[str, list[float]](list)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for name, graph in [*graphs.items()] * 3:
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        means[name].append(start.elapsed_time(end) * 1e3 / (repeats * calls))
    for graph in graphs.values():
        graph.reset()
    return {name: median(times) for name, times in means.items()}


def captured(run: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    """So many calls behind each other, replayed once."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            run(index)
    graph.replay()
    return graph


def measure_product(case: Case, plans: Sequence[LinearPlan]) -> dict[str, float]:
    """Microseconds of cuBLAS, of the plan that is chosen, and of each of `plans`, by name."""
    calls, reference = max(len(case.weights), 8), case.reference()
    chosen = _chosen(case.product, case.x.shape[0])
    named: dict[str, LinearPlan | None] = {"cuBLAS": None, "chosen": chosen}
    named |= {short(plan): plan for plan in plans}
    for plan in named.values():
        if plan is not None:
            case.check(plan, reference)
    return measure({name: partial(case.run, plan) for name, plan in named.items()}, calls)


def layer(
    cases: dict[Product, Case], plans: dict[Product, LinearPlan | None]
) -> Callable[[int], object]:
    """The products of a layer, each reading what the one before wrote."""
    qkv, o_proj, gate_up, down = cases
    residual = cases[o_proj].residual

    def run(index: int) -> Tensor:
        attended = cases[qkv].run(plans[qkv], index, residual)[:, : o_proj.inputs]
        cases[o_proj].run(plans[o_proj], index, attended, residual)
        hidden = cases[gate_up].run(plans[gate_up], index, residual)
        return cases[down].run(plans[down], index, hidden, residual)

    return run


def layer_of_the_set(cases: dict[Product, Case]) -> Callable[[int], object]:
    """The same by the operations of the kernel set: a norm sums the parts of a product."""
    qkv, o_proj, gate_up, down = cases
    residual, norm_weight = cases[o_proj].residual, cases[qkv].norm_weight
    normed: Tensor | None = None

    def weight(product: Product, index: int) -> Tensor:
        return cases[product].weights[index % len(cases[product].weights)]

    def add(x: Tensor, weight: Tensor) -> Tensor | None:
        """The residual's norm, where the set has one operation for the sum and the norm."""
        done = KERNELS.linear_add_norm(x, weight, residual, norm_weight, EPS)
        if done is not None:
            return done[1]
        KERNELS.linear_add(x, weight, residual)
        return None

    def run(index: int) -> Tensor:
        nonlocal normed
        if normed is None:
            hidden = KERNELS.norm_linear(residual, norm_weight, EPS, weight(qkv, index))
        else:
            hidden = KERNELS.linear(normed, weight(qkv, index))
        normed = add(hidden[:, : o_proj.inputs], weight(o_proj, index))
        if normed is None:
            hidden = KERNELS.norm_gate_up(residual, norm_weight, EPS, weight(gate_up, index))
        else:
            hidden = KERNELS.gate_up(normed, weight(gate_up, index))
        normed = add(hidden, weight(down, index))
        return residual

    return run


def _chosen(product: Product, rows: int) -> LinearPlan | None:
    gated = product.kind == "gated"
    asked = rows, product.outputs, product.inputs, DTYPE
    return choose_few_rows(*asked, gated=gated) or (choose_gated if gated else choose)(*asked)


def short(plan: LinearPlan | None) -> str:
    if plan is None:
        return "cuBLAS"
    if isinstance(plan, VectorPlan):
        return f"vector {plan.block_n} w{plan.num_warps}" + f" rest {plan.rest}" * (plan.rest > 0)
    if isinstance(plan, FewRowsPlan):
        return f"few rows w{plan.num_warps} h{plan.held}"
    sizes = f"{plan.block_n}x{plan.block_k} /{plan.splits}"
    return f"tile {sizes} w{plan.num_warps} s{plan.num_stages}"


def measure_model(model: str, all_rows: Sequence[int], with_plans: bool) -> list[dict[str, Any]]:
    """Print and return a line per number of rows and product, and one per whole layer."""
    lines: list[dict[str, Any]] = []
    size = sum(product.size for product in products(model))
    layers = max(4, math.ceil(STREAMED_BYTES / size))
    weights = {
        product: make_weights(product, max(layers, math.ceil(STREAMED_BYTES / product.size)))
        for product in products(model)
    }
    for rows in all_rows:
        cases = {product: Case(product, rows, weights[product]) for product in products(model)}
        plans = {p: {short(c): c for c in candidates(p, rows)} for p in cases} if with_plans else {}
        fastest: dict[Product, LinearPlan | None] = {}
        for product, case in cases.items():
            known = plans.get(product, {})
            times = measure_product(case, list(known.values()))
            fastest[product] = known.get(min(times, key=lambda name: times[name]))
            shape = {"outputs": product.outputs, "inputs": product.inputs}
            lines.append(_line(model, rows, product.name, product.size, times) | shape)
        by_cublas: dict[Product, LinearPlan | None] = dict.fromkeys(cases)
        of = {"cuBLAS": layer(cases, by_cublas), "chosen": layer_of_the_set(cases)}
        of |= {"fastest": layer(cases, fastest)} if with_plans else {}
        lines.append(_line(model, rows, "layer", size, measure(of, layers)))
    return lines


def _line(model: str, rows: int, name: str, size: int, times: dict[str, float]) -> dict[str, Any]:
    floor = floor_of(size, rows)
    best = sorted(times, key=lambda key: times[key])[:3]
    print(
        f"{model:8} {rows:3} rows  {name:22} floor {floor:6.1f}  cuBLAS {times['cuBLAS']:6.1f}  "
        f"chosen {times['chosen']:6.1f} ({floor / times['chosen']:.0%})  "
        + "  ".join(f"{key} {times[key]:.1f}" for key in best if key not in ("cuBLAS", "chosen")),
        flush=True,
    )
    return {"model": model, "rows": rows, "product": name, "floor": floor, "microseconds": times}


def compile_all(models: Sequence[str], all_rows: Sequence[int], with_plans: bool) -> None:
    """Fill Triton's cache, in as many processes as the machine has cores."""
    jobs: dict[tuple[Product, int, LinearPlan], None] = {}
    for rows in all_rows:
        for product in (product for model in models for product in products(model)):
            plans = [_chosen(product, rows), *(candidates(product, rows) if with_plans else ())]
            for plan in plans:
                if plan is not None:  # a tile kernel serves all rows up to a power of two
                    kernel_rows = rows if isinstance(plan, VectorPlan) else max(rows, 16)
                    jobs[product, kernel_rows, plan] = None
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), context) as pool:
        refused = [reason for reason in pool.map(compile_plan, jobs, chunksize=4) if reason]
    if refused:
        raise SystemExit("\n  ".join([f"{len(refused)} plans do not run:", *refused[:8]]))
    print(f"{len(jobs)} kernels", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["0.6B", "8B", "32B"])
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 2, 4, 5, 8, 16, 33, 64, 65, 96, 128, 256],
    )
    parser.add_argument("--plans", action="store_true", help="time every plan, not the chosen only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    compile_all(arguments.models, arguments.rows, arguments.plans)
    torch.manual_seed(0)
    lines = []
    for model in arguments.models:
        lines += measure_model(model, arguments.rows, arguments.plans)
        torch.cuda.empty_cache()
    print(f"done after {time.perf_counter() - started:.0f} s")
    if arguments.json is not None:
        record = {"gpu": torch.cuda.get_device_name(), "products": lines}
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
