"""The arithmetic of docs/moe.md is right: what its tables are made by, and what its text says."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/moe.md").read_text(encoding="utf-8")


@pytest.fixture
def tables(generator: ModuleType) -> ModuleType:
    """docs/moe_tables.py."""
    return import_module("moe_tables")


@pytest.mark.parametrize("num_tokens", [1, 4, 40])
def test_the_expected_touched_experts_are_those_of_random_choices(
    tables: ModuleType, num_tokens: int
) -> None:
    """Counted over many steps, whose tokens choose any experts with equal probability."""
    mixture = tables.Mixture("", num_experts=24, top_k=3, hidden_size=1, intermediate_size=1)
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(2000, num_tokens, mixture.num_experts, generator=generator)
    chosen = torch.zeros_like(scores).scatter_(2, scores.topk(mixture.top_k).indices, 1)
    counted = chosen.amax(1).sum(1).mean().item()
    assert mixture.touched(num_tokens) == pytest.approx(counted, rel=0.01)


def test_the_text_says_how_many_experts_four_tokens_touch(tables: ModuleType) -> None:
    """And how much longer these are read than those of one token."""
    [model] = [one for one in tables.MIXTURES if one.name == "Qwen3-30B-A3B"]
    four, one = round(model.touched(4)), round(model.touched(1))
    assert f"touch {four} experts of\n{model.name} instead of {one}" in PAGE
    assert 3 < four / one < 4, "more than three times as long"


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_both_ways_of_latent_attention_cost_the_same_at_the_number_in_the_text(
    heads: int, tables: ModuleType
) -> None:
    """With a long context and any number of heads; fewer queries are cheaper absorbed."""
    [told] = re.findall(r"which is (\d+) with DeepSeek's sizes", PAGE)
    one = tables.V2_LITE
    sizes = heads, one.nope, one.rotated, one.value, one.latent
    values = one.nope + one.value
    assert round(values * one.latent / (2 * one.latent - values)) == int(told)
    flops = runpy.run_path(str(ROOT / "examples/mla.py"))["flops"]
    for queries, absorbed_is_cheaper in ((int(told) - 1, True), (int(told) + 1, False)):
        apart, absorbed = flops(queries, 10_000_000, *sizes)
        assert (absorbed < apart) is absorbed_is_cheaper
