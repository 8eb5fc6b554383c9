"""Latent attention: the layer beside keys and values computed for the whole sequence in float64."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.layers import LatentAttention
from nanovllm_kit.latent_model import LatentForCausalLM
from nanovllm_kit.numerics import assert_close_report
from nanovllm_kit.ranks import SimulatedRank, run_ranks
from nanovllm_kit.reference_model import load_model, run_model

from ..latent import naive_logits, random_weights, write_latent


def drawn_changes(seed: int) -> dict[str, Any]:
    """Sizes that differ from one another, with and without compressed queries."""
    draws = Random(seed)
    return {
        "num_attention_heads": draws.choice([1, 2, 3, 5]),
        "q_lora_rank": None if seed % 2 else draws.choice([20, 33]),
        "kv_lora_rank": draws.choice([9, 24, 40]),
        "qk_nope_head_dim": draws.choice([5, 16]),
        "qk_rope_head_dim": draws.choice([2, 6, 16]),
        "v_head_dim": draws.choice([7, 16, 20]),
    }


def drawn_ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
def test_logits_are_those_of_the_plain_computation(seed: int, tmp_path: Path) -> None:
    """Whole and in chunks, from weights under DeepSeek's names."""
    folder, config = write_latent(tmp_path, **drawn_changes(seed))
    ids_T = drawn_ids(30)
    expected = naive_logits(config, random_weights(config), ids_T)
    model = load_model(LatentForCausalLM, folder, config)
    for chunks in (None, [7, 1, 20, 2]):
        assert_close_report(run_model(model, ids_T, chunks).double(), expected, rel_norm=1e-5)


def test_rows_may_begin_at_an_odd_number(tmp_path: Path) -> None:
    """Behind a compressed query, where a runtime passes a part of the product."""
    folder, config = write_latent(tmp_path, q_lora_rank=33)
    model = load_model(LatentForCausalLM, folder, config)
    [layer, _] = [one for one in model.modules() if isinstance(one, LatentAttention)]
    rows_KR = torch.randn(5, 33 + 32)[:, 33:]
    for apart, whole in zip(
        layer.expand_rows(rows_KR), layer.expand_rows(rows_KR.contiguous()), strict=True
    ):
        torch.testing.assert_close(apart, whole)


@pytest.mark.parametrize("nope", [12, 13], ids=["whole words", "an odd number"])
def test_an_absorbed_query_scores_a_row_as_the_query_scores_its_key(
    nope: int, tmp_path: Path
) -> None:
    """And attention to rows, expanded, is attention to values."""
    folder, config = write_latent(tmp_path, qk_nope_head_dim=nope)
    model = load_model(LatentForCausalLM, folder, config)
    [layer, _] = [one for one in model.modules() if isinstance(one, LatentAttention)]
    generator = torch.Generator().manual_seed(0)
    q_THD, rows_KR = (torch.randn(s, generator=generator) for s in ((3, 4, nope + 8), (5, 32)))
    k_KHD, v_KHV = layer.expand_rows(rows_KR)
    scores_THK = torch.einsum("thd,khd->thk", q_THD, k_KHD)
    absorbed_THR = layer.absorb(q_THD)
    assert absorbed_THR.is_contiguous()
    assert_close_report(absorbed_THR @ rows_KR.T, scores_THK, rel_norm=1e-5)
    weights_THK = scores_THK.softmax(-1)
    expanded_THV = layer.expand_output(weights_THK @ rows_KR[:, :24])
    expected_THV = torch.einsum("thk,khv->thv", weights_THK, v_KHV)
    assert_close_report(expanded_THV, expected_THV, rel_norm=1e-5)


@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_heads_and_hold_every_row_whole(
    size: int, q_lora_rank: int | None, tmp_path: Path
) -> None:
    """Each gives the logits of one rank."""
    folder, config = write_latent(tmp_path, q_lora_rank=q_lora_rank)
    ids_T = drawn_ids(12)
    whole = load_model(LatentForCausalLM, folder, config)
    expected = run_model(whole, ids_T)

    def on_rank(tp: SimulatedRank) -> Tensor:
        model = load_model(LatentForCausalLM, folder, config, tp=tp)
        layers = [one for one in model.modules() if isinstance(one, LatentAttention)]
        assert {one.shape for one in layers} == {layers[0].config.shape.on_rank(size)}
        return run_model(model, ids_T, [5, 7])

    for actual in run_ranks(size, on_rank):
        assert_close_report(actual, expected, rel_norm=1e-5)
