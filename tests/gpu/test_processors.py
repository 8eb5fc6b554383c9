"""Logits processors behind captured graphs: right, bitwise harmless to others, never waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from tests.gpu.conftest import write_config

Install = Callable[..., None]
PROMPTS = [[(7 * i + j) % 4096 for j in range(20 + i)] for i in range(6)]

SOURCE = """
import torch
from pydantic import BaseModel, ConfigDict
from nanovllm_core.api import LogitsProcessor, LogitsProcessorSpec, hookimpl

class Window(BaseModel):
    model_config = ConfigDict(extra="forbid")
    last: int

class NoRepeat(LogitsProcessor):
    def prepare(self, arguments):
        return 1 + torch.arange(arguments.last, device=self.context.device)

    def process(self, logits_SV, requests):
        for logits_V, request in zip(logits_SV, requests):
            at = (request.num_known - request.state).clamp(min=0)
            logits_V.index_fill_(0, request.token_ids[at.long()].long(), -torch.inf)

@hookimpl
def nanovllm_logits_processors():
    return [LogitsProcessorSpec(name="norepeat", impl="no_repeat:NoRepeat", contract=1,
                                arguments=Window)]
"""


def params(asks: bool) -> SamplingParams:
    asked = {"norepeat": {"last": 12}} if asks else None
    return SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logits_processors=asked)


def tokens(folder: Path, ask: Callable[[int], bool], **changes: object) -> list[list[int]]:
    small = {"max_num_seqs": 8, "max_model_len": 256, "cache.num_blocks": 256}
    with LLM(
        str(folder), load_format="dummy", device="cuda", logits_processors=["norepeat"],
        **{**small, **changes},
    ) as llm:  # fmt: skip
        each = [params(ask(i)) for i in range(len(PROMPTS))]
        return [output.token_ids for output in llm.generate(PROMPTS, each, use_tqdm=False)]


@pytest.fixture
def folder(install: Install, tmp_path: Path) -> Path:
    install(
        "norepeat", {"nanovllm.logits_processors": {"norepeat": "no_repeat"}}, {"no_repeat": SOURCE}
    )
    return write_config(tmp_path, "0.6B", num_hidden_layers=2)


def test_any_depth_agrees_and_neighbours_are_untouched(folder: Path) -> None:
    plain = tokens(folder, lambda i: False)
    mixed = tokens(folder, lambda i: i % 2 == 0)
    for number, (prompt, out) in enumerate(zip(PROMPTS, mixed, strict=True)):
        if number % 2:
            assert out == plain[number]
            continue
        known = list(prompt)
        for token in out:
            assert token not in known[-12:]
            known.append(token)
    for changes in ({"steps_ahead": 3}, {"debug": True}):
        assert tokens(folder, lambda i: i % 2 == 0, **changes) == mixed


def test_a_step_with_a_processor_never_waits_for_the_device(folder: Path) -> None:
    with LLM(
        str(folder), load_format="dummy", device="cuda", logits_processors=["norepeat"],
        max_num_seqs=8, max_model_len=256, **{"cache.num_blocks": 256},
    ) as llm:  # fmt: skip
        for number, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(number), prompt, params(number % 2 == 0))
        for _ in range(8):
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
