"""A constraint that fails on request, and engines with it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from nanovllm_core.engine import LoadedConstraint
from nanovllm_core.interfaces.constraint import (
    Constraint,
    ConstraintContext,
    ConstraintSpec,
    allow_ids,
)
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.fake_worker import reference_tokens

VOCAB = Setting().vocab_size
RELEASE = Event()
"""Set at the end of a test, so that a call that hangs ends."""


class Step(BaseModel):
    """Arguments of `Rising`."""

    model_config = ConfigDict(extra="forbid")
    step: int
    fails: str = ""


class Wordless(Exception):  # noqa: N818
    """Has no text."""

    def __str__(self) -> str:
        raise SystemExit("no text")


def allowed_after(step: int, prompt: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """The ids that `Rising` allows: those that differ from the sum of all ids by few, modulo V."""
    base = sum(prompt) * step + 7 * sum(outputs) + len(outputs)
    return sorted({(base + i * step) % VOCAB for i in range(5)})


class Rising(Constraint):
    """Allows ids by all ids before; on request it fails in one of many ways, at the third id."""

    def start(self, arguments: Any, prompt_ids: NDArray[np.int32]) -> list[Any]:
        if arguments.fails == "start":
            raise KeyError("no start")
        return [arguments, prompt_ids.tolist(), []]

    def advance(self, state: list[Any], token_id: int) -> None:
        arguments, prompt, outputs = state
        assert token_id in allowed_after(arguments.step, prompt, outputs)
        if arguments.fails == "advance" and len(outputs) == 2:
            raise ValueError("no third")
        outputs.append(token_id)

    def fill(self, state: list[Any], mask: NDArray[np.int32]) -> None:
        arguments, prompt, outputs = state
        assert not mask.any()
        if len(outputs) == 2:
            match arguments.fails:
                case "fill":
                    raise SystemExit("no mask")
                case "wordless":
                    raise Wordless
                case "nothing":
                    return
                case "beyond":
                    mask[-1] = np.int32(-1) << (VOCAB % 32)
                    return
                case "hang":
                    RELEASE.wait(10)
                case "slow":
                    time.sleep(0.05)
                case "slower":
                    time.sleep(0.4)
                case "lock":
                    ctypes.PyDLL(None).usleep(500_000)
        allow_ids(mask, allowed_after(arguments.step, prompt, outputs))


def loaded() -> dict[str, LoadedConstraint]:
    context = ConstraintContext(
        vocab_size=VOCAB, max_model_len=64, tokenizer="", eos_token_ids=()
    )  # fmt: skip
    spec = ConstraintSpec(
        name="rising", impl="a:B", contract=1, arguments=Step,
        check=lambda asked, size: [f"step is {asked.step}"] if asked.step >= size else [],
    )  # fmt: skip
    return {"rising": LoadedConstraint("constraint 'rising'", spec, Rising(NoOptions(), context))}


def make(seconds: float = 5.0, **setting: Any) -> Harness:
    return Harness(
        Setting(**setting), constraints=loaded(), constraint_seconds=seconds
    )  # fmt: skip


def params(step: int | None, fails: str = "", **more: Any) -> SamplingParams:
    asked = None if step is None else {"rising": {"step": step, "fails": fails}}
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **more}, constraints=asked)


def check(harness: Harness) -> None:
    """Every output that did not fail is the reference's under its constraint."""
    assert harness.finished.keys() == harness.requests.keys()
    for key, output in harness.finished.items():
        request = harness.requests[key]
        asked = (request.params.constraints or {}).get("rising")
        expected = reference_tokens(
            request.prompt_token_ids,
            request.sampling,
            request.max_length,
            VOCAB,
            allowed=None
            if asked is None
            else lambda outputs, r=request, a=asked: allowed_after(
                a["step"], r.prompt_token_ids, outputs
            ),
        )
        if output.finish_reason in ("error", "abort"):
            expected = expected[: len(output.token_ids)]
        assert output.token_ids == expected, key
