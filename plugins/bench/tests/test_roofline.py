"""The roofline's arithmetic, against the figures that were derived by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm_bench import throughput
from nanovllm_bench.rates import costs_on_rank, model_costs
from nanovllm_bench.roofline import (
    ModelCosts,
    Rates,
    decode_step_seconds,
    generate_floor,
    recompute,
    roofline_record,
    rows_of_steps,
)
from nanovllm_bench.throughput import Gauge
from nanovllm_bench.workloads import (
    fixed_workload,
    nano_workload,
    ragged_workload,
    recorded_workload,
)
from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import ConfigError
from nanovllm_core.interfaces.model import AttentionShape, ModelShape

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"

QWEN3_0_6B = ModelCosts(
    num_parameters=596_049_920,
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    vocab_size=151_936,
    tied_embeddings=True,
    itemsize=2,
)
H200 = Rates(copy_bytes_per_s=4.3e12, matmul_flops_per_s=989e12)
"""The copy as measured, the tensor cores as in the data sheet."""


def test_the_nano_workload_takes_3_65_seconds_at_4_3_tb_per_second() -> None:
    """13.85 TB of keys and values, 1.22 TB of weights, 0.14 s of prompts: 36,700 tok/s."""
    workload = nano_workload()
    floor = generate_floor(QWEN3_0_6B, workload.lengths, 256, H200)
    assert floor.kv_bytes == pytest.approx(13.85e12, rel=2e-3)
    assert floor.weight_bytes == pytest.approx(1.22e12, rel=2e-3)
    assert floor.prefill_seconds == pytest.approx(0.14, rel=2e-2)
    assert floor.seconds == pytest.approx(3.65, rel=2e-3)
    assert workload.num_output_tokens / floor.seconds == pytest.approx(36_700, rel=2e-3)


@pytest.mark.parametrize(
    ("batch", "prompt", "output", "rate"),
    [
        (1, 512, 512, 3_360),
        (16, 512, 512, 26_400),
        (64, 512, 512, 40_300),
        (64, 1024, 1024, 22_000),
        (16, 2048, 1024, 11_700),
    ],
)
def test_the_published_floors_of_fixed_lengths_are_those_of_decoding(
    batch: int, prompt: int, output: int, rate: float
) -> None:
    """They leave the prompts out; our floor has them too, and is up to 4 % longer."""
    lengths = fixed_workload(batch, prompt, output).lengths
    floor = generate_floor(QWEN3_0_6B, lengths, 256, H200)
    assert batch * output / floor.decode_seconds == pytest.approx(rate, rel=2e-2)
    assert floor.decode_seconds < floor.seconds < 1.04 * floor.decode_seconds


def test_fewer_rows_than_requests_need_more_steps() -> None:
    """Every step reads the weights, so waiting requests make the floor longer."""
    lengths = [(8, 5)] * 6
    together = generate_floor(QWEN3_0_6B, lengths, 6, H200)
    in_pairs = generate_floor(QWEN3_0_6B, lengths, 2, H200)
    assert (together.decode_steps, in_pairs.decode_steps) == (4, 12)
    assert in_pairs.weight_bytes == 3 * together.weight_bytes
    assert in_pairs.kv_bytes == together.kv_bytes


def test_a_window_bounds_what_a_step_reads_and_a_prompt_computes() -> None:
    """As counted one by one: step k reads min(prompt + k, window) keys, query i min(i, window)."""
    costs = replace(QWEN3_0_6B, sliding_window=6)
    per_key = costs.kv_bytes_per_token
    for prompt, output in ((1, 1), (3, 9), (5, 2), (6, 4), (20, 7)):
        floor = generate_floor(costs, [(prompt, output)], 1, H200)
        keys = sum(min(prompt + step, 6) for step in range(1, output))
        assert floor.kv_bytes == keys * per_key
    # The convention counts half a square, p * p / 2, where one by one it is p * (p + 1) / 2.
    pairs = sum(min(query, 6) for query in range(1, 101)) - 6 / 2
    per_pair = 4 * costs.num_layers * costs.num_heads * costs.head_size
    assert costs.attention_flops(100) == pairs * per_pair
    assert costs.attention_flops(5) == QWEN3_0_6B.attention_flops(5)
    assert decode_step_seconds(costs, 4, 900, H200) == decode_step_seconds(costs, 4, 6, H200)


def alternating(windows: Sequence[int | None], tp_size: int = 1) -> ModelCosts:
    """The costs of a model whose six layers have these windows in turn."""
    one = AttentionShape(num_heads=4, num_kv_heads=2, head_size=16)
    windows_of_six = itertools.islice(itertools.cycle(windows), 6)
    shape = ModelShape(
        num_layers=6,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        vocab_size=128,
        max_position=2048,
        attention_layers=tuple(replace(one, sliding_window=window) for window in windows_of_six),
    )
    module = torch.nn.Linear(1000, 100, device="meta")
    return costs_on_rank(module, shape, torch.bfloat16, tp_size)


def test_each_layer_reads_and_computes_its_own_window() -> None:
    """As the sum of two models, one for each kind of layer, that have the same weights."""
    mixed = alternating([100, 100, None])
    narrow = replace(mixed, attention=(), num_layers=4, sliding_window=100)
    wide = replace(mixed, attention=(), num_layers=2, sliding_window=None)
    assert [(one.num_layers, one.sliding_window) for one in mixed.attention] == [
        (4, 100),
        (2, None),
    ]
    lengths = [(50, 200), (900, 30)]
    of_mixed, of_narrow, of_wide = (
        generate_floor(costs, lengths, 2, H200) for costs in (mixed, narrow, wide)
    )
    assert of_mixed.kv_bytes == of_narrow.kv_bytes + of_wide.kv_bytes
    assert of_narrow.kv_bytes < of_wide.kv_bytes
    assert mixed.attention_flops(900) == narrow.attention_flops(900) + wide.attention_flops(900)
    slow = Rates(copy_bytes_per_s=1.0, matmul_flops_per_s=1e30)
    keys = 4 * 100 + 2 * 700
    of_step = decode_step_seconds(mixed, 3, 700, slow) - mixed.weight_bytes_of_step(3)
    assert of_step == 3 * keys * 2 * 2 * 16 * 2


def test_layers_of_a_rank_have_its_heads() -> None:
    half = alternating([100, 100, None], tp_size=2)
    assert [(one.num_heads, one.num_kv_heads) for one in half.attention] == [(2, 1)] * 2
    assert 2 * half.kv_bytes_per_token == alternating([100, 100, None]).kv_bytes_per_token


def test_layers_that_are_alike_need_no_list() -> None:
    """So a result file has the fields that older ones have."""
    costs = alternating([100])
    assert costs.attention == ()
    assert (costs.num_layers, costs.num_heads, costs.sliding_window) == (6, 4, 100)


def test_a_floor_of_different_layers_is_computed_again_from_its_file() -> None:
    mixed, lengths = alternating([100, 100, None]), [(50, 200), (900, 30)]
    floor = generate_floor(mixed, lengths, 2, H200)
    record = json.loads(json.dumps(roofline_record(mixed, H200, floor, 1.0)))
    assert recompute(record, lengths, 2) == floor


def test_rows_beyond_the_largest_batch_go_to_the_next_step() -> None:
    assert [*rows_of_steps([5, 1, 2, 0], 4)] == [3, 2, 1, 1, 1]
    assert [*rows_of_steps([4, 4, 1, 1], 2)] == [2] * 5
    assert [*rows_of_steps([5, 1, 1], 2)] == [2, 2, 1, 1, 1]
    assert [*rows_of_steps([0, 0], 2)] == [*rows_of_steps([], 2)] == []
    decoded = [output - 1 for _, output in nano_workload().lengths]
    for most in (1, 7, 64, 256):
        rows = [*rows_of_steps(decoded, most)]
        assert sum(rows) == sum(decoded)
        assert len(rows) == max(*decoded, -(-sum(decoded) // most)), "the fewest steps there are"


def test_the_floor_of_a_mixture_is_below_every_order_of_its_steps() -> None:
    """Where one output is far longer than the others, most steps touch the experts of one row."""
    mixture = replace(
        QWEN3_0_6B, expert_parameters=400_000_000, num_experts=128, experts_per_token=8
    )
    lengths = [(64, 33)] * 15 + [(64, 513)]
    floor = generate_floor(mixture, lengths, 16, H200)
    full, single = (mixture.weight_bytes_of_step(rows) for rows in (16, 1))
    assert floor.weight_bytes == 32 * full + 480 * single
    for most in (2, 5, 16):
        for order in itertools.islice(itertools.permutations([40, 3, 9, 9, 1, 25]), 0, 720, 37):
            taken = sum(map(mixture.weight_bytes_of_step, first_come(order, most)))
            floor = generate_floor(mixture, [(1, 1 + n) for n in order], most, H200)
            assert floor.weight_bytes <= taken


def first_come(decoded: Sequence[int], most: int) -> list[int]:
    """Rows of each step of a scheduler that admits requests in their order when a row is free."""
    waiting, running, rows = [*decoded], list[int](), []
    while waiting or running:
        while waiting and len(running) < most:
            running.append(waiting.pop(0))
        rows.append(len(running))
        running = [left - 1 for left in running if left > 1]
    return rows


def test_a_request_of_one_output_decodes_nothing() -> None:
    floor = generate_floor(QWEN3_0_6B, [(8, 1)], 1, H200)
    assert (floor.decode_steps, floor.kv_bytes, floor.decode_seconds) == (0, 0, 0.0)
    assert floor.prefill_seconds > 0


def test_a_table_of_its_own_is_not_read_in_a_step() -> None:
    sizes = {name: getattr(QWEN3_0_6B, name) for name in QWEN3_0_6B.__slots__}
    table = QWEN3_0_6B.vocab_size * QWEN3_0_6B.hidden_size
    untied = ModelCosts(
        **{**sizes, "tied_embeddings": False, "num_parameters": 596_049_920 + table}
    )
    assert untied.weight_bytes_of_step(1) == QWEN3_0_6B.weight_bytes_of_step(1)
    assert untied.layer_flops_per_token == QWEN3_0_6B.layer_flops_per_token


def test_where_arithmetic_is_slow_it_decides() -> None:
    """On a CPU a step of many rows takes its multiplications longer than its bytes."""
    slow = Rates(copy_bytes_per_s=1e13, matmul_flops_per_s=1e10)
    floor = generate_floor(QWEN3_0_6B, [(8, 9)] * 16, 16, slow)
    assert floor.decode_seconds == floor.decode_flops / 1e10


def test_a_step_that_took_no_time_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of several steps were seen at once."""
    monkeypatch.setattr(throughput, "measure_rates", lambda *_: H200)
    gauge = Gauge(torch.device("cpu"), torch.float32, QWEN3_0_6B)
    record = gauge.step_roofline(4, 100, 0.0)
    assert record["share"] is None
    assert gauge.step_roofline(4, 100, 2 * record["floor_seconds"])["share"] == pytest.approx(0.5)


