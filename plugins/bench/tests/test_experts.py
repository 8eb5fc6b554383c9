"""The experts that decode steps touch are counted, and the floor of a result follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nanovllm_attention_sdpa", reason="needs the plugin attention_sdpa")
pytest.importorskip("nanovllm_model_qwen3_moe", reason="needs the plugin model_qwen3_moe")

import torch
from torch import Tensor
from transformers import DeepseekV2Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from nanovllm_bench import experts
from nanovllm_bench.experts import TouchedExperts, count_touched_experts
from nanovllm_bench.rates import model_costs
from nanovllm_bench.roofline import Rates, generate_floor, recompute, roofline_record
from nanovllm_bench.workloads import Workload, fixed_workload
from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import Routing
from nanovllm_core.cli.main import make_app
from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import OutOfMemoryError
from nanovllm_core.layers import PlainMatrix

LAYERS, NUM_EXPERTS, CHOSEN = 2, 8, 3
"""Of those that have a mixture."""
PROMPTS = [list(range(first, first + 8)) for first in (1, 20, 50)]
OUTPUT = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with a mixture and one without; weights so large that no token is a near tie."""
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=CHOSEN,
        mlp_only_layers=[1],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("moe")
    model.save_pretrained(folder)
    return folder


def config_of(checkpoint: Path, **settings: Any) -> EngineConfig:
    limits = {"max_model_len": 64, "max_num_seqs": 4} | settings.pop("limits", {})
    return EngineConfig.model_validate(
        {"model": str(checkpoint), "device": "cpu", "dtype": "float32", "limits": limits} | settings
    )


