"""The choice of plans is held to what was measured on an H200: nine models, 4 to 64 rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nanovllm_kernels_triton.linear_choice import TilePlan, choose

FILE = Path(__file__).parents[3] / "benchmarks/results/h200/products_of_few_rows.json"


@pytest.fixture(scope="module")
def shares() -> dict[str, float]:
    """The time of what is chosen, over that of the fastest plan or of cuBLAS, by product."""
    found = {}
    for one in json.loads(FILE.read_text("utf-8"))["products"]:
        plan = choose(one["rows"], one["outputs"], one["inputs"], torch.bfloat16)
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
    assert len(shares) == 9 * 4 * 4, "models, products, numbers of rows"
    assert {key: share for key, share in shares.items() if share > 1.1} == {}
    assert sum(shares.values()) / len(shares) < 1.01
