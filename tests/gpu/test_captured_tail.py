"""The tail in captured graphs: the eager tail's tokens, in any engine, without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.frontend import RequestOutput
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.sampler import Sampler
from nanovllm_core.worker import runner as runner_module
from nanovllm_core.worker.captured_sampler import CapturedSampler
from nanovllm_core.worker.rows import RowTables
from nanovllm_core.worker.sampler_tail import SamplerTail

MODEL = "demo"
SMALL: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": 256,
    "device": "cuda",
    "attention": "triton",
    "kernels": "triton",
    "dtype": "float32",
    "cache": {"num_blocks": 256, "block_size": 16},
}
PROMPTS = [[(7 * i + j) % 200 + 3 for j in range(20 + i)] for i in range(12)]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": 0.3, "min_p": 0.02},
    {"temperature": 0.9, "logit_bias": {9: -50, 40: 3.0}, "logprobs": 0, "top_k": 70},
    {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.1, "min_tokens": 5},
]
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "small chunks": {"max_num_batched_tokens": 24},
    "forced preemption": {"cache": {"num_blocks": 24, "block_size": 16}},
    "debug": {"debug": True},
}


def params(index: int) -> SamplingParams:
    asked = ASKED[index % len(ASKED)]
    return SamplingParams(seed=index, max_tokens=24, ignore_eos=True, **asked)


def generate(**changes: Any) -> list[RequestOutput]:
    with LLM(MODEL, **{**SMALL, **changes}) as llm:
        return llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)


def without_tail(
    kernels: KernelSet, sampler: Sampler, tables: RowTables, vocab: int, entries: int
) -> CapturedSampler:
    return CapturedSampler(sampler, tables)


@pytest.fixture(scope="module")
def captured() -> list[RequestOutput]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplerTail, "__call__", never_called)
        # Start-up tries the eager tail too.
        patch.setattr(runner_module.ModelRunner, "trial_launches", lambda self, num_tokens: ())
        return generate()


def never_called(*_: object) -> None:
    raise AssertionError("no row asked for the eager tail")


def test_tokens_and_log_probabilities_are_the_eager_tails(
    captured: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "make_captured_sampler", without_tail)
    for ours, eager in zip(captured, generate(), strict=True):
        assert ours.token_ids == eager.token_ids
        for one, other in zip(ours.logprobs or [], eager.logprobs or [], strict=True):
            assert one.token_logprob == pytest.approx(other.token_logprob, abs=1e-5)
            values = [value for _, value in one.top]
            assert values == pytest.approx([value for _, value in other.top], abs=1e-5)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_tokens_do_not_depend_on_how_steps_are_run(
    captured: list[RequestOutput], variant: str
) -> None:
    found = generate(**VARIANTS[variant])
    assert [one.token_ids for one in found] == [one.token_ids for one in captured]


def test_a_step_whose_rows_ask_never_waits_for_the_device() -> None:
    with LLM(MODEL, **SMALL) as llm:
        for index, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(index), prompt, params(index))
        for _ in range(8):
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
