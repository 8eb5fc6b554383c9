"""Mixtures of experts at the shapes of models: routing and experts beside the weights' stream.

    python plugins/kernels_triton/benchmarks/experts.py [--models 30B-A3B] [--tokens 1 256] \
        [--spread 0.6] [--plans] [--out experts.json]

In bfloat16, with dependent launch, inside CUDA graphs; each call has the weights of another layer
and other experts, so that the L2 cache does not hold them. Each result is compared with float64
before it is timed, beside the torch reference's error. The floor is the time to stream the weights
of the experts that were touched, and x and the result, or to multiply. `--plans` times candidates
of each product alone. `--spread` makes some experts likelier than others. A minute on one H200,
two with `--plans`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from nanovllm_core.api import Routing
from nanovllm_core.kernels import TorchKernels, launch_options
from nanovllm_kernels_triton.experts import (
    combine,
    few_down,
    few_gate_up,
    grouped_down,
    grouped_gate_up,
    run_experts,
    shared_memory_of,
    sort_pairs,
)
from nanovllm_kernels_triton.experts_choice import (
    ExpertsPlan,
    FewExperts,
    FewPlan,
    GroupedPlan,
    ManyExperts,
    choose_experts,
)
from nanovllm_kernels_triton.kernel_set import TritonKernels

BANDWIDTH = 4.3e12
"""Bytes per second that a copy reaches on an H200."""
MATMUL_RATE = 7.9e14
"""Operations per second, about, of a large product in bfloat16 there."""
LAYERS = 4
CALLS = 8
"""In a graph; each has experts of its own."""
CHECKED_TOKENS = 64
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
OPTIONS = launch_options(dependent_launch=True)


@dataclass(frozen=True)
class Model:
    hidden: int
    intermediate: int
    num_experts: int
    routing: Routing

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * DTYPE.itemsize


MODELS = {
    "30B-A3B": Model(2048, 768, 128, Routing(top_k=8, renormalize=True)),
    "V2-Lite": Model(2048, 1408, 64, Routing(top_k=6)),
    "30B-A3B/2": Model(2048, 384, 128, Routing(top_k=8, renormalize=True)),  # of one of two ranks
    "Mixtral": Model(4096, 14336, 8, Routing(top_k=2, renormalize=True)),
    "odd": Model(1544, 424, 60, Routing(top_k=4)),
}


class Case:
    """One model's mixture at one number of tokens: CALLS inputs and routes."""

    def __init__(
        self, model: Model, tokens: int, weights: Sequence[tuple[Tensor, Tensor]], spread: float
    ) -> None:
        self.model, self.tokens, self.weights = model, tokens, weights
        self.kernels = TritonKernels(dependent_launch=True)
        self.x = torch.randn(tokens, model.hidden, device=DEVICE).to(DTYPE)
        self.logits = [self._logits(spread) for _ in range(CALLS)]
        self.routes = [TorchKernels().route(logits, model.routing) for logits in self.logits]

    def _logits(self, spread: float) -> Tensor:
        """Normal numbers, on others of the deviation `spread` that all tokens share."""
        own = torch.randn(self.tokens, self.model.num_experts, device=DEVICE)
        return (own + spread * torch.randn(self.model.num_experts, device=DEVICE)).to(DTYPE)

    @property
    def plan(self) -> ExpertsPlan:
        return choose_experts(
            self.tokens,
            self.model.routing.top_k,
            self.model.num_experts,
            self.model.hidden,
            self.model.intermediate,
            DTYPE.itemsize,
            shared_memory_of(DEVICE),
        )

    def touched(self) -> float:
        """Experts that one call reads, on average over the calls."""
        return sum(len(ids.unique()) for _, ids in self.routes) / CALLS

    def floor(self, parts: int = 3) -> float:
        """Microseconds for so many of an expert's three matrices, of equal size."""
        share = parts / 3
        rows = 2 * self.tokens * self.model.hidden * DTYPE.itemsize
        size = self.touched() * self.model.expert_bytes + rows
        pairs = self.tokens * self.model.routing.top_k
        operations = 2 * pairs * self.model.expert_bytes / DTYPE.itemsize
        return max(size / BANDWIDTH, operations / MATMUL_RATE) * share * 1e6

    def route(self, call: int) -> object:
        return self.kernels.route(self.logits[call], self.model.routing)

    def experts(self, call: int, plan: ExpertsPlan | None = None) -> Tensor:
        inputs = (self.x, *self.routes[call], *self.weights[call % LAYERS])
        return run_experts(*inputs, OPTIONS, plan)

    def routed(self, call: int, plan: ExpertsPlan | None = None) -> Tensor:
        route = self.kernels.route(self.logits[call], self.model.routing)
        return run_experts(self.x, *route, *self.weights[call % LAYERS], OPTIONS, plan)

    def parts(self, plan: ExpertsPlan) -> dict[str, Callable[[int], object]]:
        """Each kernel alone, as the plan launches it."""
        _, ids = zip(*self.routes, strict=True)
        if isinstance(plan, FewExperts):
            hidden = few_gate_up(plan.gate_up, self.x, ids[0], self.weights[0][0], OPTIONS)
            return {
                "gate_up": partial(self._few_gate_up, plan.gate_up),
                "down": partial(self._few_down, plan.down, hidden),
            }
        orders = [self._sort(plan.gate_up.block_m, call) for call in range(CALLS)]
        hidden = grouped_gate_up(plan.gate_up, self.x, orders[0], self.weights[0][0], OPTIONS)
        result = grouped_down(plan.down, hidden, orders[0], self.weights[0][1], OPTIONS)
        return {
            "sort": partial(self._sort, plan.gate_up.block_m),
            "gate_up": lambda call: grouped_gate_up(
                plan.gate_up, self.x, orders[call], self.weights[call % LAYERS][0], OPTIONS
            ),
            "down": lambda call: grouped_down(
                plan.down, hidden, orders[call], self.weights[call % LAYERS][1], OPTIONS
            ),
            "combine": lambda call: combine(result, orders[call], self.routes[call][0], OPTIONS),
        }

    def _few_gate_up(self, plan: FewPlan, call: int) -> Tensor:
        weight = self.weights[call % LAYERS][0]
        return few_gate_up(plan, self.x, self.routes[call][1], weight, OPTIONS)

    def _few_down(self, plan: FewPlan, hidden: Tensor, call: int) -> Tensor:
        weight = self.weights[call % LAYERS][1]
        return few_down(plan, hidden, *self.routes[call], weight, OPTIONS)

    def _sort(self, block_m: int, call: int) -> Any:
        return sort_pairs(self.routes[call][1], self.model.num_experts, block_m, OPTIONS)

    def errors(self) -> dict[str, float]:
        """Relative errors of some tokens against float64; two calls and two routes agree.

        Raises AssertionError where they do not.
        """
        result = self.experts(0)
        if not torch.equal(result, self.experts(0)):
            raise AssertionError("two calls differ")
        weights, ids = self.kernels.route(self.logits[0], self.model.routing)
        if not torch.equal(ids, self.routes[0][1]):
            raise AssertionError("the route differs from the torch reference")
        torch.testing.assert_close(weights, self.routes[0][0], rtol=2e-5, atol=1e-7)
        rows = torch.randperm(self.tokens, device=DEVICE)[:CHECKED_TOKENS]
        some = (self.x[rows], *(part[rows] for part in self.routes[0]), *self.weights[0])
        exact = exact_experts(*some)
        of = {"triton": result[rows], "torch": TorchKernels().experts(*some)}
        errors = {k: float((y.double() - exact).norm() / exact.norm()) for k, y in of.items()}
        if not errors["triton"] <= 1.1 * errors["torch"] + 1e-3:
            raise AssertionError(f"errors against float64: {errors}")
        return errors