def test_the_share_is_the_floor_over_the_measured_time() -> None:
    floor = generate_floor(QWEN3_0_6B, [(8, 9)], 1, H200)
    record = roofline_record(QWEN3_0_6B, H200, floor, 4 * floor.seconds)
    assert record["share"] == 0.25


@pytest.mark.parametrize("make", [lambda: nano_workload(5), lambda: fixed_workload(3, 7, 2)])
def test_a_recorded_workload_can_be_made_again(make) -> None:
    workload = make()
    record = {"workload": workload.name, "num_seqs": len(workload.prompts)}
    assert recorded_workload(record) == workload


def test_ragged_requests_have_lengths_between_the_bounds() -> None:
    workload = ragged_workload(200, 16, 64)
    assert {min(n) for n in zip(*workload.lengths, strict=True)} == {16}
    assert {max(n) for n in zip(*workload.lengths, strict=True)} == {64}
    assert recorded_workload({"workload": workload.name, "num_seqs": 200}) == workload


def test_an_unknown_workload_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'chat' is none.*'nano'"):
        recorded_workload({"workload": "chat", "num_seqs": 1})


def test_a_step_reads_the_experts_that_its_rows_touch() -> None:
    """One row its own, hundreds of rows nearly all; a token is multiplied with its own alone."""
    dense = replace(QWEN3_0_6B, num_parameters=QWEN3_0_6B.num_parameters + 1_280_000)
    mixture = replace(dense, expert_parameters=1_280_000, num_experts=128, experts_per_token=8)
    without = QWEN3_0_6B.weight_bytes_of_step(1)
    assert mixture.weight_bytes_of_step(1) == without + 2 * 80_000
    assert mixture.weight_bytes_of_step(2) == without + 2 * 155_000
    assert mixture.weight_bytes_of_step(1000) == dense.weight_bytes_of_step(1)
    assert mixture.weight_bytes_of_step(1000, touched_experts=12.8) == without + 2 * 128_000
    counted = generate_floor(mixture, [(8, 9)] * 16, 16, H200, touched_experts=12.8)
    assert counted.weight_bytes == 8 * (without + 2 * 128_000)
    added = mixture.layer_flops_per_token - QWEN3_0_6B.layer_flops_per_token
    assert added == 2 * 80_000