@torch.inference_mode()
def expected_histogram(checkpoint: Path, config: EngineConfig) -> list[int]:
    """From the router logits of transformers, at the tokens that each decode step reads."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM.from_config(config) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chosen = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        logits = model(ids, output_router_logits=True).router_logits
        chosen.append([one.topk(CHOSEN).indices for one in logits])
    histogram = [0] * (NUM_EXPERTS + 1)
    for step in range(len(PROMPTS[0]), len(PROMPTS[0]) + OUTPUT - 1):
        for layer in range(LAYERS):
            histogram[len(torch.cat([one[layer][step] for one in chosen]).unique())] += 1
    return histogram


def test_what_is_counted_is_what_transformers_routes(checkpoint: Path) -> None:
    """Of three sequences, in the five steps that only decode."""
    config = config_of(checkpoint)
    workload = Workload("three", PROMPTS, [OUTPUT] * 3)
    touched = count_touched_experts(config, workload, temperature=0)
    assert touched.decode_steps == OUTPUT - 1
    assert touched.histogram == expected_histogram(checkpoint, config)
    assert sum(touched.histogram) == LAYERS * touched.decode_steps
    assert sum(touched.histogram[CHOSEN + 1 :]) > 0, "three tokens with the same experts"


def test_experts_are_counted_where_no_router_is_called(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many, by a set that computes a mixture at once."""
    calls: list[int] = []

    def norm_experts(
        router: PlainMatrix, x: Tensor, norm: Tensor, eps: float, routing: Routing,
        bias: Tensor | None, gate_up: Tensor, down: Tensor, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        calls.append(len(x))
        normed = router.kernels.rms_norm(x, norm, eps)
        chosen = router.kernels.route(router.linear(normed), routing, bias)
        stacks = (gate_up, down, routing.num_shared)
        return router.kernels.experts(normed, *chosen, *stacks, residual)

    config, workload = config_of(checkpoint), Workload("three", PROMPTS, [OUTPUT] * 3)
    expected = count_touched_experts(config, workload, temperature=0)
    monkeypatch.setattr(PlainMatrix, "norm_experts", norm_experts)
    assert count_touched_experts(config, workload, temperature=0) == expected
    assert len(calls) >= LAYERS * (OUTPUT - 1)


def test_padding_and_prompts_are_not_counted(checkpoint: Path) -> None:
    """One sequence touches its own experts, beside padding and behind a prompt in chunks."""
    config = config_of(
        checkpoint,
        cuda_graphs={"sizes": [4]},
        limits={"max_num_batched_tokens": 12},
        steps_ahead=2,
        engine_client="thread",
    )
    touched = count_touched_experts(config, fixed_workload(1, 40, OUTPUT), temperature=0.6)
    alone = [0] * (NUM_EXPERTS + 1)
    alone[CHOSEN] = LAYERS * (OUTPUT - 1)
    assert touched.histogram == alone
    assert touched.mean == CHOSEN


def test_prompts_beside_decoding_rows_leave_a_step_out(checkpoint: Path) -> None:
    """Of two requests, where there is room for one at a time, and of chunks beside a row."""
    workload = Workload("uneven", [PROMPTS[0], [*range(2, 32)]], [10, 4])
    config = config_of(checkpoint, limits={"max_num_batched_tokens": 14})
    touched = count_touched_experts(config, workload, temperature=0)
    # The first prompt and 6 tokens of the second, 13 and 11 beside a row, then 3 and 4 steps.
    assert touched.decode_steps == 7
    assert sum(touched.histogram) == LAYERS * 7


def test_a_request_of_one_token_has_no_step_to_count(checkpoint: Path) -> None:
    touched = count_touched_experts(config_of(checkpoint), fixed_workload(2, 8, 1), temperature=0)
    assert (touched.decode_steps, touched.mean) == (0, None)


def bench(checkpoint: Path, out: Path, *settings: str) -> str:
    size = ("--num-seqs", "2", "--input-len", "8", "--output-len", "4", "--runs", "1")
    run = ["bench", "throughput", "--model", str(checkpoint), "--device", "cpu", "--out", str(out)]
    result = CliRunner().invoke(make_app(), [*run, "--max-model-len", "64", *size, *settings])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_result_has_the_histogram_and_the_floor_that_follows_from_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Where the floor can be computed again from the file; with random weights too."""
    output = bench(checkpoint, tmp_path / "out.json", "--load-format", "dummy")
    record = json.loads((tmp_path / "out.json").read_text())
    touched, roofline = record["touched_experts"], record["roofline"]
    assert touched["decode_steps"] == 3
    assert sum(touched["histogram"]) == LAYERS * 3
    mean = sum(k * count for k, count in enumerate(touched["histogram"])) / (LAYERS * 3)
    assert roofline["touched_experts"] == pytest.approx(mean)
    assert f"touches {mean:.1f} of {NUM_EXPERTS}" in output
    lengths = [(8, 4)] * 2
    floor = recompute(roofline, lengths, record["max_num_seqs"])
    assert roofline["floor"]["weight_bytes"] == floor.weight_bytes
    even = recompute({**roofline, "touched_experts": None}, lengths, record["max_num_seqs"])
    assert floor.weight_bytes != even.weight_bytes
    assert roofline["share"] == pytest.approx(floor.seconds / record["seconds"][0], abs=1e-3)


def test_the_experts_of_several_engines_are_those_that_the_requests_of_one_touch(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every engine has half of the rows, which touch fewer experts."""
    counted: list[Workload] = []

    def count(_config: EngineConfig, workload: Workload, _temperature: float) -> TouchedExperts:
        counted.append(workload)
        return TouchedExperts(1, [0, 0, 0, 0, 1])

    monkeypatch.setattr(experts, "count_touched_experts", count)
    config, workload = config_of(checkpoint), Workload("three", PROMPTS, [OUTPUT] * 3)
    costs, rates = model_costs(config, torch.float32), Rates(1e10, 1e12)
    floor = generate_floor(costs, workload.lengths[::2], 4, rates, 4.0)
    record = {
        "temperature": 0.0,
        "max_num_seqs": 4,
        "seconds": [1.0],
        "roofline": roofline_record(costs, rates, floor, 1.0, num_engines=2),
    }
    roofline = experts.with_touched_experts(record, config, workload)["roofline"]
    assert [one.prompts for one in counted] == [PROMPTS[::2]]
    assert (roofline["num_engines"], roofline["floor_seconds"]) == (2, round(floor.seconds, 6))


def test_experts_that_all_tokens_share_are_not_counted(tmp_path: Path) -> None:
    """The floor reads them in every step, as it reads dense layers."""
    pytest.importorskip("nanovllm_model_deepseek", reason="needs the plugin model_deepseek")
    config = DeepseekV2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        n_routed_experts=NUM_EXPERTS,
        n_shared_experts=2,
        num_experts_per_tok=CHOSEN,
        topk_method="greedy",
        first_k_dense_replace=1,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=256,
        architectures=["DeepseekV2ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    engine_config = config_of(tmp_path, load_format="dummy")
    touched = count_touched_experts(engine_config, fixed_workload(1, 8, OUTPUT), temperature=0)
    alone = [0] * (NUM_EXPERTS + 1)
    alone[CHOSEN] = LAYERS * (OUTPUT - 1)
    assert touched.histogram == alone


def test_a_throughput_is_kept_where_experts_cannot_be_counted(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result says so, and its floor assumes an even choice."""

    def fail(*_: object) -> None:
        raise OutOfMemoryError("no room on cuda:0 for the model")

    monkeypatch.setattr(experts, "count_touched_experts", fail)
    output = bench(checkpoint, tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["touched_experts"] == {"not_counted": "no room on cuda:0 for the model"}
    assert "touched_experts" not in record["roofline"]
    assert "not counted: no room on cuda:0" in output
