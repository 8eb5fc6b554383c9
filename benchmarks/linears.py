"""Small-batch linear layers: every candidate kernel, cuBLAS, and the time of streaming the weight.

    python benchmarks/linears.py [--json linears.json] [--rows 1 16]

Qwen3-0.6B's four products per layer and its output head, in bfloat16, inside CUDA graphs, each call
with another weight so that the L2 cache does not help. Every candidate is checked before it is
timed. Then whole layers, without attention: cuBLAS, what `linear_choice` picks, the fastest of each
product, and the same with dependent launch. About two minutes on one H200 with 16 CPU cores.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nanovllm_core.kernels.linear_choice import LinearPlan, TilePlan, VectorPlan, choose
from nanovllm_core.kernels.triton_linear import LinearLauncher
from nanovllm_core.kernels.triton_set import TritonKernels
from nanovllm_kit.numerics import assert_close_report

BANDWIDTH = 4.3e12
"""Bytes per second that a copy reaches on an H200."""

STREAMED_BYTES = 320e6
"""Weights of one product in rotation: several times the L2 cache."""

SERIAL, DEPENDENT = TritonKernels(), TritonKernels(dependent_launch=True)

NUM_LAYERS, EPS = 28, 1e-6
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")


@dataclass(frozen=True)
class Product:
    """x [rows, inputs] by a weight [outputs, inputs]; `kind` says what is before and behind it."""

    name: str
    kind: str  # "norm", "gated" (with norm), "add" or "plain"
    inputs: int
    outputs: int

    @property
    def floor(self) -> float:
        """Microseconds to stream the weight."""
        return self.inputs * self.outputs * DTYPE.itemsize / BANDWIDTH * 1e6

    @property
    def copies(self) -> int:
        return math.ceil(STREAMED_BYTES / (self.inputs * self.outputs * DTYPE.itemsize))


QKV = Product("norm + qkv", "norm", 1024, 4096)
O_PROJ = Product("o_proj + residual", "add", 2048, 1024)
GATE_UP = Product("norm + gate_up + silu", "gated", 1024, 6144)
DOWN = Product("down + residual", "add", 3072, 1024)
HEAD = Product("lm_head", "plain", 1024, 151936)
PRODUCTS = (QKV, O_PROJ, GATE_UP, DOWN, HEAD)


def candidates(product: Product, rows: int) -> Iterator[LinearPlan]:
    padded = 1 << (product.inputs - 1).bit_length()
    gated = product.kind == "gated"
    for block_n in (1, 2, 4, 8, 16):
        for num_warps in (2, 4, 8):
            per_thread = block_n * padded // (32 * num_warps)
            if rows <= 4 and block_n > gated and 16 <= per_thread <= 128:
                yield VectorPlan(block_n, num_warps)
    tiles = ((64, 128, 4, 4), (64, 256, 4, 3), (32, 128, 4, 5), (32, 256, 4, 3), (128, 128, 8, 3))
    for block_n, block_k, num_warps, num_stages in tiles:
        steps = -(-product.inputs // block_k)
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            programs = product.outputs // block_n * splits
            if steps % splits or not ((splits == 1 and programs > 512) or 64 <= programs <= 512):
                continue
            yield TilePlan(block_n, block_k, splits, num_warps, num_stages)


class Case:
    """One product at one number of rows, with its tensors."""

    def __init__(self, product: Product, rows: int, weights: list[Tensor]) -> None:
        self.product, self.weights = product, weights
        self.x = torch.randn(rows, product.inputs, device=DEVICE).to(DTYPE)
        self.norm_weight = torch.randn(product.inputs, device=DEVICE).to(DTYPE)
        self.residual = torch.randn(rows, product.outputs, device=DEVICE).to(DTYPE)

    def cublas(
        self, index: int, x: Tensor | None = None, residual: Tensor | None = None,
        kernels: TritonKernels = SERIAL,
    ) -> Tensor:  # fmt: skip
        x, weight = self.x if x is None else x, self.weights[index % len(self.weights)]
        if self.product.kind == "add":
            residual = self.residual if residual is None else residual
            return residual.addmm_(x, weight.t())
        if self.product.kind != "plain":
            x = kernels.rms_norm(x, self.norm_weight, EPS)
        out = torch.mm(x, weight.t())
        return kernels.silu_and_mul(out) if self.product.kind == "gated" else out

    def planned(
        self, plan: LinearPlan | None, launcher: LinearLauncher, index: int,
        x: Tensor | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The product by one plan, as `TritonKernels` runs it; None is cuBLAS."""
        kernels = DEPENDENT if launcher.dependent_launch else SERIAL
        if plan is None:
            return self.cublas(index, x, residual, kernels)
        x, weight = self.x if x is None else x, self.weights[index % len(self.weights)]
        if self.product.kind == "add":
            residual = self.residual if residual is None else residual
            return launcher.run(plan, x, weight, residual_TN=residual)
        norm: dict[str, Any] = {}
        if self.product.kind != "plain":
            if isinstance(plan, TilePlan):
                x = kernels.rms_norm(x, self.norm_weight, EPS)
            else:
                norm = {"norm_weight_K": self.norm_weight, "eps": EPS}
        return launcher.run(plan, x, weight, gated=self.product.kind == "gated", **norm)

    def check(self, plan: LinearPlan, launcher: LinearLauncher) -> None:
        """Near cuBLAS's result, and the same bits twice."""
        results = [
            self.planned(each, launcher, 0, residual=torch.ones_like(self.residual))
            for each in (None, plan, plan)
        ]
        assert_close_report(results[1], results[0], rel_norm=8e-3)
        if not torch.equal(results[1], results[2]):
            raise AssertionError(f"{self.product.name}, {plan}: two runs differ")


