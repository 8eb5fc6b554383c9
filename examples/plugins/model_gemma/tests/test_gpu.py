"""On a GPU, in bfloat16 and with captured graphs: choices as good as those of transformers."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nanovllm_core import LLM, SamplingParams
from nanovllm_kit.reference_model import ReferenceCheckpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DEVICE, WINDOW, VOCAB_SIZE, COUNT = "cuda", 96, 4096, 160
FEW_BLOCKS = 150
"""Of 16 tokens: little more than the longest sequence needs in all cache groups."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 512,
    "head_dim": 256,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Gemma 2": (transformers.Gemma2ForCausalLM, {"num_hidden_layers": 4}),
    "Gemma 3": (
        transformers.Gemma3ForCausalLM,
        {"num_hidden_layers": 6, "sliding_window_pattern": 3},
    ),
}


@torch.inference_mode()
def logprobs_of(model: Any, ids: Tensor) -> Tensor:
    """What a model of transformers says of each of the last COUNT ids, in float32."""
    logits: Tensor = model(ids.to(DEVICE)[None]).logits[0, -COUNT - 1 : -1]
    all_TV = logits.float().log_softmax(dim=-1).cpu()
    return all_TV.gather(1, ids[-COUNT:, None])[:, 0]


def make_prompts() -> list[list[int]]:
    draws = Random(0)
    lengths = [1, 40, WINDOW, WINDOW + 1, 300, 700, *(draws.randint(2, 500) for _ in range(10))]
    return [[draws.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("attention", ["triton", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_as_exact_as_those_of_transformers(
    name: str, attention: str, enforce_eager: bool, tmp_path: Path
) -> None:
    """The log-probabilities of sampled tokens, far beyond the windows, are about as close to
    float32 as those of transformers in bfloat16.

    In one batch, in chunks; again behind prefix hits; and in a cache so small that requests are
    preempted. Compared are the errors that nine of ten tokens stay below: random weights make some
    choices of attention so close that a rounding decides them, and a mean square would be theirs.
    """
    pytest.importorskip(f"nanovllm_attention_{attention}")
    reference_class, layers = MODELS[name]
    sizes = {**SIZES, **layers}
    reference = ReferenceCheckpoint.save(tmp_path, reference_class, sizes, std=0.05)
    exact = reference.model.to(DEVICE)
    half = (
        reference_class.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
        .to(DEVICE)
        .eval()
    )
    params = SamplingParams(temperature=1.0, seed=1, logprobs=0, max_tokens=COUNT, ignore_eos=True)
    for num_blocks in (4000, FEW_BLOCKS):
        with LLM(
            str(tmp_path),
            device=DEVICE,
            dtype="bfloat16",
            attention=attention,
            enforce_eager=enforce_eager,
            max_model_len=1024,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            cache={"block_size": 16, "num_blocks": num_blocks},
        ) as llm:
            for _ in range(2):
                ours, theirs = [], []
                for output in llm.generate(make_prompts(), params, use_tqdm=False):
                    ids = torch.tensor([*output.prompt_token_ids, *output.token_ids])
                    right_T = logprobs_of(exact, ids)
                    assert output.logprobs is not None
                    ours.append(
                        torch.tensor([one.token_logprob for one in output.logprobs]) - right_T
                    )
                    theirs.append(logprobs_of(half, ids) - right_T)
                our, their = (torch.cat(errors).abs().quantile(0.9) for errors in (ours, theirs))
                assert our <= 1.2 * their, (our, their)
            assert (llm.stats.preemptions > 0) is (num_blocks == FEW_BLOCKS)
