"""Debug mode notices a model whose logits are not finite, and says whose and in which step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm_core import SamplingParams
from nanovllm_core.errors import EngineClosedError, ModelOutputError

from .tiny import open_tiny, write_checkpoint

PLUGIN = """
from nanovllm_core.api import ModelSpec, hookimpl

@hookimpl
def nanovllm_models():
    return [ModelSpec(name="WrongForCausalLM", impl="wrong_model:WrongForCausalLM", contract=2)]
"""
MODEL = """
import torch
from nanovllm_model_qwen3.model import Qwen3ForCausalLM

class WrongForCausalLM(Qwen3ForCausalLM):
    calls = 0

    def compute_logits(self, hidden_TE, out_TV=None):
        logits_TV = super().compute_logits(hidden_TE, out_TV)
        self.calls += 1
        if self.calls == {call}:
            logits_TV[-1] = {value}
        return logits_TV
"""


@pytest.fixture
def wrong(install: Callable[..., None], tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint of a model whose last logits are `value` at one of its calls."""

    def make(**bug: object) -> Path:
        groups = {"nanovllm.models": {"WrongForCausalLM": "wrong_plugin"}}
        modules = {"wrong_plugin": PLUGIN, "wrong_model": MODEL.format(**bug)}
        install("wrong-model", groups, modules)
        return write_checkpoint(tmp_path / "checkpoint", architectures=["WrongForCausalLM"])

    return make


@pytest.mark.parametrize(
    ("call", "value"), [(1, "float('nan')"), (3, "float('inf')"), (3, "-float('inf')")]
)
def test_logits_that_are_not_finite_are_named_with_step_request_and_plugins(
    call: int, value: str, wrong: Callable[..., Path]
) -> None:
    """In the step of the prompts, and in one that decodes; the other request was right."""
    number = value.removeprefix("float('").removeprefix("-float('").removesuffix("')")
    with open_tiny(wrong(call=call, value=value)) as llm:
        message = (
            rf"request \d+[^,]*, step {call}: the largest logit of 1 of 2 rows is not finite "
            rf"\(row \d: -?{number}\).*'WrongForCausalLM'.*'sdpa'"
        )
        with pytest.raises(ModelOutputError, match=message) as caught:
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(caught.value.rows) == 1
        with pytest.raises(EngineClosedError, match="ModelOutputError"):
            llm.generate([[1]])


def test_without_debug_mode_nobody_waits_to_look(wrong: Callable[..., Path]) -> None:
    """The engine goes on, with the id that the sampler takes for it."""
    with open_tiny(wrong(call=2, value="float('nan')"), debug=False) as llm:
        [output] = llm.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.token_ids) == 4
