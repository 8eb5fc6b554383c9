"""The runner's logits at every bucket are no worse than transformers' own in the same dtype."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nanovllm_core.worker.graphs import StepKey
from tests.gpu.conftest import WIDTHS, Machine

LENGTH, COMPUTED, NUM_PROMPTS = 64, 24, 256
DECODED = LENGTH - COMPUTED - 1


def transformers_logits(made: Machine, ids_SL: Tensor, dtype: torch.dtype) -> Tensor:
    """What Qwen3ForCausalLM computes from the same weights, for the decoded positions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = made.runner.model
    shape = config.shape
    source = cast(Any, config.module)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=source.model.layers[0].mlp.down_proj.weight.shape[1],
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_size,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000},
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )
    model = model.to("cuda", dtype).eval()
    target = dict(model.named_parameters())
    q, kv = (n * shape.head_size for n in (shape.num_heads, shape.num_kv_heads))
    for name, weight in source.named_parameters():
        if name.endswith("qkv_proj.weight"):
            parts = zip("qkv", weight.split([q, kv, kv]), strict=True)
            for letter, part in parts:
                target[name.replace("qkv_proj", f"{letter}_proj")].data.copy_(part)
        elif name.endswith("gate_up_proj.weight"):
            for letter, part in zip(("gate", "up"), weight.chunk(2), strict=True):
                target[name.replace("gate_up_proj", f"{letter}_proj")].data.copy_(part)
        elif name in target:
            target[name].data.copy_(weight)
    with torch.inference_mode():
        chunks = [model(part).logits[:, COMPUTED : LENGTH - 1] for part in ids_SL.split(32)]
    return torch.cat(chunks).float()


def runner_errors(made: Machine, ids_SL: Tensor, exact_SLV: Tensor, bucket: int) -> float:
    """RMS error of teacher-forced decode steps at one bucket over (about) 10,000 rows."""
    rows_wanted = 1024 if bucket < 8 else 10_000
    runner, graphs = made.runner, made.runner._graphs
    assert graphs is not None
    squares, count = 0.0, 0
    first = 0
    while count < rows_wanted:
        chosen = [(first + i) % NUM_PROMPTS for i in range(bucket)]
        first += bucket
        made.prefill([ids_SL[i].tolist() for i in chosen], computed=COMPUTED)
        made.activate(bucket)
        forced = ids_SL[torch.tensor(chosen)].int()
        for step in range(DECODED):
            runner.tables.token_ids[:bucket, :LENGTH] = forced
            graphs.replay(StepKey.decode(bucket))
            error = runner.sampling.logits[:bucket].float() - exact_SLV[torch.tensor(chosen), step]
            squares += float(error.square().sum())
            count += bucket
        runner.sampling.results.reset()
    return (squares / (count * exact_SLV.shape[-1])) ** 0.5


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("width", list(WIDTHS))
def test_logits_are_as_exact_as_transformers_at_every_bucket(
    machine: Callable[..., Machine], width: str, backend: str
) -> None:
    """bf16, four layers: RMS error against fp32 at most 1.1 x that of transformers in bf16."""
    rng = random.Random(0)
    ids = [[rng.randrange(4096) for _ in range(LENGTH)] for _ in range(NUM_PROMPTS)]
    ids_SL = torch.tensor(ids, device="cuda")
    made = machine(
        width, attention=backend, max_num_seqs=256, max_model_len=256,
        **{"cache.num_blocks": 256 * 17, "cache.block_size": 16},
    )  # fmt: skip
    exact_SLV = transformers_logits(made, ids_SL, torch.float32)
    theirs = transformers_logits(made, ids_SL, torch.bfloat16) - exact_SLV
    their_rms = float(theirs.square().mean().sqrt())
    buckets = made.runner.bucket_sizes if backend == "triton" else (1, 4, 64, 256)
    worst = {bucket: runner_errors(made, ids_SL, exact_SLV, bucket) for bucket in buckets}
    too_large = {bucket: rms / their_rms for bucket, rms in worst.items() if rms > 1.1 * their_rms}
    assert not too_large, f"ratios to transformers' own RMS error {their_rms:.2e}: {too_large}"