def make_weights(product: Product, copies: int) -> list[Tensor]:
    shape = (product.outputs, product.inputs)
    scale = product.inputs**-0.5
    return [(torch.randn(shape, device=DEVICE) * scale).to(DTYPE) for _ in range(copies)]


def compile_plan(job: tuple[Product, int, LinearPlan, bool]) -> str | None:
    """Run a candidate once in a process of its own, for the compiled kernel in Triton's cache."""
    product, rows, plan, dependent = job
    weight = torch.empty(product.outputs, product.inputs, dtype=DTYPE, device=DEVICE)
    try:
        Case(product, rows, [weight]).planned(plan, LinearLauncher(dependent_launch=dependent), 0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def measure(call: Callable[[int], object], calls: int) -> float:
    """Microseconds per call, captured: the least of three means."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    best, repeats = math.inf, max(2, 400 // calls)
    for _ in range(3):
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / (repeats * calls))
    graph.reset()
    return best


def measure_product(case: Case, rows: int, refused: set[Any]) -> dict[str, Any]:
    product, launcher = case.product, LinearLauncher()
    calls = max(len(case.weights), 4)
    times: list[tuple[float, LinearPlan]] = []
    wrong: list[str] = []
    for plan in candidates(product, rows):
        if (product, _kernel_rows(plan, rows), plan) in refused:
            continue
        try:
            case.check(plan, launcher)
        except AssertionError as error:
            wrong.append(f"{product.name}, {rows} rows, {short(plan)}: {error}")
        else:
            times.append((measure(lambda i, p=plan: case.planned(p, launcher, i), calls), plan))
    chosen = choose(rows, product.outputs, product.inputs, DTYPE)
    return {
        "cublas": measure(case.cublas, calls),
        "chosen": measure(lambda i: case.planned(chosen, launcher, i), calls),
        "plans": sorted(times, key=lambda pair: pair[0]),
        "wrong": wrong,
    }


def _kernel_rows(plan: LinearPlan, rows: int) -> int:
    """Numbers of rows that share a compiled kernel share this."""
    return rows if isinstance(plan, VectorPlan) else max(rows, 16)


def layers(
    cases: dict[Product, Case], plans: dict[Product, LinearPlan | None], launcher: LinearLauncher
) -> Callable[[int], object]:
    """One layer after the other, each product reading what the one before wrote."""
    residual = cases[O_PROJ].residual

    def layer(index: int) -> Tensor:
        def run(product: Product, x: Tensor) -> Tensor:
            return cases[product].planned(plans[product], launcher, index, x, residual)

        qkv = run(QKV, residual)
        run(O_PROJ, qkv[:, : O_PROJ.inputs])
        return run(DOWN, run(GATE_UP, residual))

    return layer


def measure_layers(
    cases: dict[Product, Case], rows: int, fastest: dict[Product, LinearPlan | None]
) -> dict[str, float]:
    """Milliseconds of all layers."""
    layer_products = PRODUCTS[:4]
    chosen = {p: choose(rows, p.outputs, p.inputs, DTYPE) for p in layer_products}
    cublas: dict[Product, LinearPlan | None] = dict.fromkeys(layer_products)
    variants = {
        "cuBLAS": (cublas, False),
        "cuBLAS, dependent": (cublas, True),
        "chosen": (chosen, False),
        "fastest": (fastest, False),
        "chosen, dependent": (chosen, True),
        "fastest, dependent": (fastest, True),
    }
    return {
        name: measure(layers(cases, plans, LinearLauncher(dependent_launch=dependent)), NUM_LAYERS)
        * (NUM_LAYERS / 1e3)
        for name, (plans, dependent) in variants.items()
    }


def compile_all(
    pool: ProcessPoolExecutor, jobs: list[tuple[Product, int, LinearPlan, bool]]
) -> set:
    """Fill Triton's cache; returns (product, rows, plan) of what does not compile or run."""
    refused, reasons = set(), []
    for (product, rows, plan, _), reason in zip(jobs, pool.map(compile_plan, jobs), strict=True):
        if reason is not None:
            refused.add((product, rows, plan))
            reasons.append(f"{product.name}, {rows} rows, {plan}: {reason[:150]}")
    print(f"{len(jobs)} kernels, {len(refused)} refused", *reasons[:8], sep="\n  ", flush=True)
    return refused


def short(plan: LinearPlan | None) -> str:
    if plan is None:
        return "cuBLAS"
    if isinstance(plan, VectorPlan):
        return f"vector {plan.block_n} w{plan.num_warps}"
    sizes = f"{plan.block_n}x{plan.block_k} /{plan.splits}"
    return f"tile {sizes} w{plan.num_warps} s{plan.num_stages}"


def print_products(results: dict[str, dict[int, dict[str, Any]]]) -> None:
    console = Console(width=140)
    for product in PRODUCTS:
        table = Table(title=f"{product.name}: µs per call, floor {product.floor:.2f}", box=None)
        for column in ("rows", "cuBLAS", "chosen", "vector", "tile", "of floor", "fastest plans"):
            table.add_column(column)
        for rows, result in results[product.name].items():
            plans = result["plans"]
            best = {
                kind: min((t for t, plan in plans if isinstance(plan, kind)), default=math.nan)
                for kind in (VectorPlan, TilePlan)
            }
            fastest = min(result["cublas"], plans[0][0])
            table.add_row(
                str(rows),
                *(f"{t:.2f}" for t in (result["cublas"], result["chosen"], *best.values())),
                f"{product.floor / fastest:.0%}",
                ", ".join(f"{short(plan)} {t:.2f}" for t, plan in plans[:2]),
            )
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    arguments = parser.parse_args()
    started, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), context) as pool:
        jobs = {
            (product, _kernel_rows(plan, rows), plan, False): None
            for rows in arguments.rows
            for product in PRODUCTS
            for plan in candidates(product, rows)
        }
        refused = compile_all(pool, list(jobs))
        print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
        torch.manual_seed(0)
        weights = {product: make_weights(product, product.copies) for product in PRODUCTS}
        results: dict[str, dict[int, dict[str, Any]]] = {p.name: {} for p in PRODUCTS}
        fastest: dict[int, dict[Product, LinearPlan | None]] = {}
        cases = {}
        for rows in arguments.rows:
            cases[rows] = {p: Case(p, rows, weights[p]) for p in PRODUCTS}
            for product, case in cases[rows].items():
                results[product.name][rows] = measure_product(case, rows, refused)
            fastest[rows] = {p: _fastest(results[p.name][rows]) for p in PRODUCTS}
        print_products(results)
        record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "products": results}
        write(record, arguments.json)
        print(f"products measured after {time.perf_counter() - started:.0f} s", flush=True)
        dependent = {
            (product, _kernel_rows(plan, rows), plan, True): None
            for rows in arguments.rows
            for product in PRODUCTS[:4]
            for plan in (
                fastest[rows][product],
                choose(rows, product.outputs, product.inputs, DTYPE),
            )
            if plan is not None
        }
        compile_all(pool, list(dependent))
    floor = NUM_LAYERS * sum(product.floor for product in PRODUCTS[:4]) / 1e3
    chains = {rows: measure_layers(cases[rows], rows, fastest[rows]) for rows in arguments.rows}
    print(f"{NUM_LAYERS} layers without attention, ms (floor {floor:.3f})")
    for rows, chain in chains.items():
        print(f"{rows:3} rows", *(f"{name} {ms:.3f}" for name, ms in chain.items()), sep="  ")
    print(f"done after {time.perf_counter() - started:.0f} s")
    write(record | {"layers_ms": chains}, arguments.json)
    wrong = [line for by_rows in results.values() for r in by_rows.values() for line in r["wrong"]]
    if wrong:
        raise SystemExit("wrong results:\n" + "\n".join(wrong))


def write(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1, default=asdict))


def _fastest(result: dict[str, Any]) -> LinearPlan | None:
    microseconds, plan = result["plans"][0]
    return plan if microseconds < result["cublas"] else None


if __name__ == "__main__":
    main()
