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
import json
import math
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from linear_candidates import DTYPE, MODELS, Product, candidates, floor_of, products
from torch import Tensor
from torch.nn.functional import silu

from nanovllm_kernels_triton.kernel_set import TritonKernels
from nanovllm_kernels_triton.linear import LinearLauncher
from nanovllm_kernels_triton.linear_choice import (
    FEW_ROWS,
    FewRowsPlan,
    LinearPlan,
    VectorPlan,
    choose_plan,
)
from nanovllm_kit.numerics import assert_close_report

STREAMED_BYTES = 320e6
"""Weights in rotation: several times the L2 cache."""
EPS, DEVICE = 1e-6, torch.device("cuda")

KERNELS = TritonKernels(dependent_launch=True, few_rows=True)
KERNELS.announce_prepared_decode(FEW_ROWS)
LAUNCHER = LinearLauncher(dependent_launch=True)


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
    asked = rows, product.outputs, product.inputs, DTYPE
    return choose_plan(*asked, gated=product.kind == "gated", few_rows=True)


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