def costs_of(name: str, plugin: str) -> ModelCosts:
    """The costs of a configuration in `benchmarks/configs` that this plugin serves."""
    pytest.importorskip(plugin, reason=f"needs {plugin}")
    return model_costs(EngineConfig(model=str(CONFIGS / name)), torch.bfloat16)


def parameters_of_a_token(costs: ModelCosts) -> int:
    """The weights that it is multiplied with, and both tables, as models' cards count them."""
    return costs.layer_flops_per_token // 2 + 2 * costs.embedding_parameters


def test_the_costs_of_qwen3_30b_a3b_follow_from_its_plugin() -> None:
    """30.5 billion weights, of which a token reads 3.3 billion."""
    costs = costs_of("qwen3-30b-a3b", "nanovllm_model_qwen3_moe")
    assert costs.num_parameters == 30_532_122_624
    assert parameters_of_a_token(costs) == 3_353_032_704


def test_the_costs_of_deepseek_v2_lite_follow_from_its_plugin() -> None:
    """15.7 billion weights, of which a token reads 2.7 billion, or 2.4 without its embedding; it
    caches one row of 576 numbers in each layer, and prompts attend with 192 and 128."""
    costs = costs_of("deepseek-v2-lite", "nanovllm_model_deepseek")
    assert costs.num_parameters == 15_706_484_224
    assert parameters_of_a_token(costs) - costs.embedding_parameters == 2_451_435_008
    assert costs.kv_bytes_per_token == 27 * 576 * 2
    pairs = 1000 * 1000 // 2
    assert costs.attention_flops(1000) == 27 * 16 * 2 * (192 + 128) * pairs
