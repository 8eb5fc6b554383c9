"""The tail in captured graphs: the eager tail's tokens, in any engine, without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.frontend import RequestOutput
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.sampler import Sampler
from nanovllm_core.worker import runner as runner_module, step_sampler
from nanovllm_core.worker.rows import RowTables
from nanovllm_core.worker.sampler import CapturedSampler
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


@contextmanager
def without_eager_tail() -> Iterator[None]:
    """An eager tail fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplerTail, "__call__", never_called)
        # Start-up tries the eager tail too.
        patch.setattr(runner_module.ModelRunner, "trial_launches", lambda self, num_tokens: ())
        yield


@pytest.fixture(scope="module")
def captured() -> list[RequestOutput]:
    with without_eager_tail():
        return generate()


def never_called(*_: object) -> None:
    raise AssertionError("no row asked for the eager tail")


def test_tokens_and_log_probabilities_are_the_eager_tails(
    captured: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_sampler, "make_captured_sampler", without_tail)
    assert_same(captured, generate())


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


def test_penalties_count_prompts_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts 1,024 ids at a time; a prompt has more of them, and is counted once."""
    longer = {"max_model_len": 2048, "cache": {"num_blocks": 512, "block_size": 16}}
    prompts = [[(7 * i + j * j) % 200 + 3 for j in range(1_010 + 300 * i)] for i in range(3)]
    asked = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=40,
        ignore_eos=True,
    )  # fmt: skip

    def found() -> list[list[int]]:
        with LLM(MODEL, **{**SMALL, **longer}) as llm:
            return [one.token_ids for one in llm.generate(prompts, asked, use_tqdm=False)]

    with without_eager_tail():
        captured = found()
    monkeypatch.setattr(step_sampler, "make_captured_sampler", without_tail)
    assert captured == found()


def test_rows_beside_one_that_needs_the_eager_tail_get_the_same(
    captured: list[RequestOutput],
) -> None:
    """A row forbids more stop ids than the tables hold, so its steps end with the eager tail."""
    many = SamplingParams(stop_token_ids=list(range(20)), min_tokens=12, max_tokens=12, seed=0)
    with LLM(MODEL, **SMALL) as llm:
        everyone = [*(params(i) for i in range(len(PROMPTS))), many]
        found = llm.generate([*PROMPTS, PROMPTS[0]], everyone, use_tqdm=False)
    assert_same(found[:-1], captured)


@pytest.mark.parametrize("steps_ahead", [0, 8])
def test_log_probabilities_are_those_of_their_token_however_far_steps_run_ahead(
    captured: list[RequestOutput], steps_ahead: int
) -> None:
    """No step in flight writes over what was not collected."""
    with without_eager_tail():
        assert_same(generate(steps_ahead=steps_ahead), captured)


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Tokens are equal, and log-probabilities but for the rounding of other batch sizes."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.logprobs is None) == (other.logprobs is None)
        for ours, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert ours.token_logprob == pytest.approx(theirs.token_logprob, abs=1e-5)
            values = [value for _, value in ours.top]
            assert values == pytest.approx([value for _, value in theirs.top], abs=1e-5)