def exact_experts(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """In float64, with the roundings that `KernelSet.experts` promises before the sum."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert in ids.unique().tolist():
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        both = (x[tokens].double() @ gate_up[expert].double().t()).to(DTYPE).double()
        gate, up = both.chunk(2, dim=-1)
        y = (silu(gate) * up).to(DTYPE).double() @ down[expert].double().t()
        out.index_add_(0, tokens, y * weights[tokens, places].double().unsqueeze(-1))
    return out


AT_ONCE = 1 << 20
"""As `FewPlan.signal`: the next kernel starts as soon as all programs of this one run."""


def few_candidates(chosen: FewExperts) -> Iterator[FewExperts]:
    """Other sizes of tiles; sums that stay apart; programs of both kernels side by side."""

    def both(*, apart: bool = True, of: FewExperts = chosen, **changes: int) -> FewExperts:
        def changed(plan: FewPlan) -> FewPlan:
            lanes = plan.block_k // 8 if apart else 1  # one of each thread: 16 bytes are 8 numbers
            return replace(plan, **{"lanes": lanes, **changes})

        down = changed(of.down)
        return FewExperts(replace(changed(of.gate_up), ahead=0), down)

    low, high = FewPlan(8, 1024, ahead=4), FewPlan(16, 512, ahead=4)
    yield both()
    yield both(signal=AT_ONCE)
    for pair in (FewExperts(low, low), FewExperts(high, low), FewExperts(high, high)):
        yield both(of=pair, apart=False)
        yield both(of=pair)
        yield both(of=pair, num_stages=4, signal=AT_ONCE)  # four programs fit: two of each kernel
    for ahead in (0, 2, 8):
        yield both(of=FewExperts(high, low), num_stages=4, signal=AT_ONCE, ahead=ahead)
    # One program of each kernel on a multiprocessor.
    large = FewPlan(16, 1024, num_warps=8, num_stages=5, per_processor=1)
    for down in (replace(high, per_processor=1), replace(high, per_processor=1, num_warps=8)):
        yield both(of=FewExperts(large, down), signal=AT_ONCE)
        yield both(of=FewExperts(large, down), signal=AT_ONCE, ahead=8)
    yield both(of=FewExperts(FewPlan(32, 256), low))
    yield both(of=FewExperts(replace(high, num_stages=5, per_processor=3), low))
    yield both(of=FewExperts(high, FewPlan(8, 512, num_stages=10, ahead=4)))


def grouped_candidates(block_m: int) -> Iterator[GroupedPlan]:
    """Tiles by pointers and by descriptors; see `GroupedPlan.described`."""
    of_height: dict[int, list[tuple[int, int, int, int, int]]] = {
        64: [(128, 128, 8, 4, 1), (128, 64, 4, 4, 2), (256, 64, 8, 4, 1)],
        128: [(256, 64, 8, 3, 1), (256, 64, 8, 4, 1), (256, 128, 8, 2, 1), (128, 64, 4, 3, 2)],
    }
    low = [(128, 64, 4, 5, 2), (128, 128, 4, 3, 2), (256, 128, 8, 3, 1)]
    for shape in of_height.get(block_m, low):
        yield GroupedPlan(block_m, *shape)
        if block_m >= 64:
            yield GroupedPlan(block_m, *shape, described=True)


def plans_of(case: Case, with_plans: bool) -> list[ExpertsPlan]:
    """The chosen plan first; then the candidates."""
    chosen = case.plan
    if not with_plans:
        return [chosen]
    if isinstance(chosen, FewExperts):
        sorted_pairs = (ManyExperts(plan, plan) for plan in grouped_candidates(16))
        return [chosen, *few_candidates(chosen), *sorted_pairs]
    block_m = chosen.gate_up.block_m
    sizes = {block_m, max(block_m // 2, 16), min(2 * block_m, 128)}
    return [
        chosen,
        *(ManyExperts(plan, plan) for size in sorted(sizes) for plan in grouped_candidates(size)),
    ]


def measure(call: Callable[[int], object]) -> float:
    """Microseconds per call, captured: the least of three means."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(index)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = math.inf
    for _ in range(3):
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / (3 * CALLS))
    graph.reset()
    return best


