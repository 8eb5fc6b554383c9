"""Half precision on a CPU: one dtype for weights, activations and cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanovllm_core import SamplingParams

from .tiny import Reference, open_tiny

PROMPT = [(11 * i) % 97 for i in range(40)]


def test_a_block_keeps_no_nan_of_the_request_that_had_it_before(tiny: Path) -> None:
    """Such as one whose activations overflow: sdpa reads a block's unused tail, and 0 * NaN is NaN.

    Cached prefixes stay as they are.
    """
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0, ignore_eos=True)
    prompts = [PROMPT, PROMPT[7:]]
    with open_tiny(tiny) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
        llm.reset_prefix_cache()
        cache = llm.engine._executor._worker._runner.attention.cache  # type: ignore[attr-defined]
        cache.fill_(float("nan"))
        for finds_prefixes in (False, True):
            outputs = llm.generate(prompts, params)
            assert [output.token_ids for output in outputs] == expected
            assert (outputs[0].num_cached_tokens > 0) == finds_prefixes


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("float16", 0.05), ("bfloat16", 0.4)]
)
def test_the_cache_has_the_dtype_of_the_model(
    dtype: str, tolerance: float, tiny: Path, reference: Reference
) -> None:
    """And the log-probabilities stay near those of float64 (bug 15 of peers: fp16 KV for bf16)."""
    with open_tiny(tiny, dtype=dtype) as llm:
        runner = llm.engine._executor._worker._runner  # type: ignore[attr-defined]
        assert runner.attention.cache.dtype == getattr(torch, dtype)
        assert runner.model.dtype == runner.sampling.logits.dtype == getattr(torch, dtype)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        output = llm.generate([PROMPT], params)[0]
    assert output.logprobs is not None
    expected = reference.logits(PROMPT)[-1].log_softmax(-1)
    for token_id, value in output.logprobs[0].top:
        assert value == pytest.approx(expected[token_id].item(), abs=tolerance)
