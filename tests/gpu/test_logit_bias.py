"""`logit_bias` behind captured graphs: right at any setting, harmless to others, never waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanovllm_core import LLM, SamplingParams

pytestmark = pytest.mark.whole_gpu

SMALL: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": 256,
    "device": "cuda",
    "attention": "triton",
    "dtype": "float32",
    "cache": {"num_blocks": 256, "block_size": 16},
}
PROMPTS = [[(7 * i + j) % 200 + 3 for j in range(20 + i)] for i in range(12)]
BANNED = tuple(range(3, 60))
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "three steps ahead": {"steps_ahead": 3},
    "small chunks": {"max_num_batched_tokens": 24},
    "forced preemption": {"cache": {"num_blocks": 24, "block_size": 16}},
    "debug": {"debug": True},
}


def params(index: int, biased: bool) -> SamplingParams:
    """Every third row asks, half of the rows are greedy."""
    return SamplingParams(
        temperature=0.0 if index % 2 else 0.9,
        seed=index,
        max_tokens=24,
        ignore_eos=True,
        logit_bias=dict.fromkeys(BANNED, -100) if biased and index % 3 == 0 else None,
    )


def tokens(biased: bool = True, **changes: Any) -> list[list[int]]:
    with LLM("demo", **{**SMALL, **changes}) as llm:
        each = [params(index, biased) for index in range(len(PROMPTS))]
        outputs = llm.generate(PROMPTS, each, use_tqdm=False)
        assert (llm.stats.preemptions > 0) is (changes.get("cache", {}).get("num_blocks") == 24)
        return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def captured() -> list[list[int]]:
    return tokens()


def test_a_bias_keeps_tokens_out_and_changes_no_neighbour(captured: list[list[int]]) -> None:
    """Rows that ask for nothing get the very tokens that they get without such neighbours."""
    plain = tokens(biased=False)
    assert any({*plain[index]} & {*BANNED} for index in range(0, 12, 3)), "it had work to do"
    for index, out in enumerate(captured):
        if index % 3:
            assert out == plain[index]
        else:
            assert not {*out} & {*BANNED}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_biased_tokens_do_not_depend_on_how_they_are_computed(
    captured: list[list[int]], variant: str
) -> None:
    assert tokens(**VARIANTS[variant]) == captured


def test_a_step_with_a_bias_never_waits_for_the_device() -> None:
    with LLM("demo", **SMALL) as llm:
        for index, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(index), prompt, params(index, biased=True))
        for _ in range(8):
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
