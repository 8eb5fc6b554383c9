"""Through the whole engine, a mixture writes the tokens of transformers; on several ranks too."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("nanovllm_attention_sdpa", reason="needs the plugin attention_sdpa")

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM as Reference

from nanovllm_core import LLM, SamplingParams

PROMPTS = [[5, 9, 2, 44, 17, 8, 90], [1], [7] * 40, list(range(3, 99))]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with a mixture and one without; weights so large that no token is a near tie."""
    folder = tmp_path_factory.mktemp("moe")
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = Reference(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def write(checkpoint: Path, **settings: object) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    limits = {"max_model_len": 160, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    with LLM(str(checkpoint), dtype="float32", limits=limits, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.token_ids for output in outputs]


@torch.inference_mode()
def test_the_engine_writes_the_tokens_of_transformers(checkpoint: Path) -> None:
    """Prompts of which one comes in chunks, beside others that decode."""
    model = Reference.from_pretrained(checkpoint, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert write(checkpoint) == expected


def test_stacks_of_experts_are_loaded_as_transformers_saves_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    """With save_original_format=False; the dense layer stays as it is."""
    model = Reference.from_pretrained(checkpoint, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert write(tmp_path) == write(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_write_the_tokens_of_one(checkpoint: Path, size: int) -> None:
    """Experts are split by column, so a token's experts are on all ranks."""
    pytest.importorskip("nanovllm_executor_parallel", reason="needs the plugin executor_parallel")
    assert write(checkpoint, tensor_parallel_size=size) == write(checkpoint)