def measure_case(name: str, case: Case, with_plans: bool) -> dict[str, Any]:
    """Print and return the errors, the times, and where asked those of candidates."""
    errors, floor, touched = case.errors(), case.floor(), case.touched()
    calls = {"experts": case.experts, "route + experts": case.routed, "route": case.route}
    times = {part: measure(call) for part, call in (calls | case.parts(case.plan)).items()}
    size = touched * case.model.expert_bytes
    operations = (
        2 * case.tokens * case.model.routing.top_k * case.model.expert_bytes / DTYPE.itemsize
    )
    rates = (
        f"{size / times['experts'] / 1e6:5.2f} TB/s  {operations / times['experts'] / 1e6:5.0f} TF"
    )
    print(
        f"{name:9} {case.tokens:5} tokens  {touched:5.1f} experts {size / 1e6:6.0f} MB  "
        f"floor {floor:7.1f}  experts {times['experts']:7.1f} ({floor / times['experts']:.0%})  "
        f"{rates}  error {errors['triton']:.2e} (torch {errors['torch']:.2e})  "
        + "  ".join(f"{part} {time:.1f}" for part, time in times.items() if part != "experts"),
        flush=True,
    )
    record = {
        "model": name, "tokens": case.tokens, "touched": touched, "bytes": size, "floor": floor,
        "errors": errors, "microseconds": times, "plan": str(case.plan),
    }  # fmt: skip
    if with_plans:
        record["plans"] = measure_plans(case)
    return record


