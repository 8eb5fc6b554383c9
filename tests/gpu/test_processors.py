"""Logits processors behind captured graphs: right, bitwise harmless to others, never waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from tests.gpu.conftest import write_config

pytestmark = pytest.mark.whole_gpu

Install = Callable[..., None]
PROMPTS = [[(7 * i + j) % 4096 for j in range(20 + i)] for i in range(6)]

SOURCE = """
import torch
from pydantic import BaseModel, ConfigDict
from nanovllm_core.api import LogitsProcessor, LogitsProcessorSpec, hookimpl

class Window(BaseModel):
    model_config = ConfigDict(extra="forbid")
    last: int

class Nothing(LogitsProcessor):
    def process(self, logits_SV, requests):
        logits_SV.fill_(-torch.inf)

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
                                arguments=Window),
            LogitsProcessorSpec(name="nothing", impl="no_repeat:Nothing", contract=1)]
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
    names = dict.fromkeys(["norepeat", "nothing"], "no_repeat")
    install("norepeat", {"nanovllm.logits_processors": names}, {"no_repeat": SOURCE})
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


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_requests_that_a_processor_leaves_no_id_end_alone(folder: Path, temperature: float) -> None:
    """Cut by the kernel, with a step in flight, and in the rows of graphs; no id comes out."""
    ending = replace(
        params(False), temperature=temperature, top_k=9, logits_processors={"nothing": {}}
    )
    with LLM(
        str(folder), load_format="dummy", device="cuda", logits_processors=["nothing"],
        max_num_seqs=16, max_model_len=256, **{"cache.num_blocks": 256},
    ) as llm:  # fmt: skip
        plain = llm.generate(PROMPTS, params(False), use_tqdm=False)
        each = [*[ending] * 10, *[params(False)] * len(PROMPTS)]
        outputs = llm.generate([*[PROMPTS[0]] * 10, *PROMPTS], each, use_tqdm=False)
    for ended in outputs[:10]:
        assert (ended.finish_reason, ended.token_ids) == ("error", [])
        assert "logits_processors: nothing left no id to choose after 0" in str(ended.error)
    assert [one.token_ids for one in outputs[10:]] == [one.token_ids for one in plain]


CONSTRAINT = """
from pydantic import BaseModel, ConfigDict
from nanovllm_core.api import Constraint, ConstraintSpec, allow_ids, hookimpl

class Window(BaseModel):
    model_config = ConfigDict(extra="forbid")
    first: int

EVENTS = []

class Range(Constraint):
    def start(self, arguments, prompt_ids):
        return [arguments.first]

    def advance(self, state, token_id):
        assert token_id in range(state[0], state[0] + 40)
        state[0] = (state[0] * 3 + token_id) % 4000

    def fill(self, state, mask):
        EVENTS.append("fill")
        allow_ids(mask, range(state[0], state[0] + 40))

@hookimpl
def nanovllm_constraints():
    return [ConstraintSpec(name="range", impl="range_constraint:Range", contract=1,
                           arguments=Window)]
"""


def constrained_params(first: int | None, temperature: float = 0.0) -> SamplingParams:
    asked = None if first is None else {"range": {"first": first}}
    return SamplingParams(
        temperature=temperature, seed=1, max_tokens=32, ignore_eos=True, constraints=asked
    )


def follows(first: int, ids: list[int]) -> bool:
    """Every id is in the range that those before it give."""
    for token_id in ids:
        if token_id not in range(first, first + 40):
            return False
        first = (first * 3 + token_id) % 4000
    return True


def noted(name: str, call: Callable[..., object], events: list[str]) -> Callable[..., object]:
    """The call, which also notes its name."""

    def noting(*data: object) -> object:
        events.append(name)
        return call(*data)

    return noting


@pytest.fixture
def constrained(install: Install, tmp_path: Path) -> Path:
    install(
        "range",
        {"nanovllm.constraints": {"range": "range_constraint"}},
        {"range_constraint": CONSTRAINT},
    )
    return write_config(tmp_path, "0.6B", num_hidden_layers=2)


def constrained_tokens(
    folder: Path, ask: Callable[[int], bool], temperature: float, **changes: object
) -> list[list[int]]:
    small = {"max_num_seqs": 8, "max_model_len": 256, "cache.num_blocks": 256}
    with LLM(
        str(folder), load_format="dummy", device="cuda", constraints=["range"],
        **{**small, **changes},
    ) as llm:  # fmt: skip
        each = [
            constrained_params(100 * i if ask(i) else None, temperature)
            for i in range(len(PROMPTS))
        ]
        return [output.token_ids for output in llm.generate(PROMPTS, each, use_tqdm=False)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_constrained_rows_keep_to_their_masks_and_neighbours_keep_their_bits(
    constrained: Path, temperature: float
) -> None:
    """Greedy and sampled, at any depth, eagerly and in graphs."""
    plain = constrained_tokens(constrained, lambda i: False, temperature)
    mixed = constrained_tokens(constrained, lambda i: i % 2 == 0, temperature)
    for number, out in enumerate(mixed):
        if number % 2:
            assert out == plain[number]
        else:
            assert follows(100 * number, out)
    for changes in ({"steps_ahead": 0}, {"steps_ahead": 3}, {"debug": True},
                    {"cuda_graphs": {"enforce_eager": True}}):  # fmt: skip
        assert constrained_tokens(constrained, lambda i: i % 2 == 0, temperature, **changes) == (
            mixed
        )


def test_the_forward_pass_is_launched_before_the_masks_and_nothing_waits_but_collect(
    constrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a steady step: submit, collect the one before, fill, sample; no call but collect syncs."""
    with LLM(
        str(constrained), load_format="dummy", device="cuda", constraints=["range"],
        max_num_seqs=8, max_model_len=256, **{"cache.num_blocks": 256},
    ) as llm:  # fmt: skip
        import range_constraint  # type: ignore[import-not-found]

        events = range_constraint.EVENTS
        executor = llm.engine._executor
        for name in ("submit", "collect", "sample"):
            monkeypatch.setattr(executor, name, noted(name, getattr(executor, name), events))
        llm.engine.add_request("a", PROMPTS[0], constrained_params(5))
        for _ in range(8):
            llm.engine.step()
        events.clear()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert events == ["submit", "collect", "fill", "sample"] * 8


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_of_whose_ids_nothing_is_left_ends_alone(
    constrained: Path, temperature: float
) -> None:
    """`min_tokens` forbids every id that its masks allow, id 0 among them; no id comes out."""
    params = replace(
        constrained_params(0, temperature), stop_token_ids=tuple(range(40)), min_tokens=4
    )
    with LLM(
        str(constrained), load_format="dummy", device="cuda", constraints=["range"],
        max_num_seqs=8, max_model_len=256, **{"cache.num_blocks": 256},
    ) as llm:  # fmt: skip
        each = [params, constrained_params(100, temperature)]
        ended, other = llm.generate(PROMPTS[:2], each, use_tqdm=False)
    assert (ended.finish_reason, ended.token_ids) == ("error", [])
    assert "forbids every id that constraint 'range'" in str(ended.error)
    assert (other.finish_reason, len(other.token_ids)) == ("length", 32)
    assert follows(100, other.token_ids)
