"""A model of latent attention through the whole engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from nanovllm_core import SamplingParams

from ..latent import install_latent, naive_logits, random_weights, write_latent
from .tiny import open_tiny

Install = Callable[..., None]

for plugin in ("attention_sdpa",):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

COUNT = 16
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.0)


@pytest.mark.parametrize(("steps_ahead", "part", "rank"), [(0, 4096, None), (1, 16, 20)])
def test_tokens_are_those_of_the_plain_computation(
    tmp_path: Path,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    steps_ahead: int,
    part: int,
    rank: int | None,
) -> None:
    """Prompts in chunks beside decoding rows, with prefix hits, and with context in many parts.

    The cache is too small for the batch, so that rows are preempted.
    """
    monkeypatch.setattr("nanovllm_core.worker.latent.LEAST_PART", part)
    install_latent(install)
    folder, config = write_latent(tmp_path / "tiny", q_lora_rank=rank)
    draws = Random(part)
    lengths = (3, 33, 17, 150, 200, 90)
    prompts = [[draws.randrange(97) for _ in range(length)] for length in lengths]
    prompts += [prompts[4][:120] + prompts[0], prompts[4]]
    with open_tiny(
        folder,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        steps_ahead=steps_ahead,
        cache={"block_size": 16, "num_blocks": 30},
    ) as llm:
        first, second = (
            [list(one.token_ids) for one in llm.generate(prompts, PARAMS)] for _ in range(2)
        )
    assert first == second, "behind prefix hits"
    weights = random_weights(config)
    for prompt, answer in zip(prompts, first, strict=True):
        logits = naive_logits(config, weights, torch.tensor([*prompt, *answer[:-1]]))
        assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()
