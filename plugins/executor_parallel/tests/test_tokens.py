"""Several ranks give the tokens of one, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanovllm_core import LLM, RequestOutput, SamplingParams
from nanovllm_kit.model_settings import LLAMA_LIKE
from nanovllm_kit.reference_model import ReferenceCheckpoint

pytestmark = pytest.mark.whole_gpu

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "attention": "sdpa",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
PARAMS = [
    SamplingParams(temperature=0, logprobs=3, max_tokens=16),
    SamplingParams(temperature=0.9, seed=3, max_tokens=16),
    SamplingParams(temperature=1.0, seed=4, top_k=9, logprobs=2, max_tokens=16),
    SamplingParams(temperature=1.1, seed=5, top_p=0.8, min_p=0.01, max_tokens=16),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=16),
    SamplingParams(temperature=0.7, seed=6, n=2, logit_bias={7: 2.0}, max_tokens=16),
]
PLAIN = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.9, seed=3, max_tokens=7),
]


def generate(
    model: str,
    prompts: Sequence[Any],
    num_ranks: int,
    params: Sequence[SamplingParams] = PARAMS,
    **settings: Any,
) -> list[RequestOutput]:
    """Every prompt with all of `params`, then with those alone that need no logits of others."""
    with LLM(model, tensor_parallel_size=num_ranks, **{**SETTINGS, **settings}) as llm:
        assert llm.info.device.startswith(f"{num_ranks} x ") == (num_ranks > 1)
        sums = [one for one in llm.info.choices if one.startswith("all-reduces: ")]
        assert len(sums) == (num_ranks > 1)
        asked = settings.get("executor", {}).get("options", {}).get("all_reduce")
        assert any("one-shot" in one for one in sums) == (asked in ("auto", "symmetric"))
        outputs = []
        for asked in (params, PLAIN):
            every = [prompt for prompt in prompts for _ in asked]
            outputs += llm.generate(every, [*asked] * len(prompts), use_tqdm=False)
        return outputs


def assert_same(actual: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Tokens of every sample, and log-probabilities up to the order of sums."""
    for sample, single in zip(actual, expected, strict=True):
        assert sample.token_ids == single.token_ids, (single.request_id, single.index)
        assert sample.finish_reason == single.finish_reason
        for found, right in zip(sample.logprobs or (), single.logprobs or (), strict=True):
            assert found.token_logprob == pytest.approx(right.token_logprob, abs=1e-4)
            assert dict(found.top) == pytest.approx(dict(right.top), abs=1e-4)


@pytest.fixture(scope="module")
def of_one_rank() -> list[RequestOutput]:
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")
    pytest.importorskip("nanovllm_example_constraint_choices", reason="needs that example")
    return generate("demo", DEMO_PROMPTS, 1, IN_TWO_PARTS, constraints=["choices"])


DEMO_PROMPTS = ["Write a story about a fox named Mia.", "What is 27 + 15?"]
CHOICES = {"choices": {"texts": ["yes we can", "no", "maybe so, or not"]}}
IN_TWO_PARTS = [*PARAMS, SamplingParams(temperature=1.0, seed=7, constraints=CHOICES)]
"""Steps with a constrained request wait for its masks between the model and the sampler."""


@pytest.mark.parametrize(
    ("num_ranks", "steps_ahead"), [(2, 8), pytest.param(4, 0, marks=pytest.mark.slow)]
)
def test_the_demo_model_says_the_same(
    of_one_rank: list[RequestOutput], num_ranks: int, steps_ahead: int
) -> None:
    """Of two KV heads each of four ranks has one, as a neighbour; embedding and head are tied.

    However far the engine plans ahead; one step is in the tests of other architectures.
    """
    settings = {"constraints": ["choices"], "steps_ahead": steps_ahead}
    assert_same(generate("demo", DEMO_PROMPTS, num_ranks, IN_TWO_PARTS, **settings), of_one_rank)


ON_GPUS = {"device": "cuda", "attention": "auto", "gpu_memory_utilization": 0.3}


@cache
def generate_on_one_gpu(enforce_eager: bool) -> list[RequestOutput]:
    """What every number of ranks and way of summing is compared with."""
    return generate("demo", DEMO_PROMPTS, 1, enforce_eager=enforce_eager, **ON_GPUS)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("all_reduce", ["nccl", "symmetric", "auto"])
def test_the_demo_model_says_the_same_on_gpus(
    num_ranks: int, enforce_eager: bool, all_reduce: str
) -> None:
    """Either way of summing, in captured steps and outside, with the attention chosen there."""
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA GPUs")
    settings = {
        **ON_GPUS,
        "enforce_eager": enforce_eager,
        "executor": {"name": "parallel", "options": {"all_reduce": all_reduce}},
    }
    outputs = generate("demo", DEMO_PROMPTS, num_ranks, **settings)
    assert_same(outputs, generate_on_one_gpu(enforce_eager))


MODELS = {
    "Llama, 2 ranks": ("llama", "LlamaForCausalLM", 2, {}),
    "Llama, 4 ranks": ("llama", "LlamaForCausalLM", 4, {}),
    "Llama, one KV head": ("llama", "LlamaForCausalLM", 2, {"num_key_value_heads": 1}),
    "Llama with biases, tied": (
        "llama",
        "LlamaForCausalLM",
        2,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "Qwen2, 2 ranks": ("qwen2", "Qwen2ForCausalLM", 2, {}),
    "Qwen2, 4 ranks": ("qwen2", "Qwen2ForCausalLM", 4, {}),
    "Qwen2, 3 ranks": (
        "qwen2",
        "Qwen2ForCausalLM",
        3,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.slow
def test_other_architectures_say_the_same(case: str, tmp_path: Path) -> None:
    """Of 131 ids two ranks have 66 and 65, three 44, 44 and 43; Qwen2 has biases of q, k and v.

    Four ranks have a KV head of the two between two of them.
    """
    name, architecture, num_ranks, changes = MODELS[case]
    pytest.importorskip(f"nanovllm_example_model_{name}", reason="needs that example")
    settings = {**LLAMA_LIKE, "num_hidden_layers": 2, **changes}
    ReferenceCheckpoint.save(tmp_path, getattr(transformers, architecture), settings)
    prompts = [[(7 * i + start) % 131 for i in range(start)] for start in (1, 40)]
    single = generate(str(tmp_path), prompts, 1)
    assert_same(generate(str(tmp_path), prompts, num_ranks), single)
