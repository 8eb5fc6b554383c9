"""The choice of plans is held to what was measured on an H200: nine models, 4 to 64 rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nanovllm_kernels_triton.linear_choice import TilePlan, choose

FILE = Path(__file__).parents[3] / "benchmarks/results/h200/products_of_few_rows.json"
SIZES = {  # hidden size, inputs of o_proj, outputs of qkv, intermediate size
    "0.6B": (1024, 2048, 4096, 3072),
    "1.7B": (2048, 2048, 4096, 6144),
    "4B": (2560, 4096, 6144, 9728),
    "8B": (4096, 4096, 6144, 12288),
    "14B": (5120, 5120, 7168, 17408),
    "32B": (5120, 8192, 10240, 25600),
    "Llama-8B": (4096, 4096, 6144, 14336),
    "32B/2": (5120, 4096, 5120, 12800),
    "32B/4": (5120, 2048, 2560, 6400),
}


def shape_of(model: str, product: str) -> tuple[int, int]:
    """Outputs and inputs of a product, by its name in the file."""
    hidden, attended, qkv, intermediate = SIZES[model]
    shapes = {
        "norm + qkv": (qkv, hidden),
        "o_proj + residual": (hidden, attended),
        "norm + gate_up + silu": (2 * intermediate, hidden),
        "down + residual": (hidden, intermediate),
    }
    return shapes[product]


@pytest.fixture(scope="module")
def shares() -> dict[str, float]:
    """The time of what is chosen, over that of the fastest plan or of cuBLAS, by product."""
    found = {}
    for one in json.loads(FILE.read_text("utf-8"))["products"]:
        plan = choose(one["rows"], *shape_of(one["model"], one["product"]), torch.bfloat16)
        assert plan is None or isinstance(plan, TilePlan)
        name = "cuBLAS"
        if plan is not None:
            name = f"tile {plan.block_n}x{plan.block_k} /{plan.splits}"
            name += f" w{plan.num_warps} s{plan.num_stages}"
        times = one["microseconds"]
        assert name in times, f"{name} of {one['model']}, {one['product']} was not measured"
        key = f"{one['model']}, {one['rows']} rows, {one['product']}: {name}"
        found[key] = times[name] / min(times.values())
    return found


def test_every_choice_is_near_the_fastest(shares: dict[str, float]) -> None:
    """Within a tenth at every product, and within a hundredth in the mean."""
    assert len(shares) == len(SIZES) * 4 * 4
    assert {key: share for key, share in shares.items() if share > 1.1} == {}
    assert sum(shares.values()) / len(shares) < 1.01
