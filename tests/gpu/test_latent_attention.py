"""A model of latent attention on a GPU: captured steps, and prompts with context in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from nanovllm_attention_triton import packed
from nanovllm_core import SamplingParams
from nanovllm_core.interfaces import absorption
from nanovllm_core.worker import latent
from tests.e2e.tiny import open_tiny
from tests.latent import install_latent, naive_logits, random_weights, write_latent

pytestmark = pytest.mark.whole_gpu

LENGTHS = (3, 40, 129, 300, 900, 511)
SIZES = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}


@pytest.mark.parametrize(
    ("attention", "scores"), [("triton", 2**26), ("triton", 2**18), ("triton", 0), ("sdpa", 0)]
)
@pytest.mark.parametrize(("block_size", "rank"), [(16, None), (256, 48)])
def test_tokens_are_those_of_the_plain_computation(
    tmp_path: Path,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    scores: int,
    block_size: int,
    rank: int | None,
) -> None:
    """Chunks beside decoding rows, prefix hits, preemption; in float32.

    Prompts attend to rows in captured steps, which are all, some or none of them.
    """
    monkeypatch.setattr(latent, "LEAST_PART", 128)
    for name, value in (("MOST_SCORES", scores), ("CONTEXT_SCORES", 0), ("TOKEN_SCORES", 1)):
        monkeypatch.setattr(absorption, name, value)
    install_latent(install)
    changes = {**SIZES, "q_lora_rank": rank, "max_position_embeddings": 1024}
    folder, config = write_latent(tmp_path / "tiny", **changes)
    draws = Random(block_size)
    prompts = [[draws.randrange(97) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[4][:600] + prompts[0])
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0)
    with open_tiny(
        folder,
        device="cuda",
        dtype="float32",
        attention=attention,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=200,
        cache={"block_size": block_size, "num_blocks": 2 * 1024 // block_size},
    ) as llm:
        assert bool(llm.info.prompt_graph_sizes) is (scores > 0)
        first, second = (
            [list(one.token_ids) for one in llm.generate(prompts, params)] for _ in range(2)
        )
    assert first == second, "behind prefix hits"
    weights = random_weights(config)
    for prompt, answer in zip(prompts, first, strict=True):
        logits = naive_logits(config, weights, torch.tensor([*prompt, *answer[:-1]]))
        assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("hopper_scores", [0, 2**60])
def test_prompts_of_true_sizes_have_the_log_probabilities_of_the_plain_computation(
    tmp_path: Path,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    hopper_scores: int,
) -> None:
    """Chunks with contexts in parts, in float16: on Hopper all by its own kernel, or none.

    Without their contexts the three long ones would be off by 2.7 and more.
    """
    monkeypatch.setattr(packed, "HOPPER_SCORES", hopper_scores)
    monkeypatch.setattr(latent, "LEAST_PART", 128)
    for name in ("MOST_SCORES", "CONTEXT_SCORES"):
        monkeypatch.setattr(absorption, name, 0)
    install_latent(install)
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    folder, config = write_latent(tmp_path / "tiny", **sizes, max_position_embeddings=1024)
    draws = Random(0)
    prompts = [[draws.randrange(97) for _ in range(length)] for length in LENGTHS]
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, logprobs=5)
    with open_tiny(
        folder,
        device="cuda",
        dtype="float16",
        attention="triton",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=200,
    ) as llm:
        outputs = llm.generate(prompts, params)
    weights = random_weights(config)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = naive_logits(config, weights, torch.tensor(prompt))[-1].log_softmax(-1)
        assert output.logprobs is not None
        for token, logprob in output.logprobs[0].top:
            assert abs(logprob - expected[token].item()) < 0.3
