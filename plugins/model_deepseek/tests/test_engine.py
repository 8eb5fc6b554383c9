"""Through the whole engine DeepSeek writes the tokens of transformers; on several ranks too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nanovllm_attention_sdpa", reason="needs the plugin attention_sdpa")

import torch
import transformers

from nanovllm_core import LLM, SamplingParams
from nanovllm_kit.reference_model import ReferenceCheckpoint

SHARED = list(range(3, 67))
PROMPTS = [[5, 9, 2, 44, 17, 8, 90], [1], [7] * 40, [*SHARED, 2, 9, 80], [*SHARED, 33, 4]]
"""The last two begin alike, for four blocks."""
NEW_TOKENS = 20
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2-Lite": ("DeepseekV2ForCausalLM", {"q_lora_rank": None, "rope_parameters": YARN}),
    "V2": ("DeepseekV2ForCausalLM", {"q_lora_rank": 20, "topk_method": "group_limited_greedy"}),
    "V3": ("DeepseekV3ForCausalLM", {"q_lora_rank": 20, "rope_parameters": YARN}),
}


@pytest.fixture(scope="module", params=MODELS)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ReferenceCheckpoint:
    """A layer without a mixture and two with one; weights so large that no token is a near tie."""
    architecture, settings = MODELS[request.param]
    folder = tmp_path_factory.mktemp("deepseek")
    return ReferenceCheckpoint.save(
        folder, getattr(transformers, architecture), {**SIZES, **settings}
    )


def write(checkpoint: Path, *, twice: bool = False, **settings: Any) -> list[list[int]]:
    """What the engine writes, in steps of few tokens; `twice`: after it has written it before."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    limits = {"max_model_len": 160, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    cache = {"block_size": 16}
    with LLM(
        str(checkpoint),
        dtype="float32",
        limits=limits,
        cache=cache,
        attention="sdpa",
        **settings,
    ) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        if twice:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert sum(output.num_cached_tokens for output in outputs) >= 4 * 16
    return [output.token_ids for output in outputs]


@torch.inference_mode()
def test_the_engine_writes_the_tokens_of_transformers(reference: ReferenceCheckpoint) -> None:
    """Prompts in chunks beside others that decode, and again with prefixes that are cached."""
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(reference.logits(torch.tensor(ids))[-1].argmax()))
        expected.append(ids[len(prompt) :])
    assert write(reference.folder) == expected
    assert write(reference.folder, twice=True) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "size"), [("V2-Lite", 2), ("V2", 4), ("V3", 2)], indirect=["reference"]
)
def test_several_ranks_write_the_tokens_of_one(reference: ReferenceCheckpoint, size: int) -> None:
    """Heads and the columns of all experts are split; latent rows are whole on every rank."""
    pytest.importorskip("nanovllm_executor_parallel", reason="needs the plugin executor_parallel")
    alone = write(reference.folder)
    assert write(reference.folder, tensor_parallel_size=size) == alone
