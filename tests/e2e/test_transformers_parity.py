"""The engine against transformers: the same checkpoint, the same tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from nanovllm_core import LLM, SamplingParams

from .tiny import VOCAB_SIZE

NUM_DEMO_PROMPTS = 200
PROMPTS = [[(7 * i + start) % VOCAB_SIZE for i in range(start)] for start in (1, 9, 16, 40, 65)]


@pytest.fixture(scope="module")
def peer(tiny: Path) -> Any:
    """The tiny checkpoint as transformers loads it."""
    return Qwen3ForCausalLM.from_pretrained(tiny, dtype=torch.float32)


def generate(model: Any, prompts: Sequence[list[int]], count: int, **options: Any) -> Tensor:
    """The new ids [B, count] of prompts of one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out: Tensor = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
            **options,
        )
    return out[:, width:]


def test_greedy_answers_to_200_demo_prompts_are_those_of_transformers(demo: LLM) -> None:
    """Every sixth question of the held-out set, all tasks, through chat template and engine."""
    folder = demo.tokenizer.folder
    lines = (folder / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    step = len(lines) // NUM_DEMO_PROMPTS
    conversations = [json.loads(line)["messages"] for line in lines[::step]][:NUM_DEMO_PROMPTS]
    assert len(conversations) == NUM_DEMO_PROMPTS
    count = 20
    outputs = demo.chat(conversations, SamplingParams(temperature=0, max_tokens=count))
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    by_length = sorted(outputs, key=lambda output: len(output.prompt_token_ids))
    for start in range(0, NUM_DEMO_PROMPTS, 50):
        batch = by_length[start : start + 50]
        expected = generate(model, [output.prompt_token_ids for output in batch], count)
        for output, row in zip(batch, expected.tolist(), strict=True):
            assert output.token_ids == row[: len(output.token_ids)]
            ended = output.token_ids[-1] in demo.tokenizer.eos_token_ids
            assert output.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
def test_a_repetition_penalty_is_transformers_own(
    penalty: float, shared_engine: LLM, peer: Any
) -> None:
    """Ids of the prompt count as well as ids of the output."""
    params = SamplingParams(
        temperature=0, max_tokens=16, repetition_penalty=penalty, ignore_eos=True
    )
    plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    penalised = [output.token_ids for output in shared_engine.generate(PROMPTS, params)]
    assert penalised != [output.token_ids for output in shared_engine.generate(PROMPTS, plain)]
    for prompt, ids in zip(PROMPTS, penalised, strict=True):
        expected = generate(peer, [prompt], 16, repetition_penalty=penalty)
        assert ids == expected[0].tolist()


def test_min_tokens_forbid_the_ending_ids_as_transformers_does(
    shared_engine: LLM, peer: Any
) -> None:
    """Until min_tokens are there no ending id is chosen; the likeliest other id is."""
    for prompt in PROMPTS:
        free = SamplingParams(temperature=0, max_tokens=12)
        ends = shared_engine.generate([prompt], free)[0].token_ids[1:3]
        params = SamplingParams(temperature=0, max_tokens=12, min_tokens=6, stop_token_ids=ends)
        ids = shared_engine.generate([prompt], params)[0].token_ids
        expected = generate(peer, [prompt], 12, eos_token_id=ends, min_new_tokens=6)[0].tolist()
        assert ids == expected[: len(ids)]
        assert not set(ends) & set(ids[:6])
        assert len(ids) == 12 or ids[-1] in ends


def test_logprobs_are_those_of_a_forward_pass(shared_engine: LLM, peer: Any) -> None:
    """The chosen id's and the likeliest five, in order, for greedy and for sampled tokens."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=8, logprobs=5, seed=1)
        for temperature in (0.0, 0.0, 1.0, 1.0, 1.0)
    ]
    for output in shared_engine.generate(PROMPTS, params):
        ids = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            logits = peer(torch.tensor([ids[:-1]])).logits[0]
        expected = logits[-len(output.token_ids) :].double().log_softmax(-1)
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) == 8
        for token_id, record, row in zip(output.token_ids, output.logprobs, expected, strict=True):
            assert record.token_logprob == pytest.approx(row[token_id].item(), abs=1e-4)
            values, best = row.topk(5)
            assert [found for found, _ in record.top] == best.tolist()
            assert [value for _, value in record.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_penalties_do_not_change_the_reported_logprobs(shared_engine: LLM) -> None:
    """Logprobs are the model's, before any parameter; with 0 only the chosen id's is reported."""
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    other = SamplingParams(temperature=0, max_tokens=1, logprobs=1, presence_penalty=2.0, min_p=0.5)
    (plain, changed) = shared_engine.generate([PROMPTS[3]] * 2, [one, other])
    assert plain.logprobs is not None
    assert changed.logprobs is not None
    assert plain.logprobs[0].top == ()
    assert changed.logprobs[0].token_logprob == pytest.approx(plain.logprobs[0].token_logprob)
