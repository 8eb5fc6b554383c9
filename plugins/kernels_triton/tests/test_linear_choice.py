"""The choice of plans is held to what was measured on H200s: nine models, 4 to 128 rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nanovllm_kernels_triton.linear_choice import TilePlan, choose, choose_gated

FOLDER = Path(__file__).parents[3] / "benchmarks/results/h200"


def shares(file: str) -> dict[str, float]:
    """The time of what is chosen, over that of the fastest plan or of cuBLAS, by product."""
    found = {}
    for one in json.loads((FOLDER / file).read_text("utf-8"))["products"]:
        if one["product"] == "layer":
            continue
        rule = choose_gated if "gate_up" in one["product"] else choose
        plan = rule(one["rows"], one["outputs"], one["inputs"], torch.bfloat16)
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


@pytest.mark.parametrize(
    ("file", "num_products", "most", "mean"),
    [
        ("products_of_few_rows.json", 9 * 4 * 4, 1.1, 1.01),
        ("products_of_more_rows.json", 9 * 3 * 4, 1.11, 1.01),
    ],
)
def test_every_choice_is_near_the_fastest(
    file: str, num_products: int, most: float, mean: float
) -> None:
    """Within about a tenth at every product, and within a hundredth in the mean."""
    found = shares(file)
    assert len(found) == num_products, "models, products, numbers of rows"
    assert {key: share for key, share in found.items() if share > most} == {}
    assert sum(found.values()) / len(found) < mean