def measure_plans(case: Case) -> list[dict[str, Any]]:
    """Microseconds of both products by each candidate, and of all behind the router, as in a layer.

    Without it, programs of two kernels of few pairs side by side were the fastest; with it, they
    were the slowest. The fastest are printed.

    Raises AssertionError where a candidate's results differ from those of the chosen plan.
    """
    lines: list[dict[str, Any]] = []
    expected = [case.experts(call) for call in range(CALLS)]
    for plan in plans_of(case, True):
        of_plan = {"gate_up plan": str(plan.gate_up), "down plan": str(plan.down)}
        try:
            results = [case.experts(call, plan) for call in range(CALLS)]
            of_part = case.parts(plan)
            times = {part: measure(of_part[part]) for part in ("gate_up", "down")}
            times["all"] = measure(partial(case.routed, plan=plan))
        except Exception as error:  # one that does not fit this GPU
            lines.append({**of_plan, "error": f"{type(error).__name__}: {error}"[:200]})
            continue
        lines.append(of_plan | times)
        for result, other in zip(results, expected, strict=True):
            distance = float((result.double() - other.double()).norm() / other.double().norm())
            assert distance < 5e-3, f"{plan}: {distance:.1e} from the results of the chosen plan"
    for part in ("gate_up", "down", "all"):
        best = sorted((line for line in lines if part in line), key=lambda line: line[part])
        for line in best[:3]:
            plans = [line[f"{of} plan"] for of in ("gate_up", "down") if part in (of, "all")]
            print(f"    {part:8} {line[part]:7.1f}  {'  '.join(plans)}")
    return lines


def compile_all(cases: Sequence[Case], with_plans: bool) -> None:
    """By threads, in a capture that is thrown away: kernels of an earlier model would run there."""
    graph = torch.cuda.CUDAGraph()
    with (
        warnings.catch_warnings(),
        TritonKernels().compile_ahead(),
        torch.cuda.graph(graph, capture_error_mode="relaxed"),
    ):
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # of the first model
        for case in cases:
            case.routed(0)
            for plan in plans_of(case, with_plans):
                for call in case.parts(plan).values():
                    call(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 16384])
    parser.add_argument(
        "--spread", type=float, default=0.0, help="of experts; 0: all are as likely"
    )
    parser.add_argument("--plans", action="store_true", help="time candidates of each product")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lines, started = [], time.perf_counter()
    for name in arguments.models:
        model = MODELS[name]
        weights = [make_weights(model) for _ in range(LAYERS)]
        cases = [Case(model, tokens, weights, arguments.spread) for tokens in arguments.tokens]
        compile_all(cases, arguments.plans)
        print(f"{name}: compiled after {time.perf_counter() - started:.0f} s", flush=True)
        lines += [measure_case(name, case, arguments.plans) for case in cases]
        del weights, cases
        torch.cuda.empty_cache()
    print(f"done after {time.perf_counter() - started:.0f} s")
    if arguments.out is not None:
        record = {"gpu": torch.cuda.get_device_name(), "experts": lines}
        arguments.out.write_text(json.dumps(record, indent=1))


def make_weights(model: Model) -> tuple[Tensor, Tensor]:
    gate_up = (model.num_experts, 2 * model.intermediate, model.hidden)
    down = (model.num_experts, model.hidden, model.intermediate)
    return (
        torch.randn(gate_up, device=DEVICE, dtype=DTYPE) * model.hidden**-0.5,
        torch.randn(down, device=DEVICE, dtype=DTYPE) * model.intermediate**-0.5,
    )


if __name__ == "__main__":
    main()
