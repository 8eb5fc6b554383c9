"""A request that names a constraint keeps to it, and its neighbours notice nothing."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm_core import AsyncLLM, SamplingParams
from nanovllm_core.errors import InvalidSamplingError, PluginFailedError

from .tiny import VOCAB_SIZE, Reference, open_tiny

Install = Callable[..., None]
PROMPT = [5, 17, 3, 60, 41, 8, 8, 90]
LENGTH = 16

SOURCE = """
import time
from pydantic import BaseModel, ConfigDict
from nanovllm_core.api import (
    Constraint, ConstraintSpec, LogitsProcessor, LogitsProcessorSpec, allow_ids, hookimpl,
)

class Multiple(BaseModel):
    model_config = ConfigDict(extra="forbid")
    of: int
    fails_after: int = 99
    sleeps: float = 0.0

class Multiples(Constraint):
    "The sum of all ids is a multiple of a number; at most so many ids."

    def start(self, arguments, prompt_ids):
        return [arguments, int(prompt_ids.sum()), 0]

    def advance(self, state, token_id):
        state[1] += token_id
        state[2] += 1

    def fill(self, state, mask):
        arguments, total, count = state
        if count == arguments.fails_after:
            raise RuntimeError("no more")
        time.sleep(arguments.sleeps)
        allow_ids(mask, range(-total % arguments.of, self.context.vocab_size, arguments.of))

@hookimpl
def nanovllm_constraints():
    return [ConstraintSpec(name="multiples", impl="sums:Multiples", contract=1,
                           arguments=Multiple)]

class Assigns(LogitsProcessor):
    "Every id but one has the same logit, and that one a larger one."

    def process(self, logits_SV, requests):
        logits_SV.fill_(1.0)
        logits_SV[:, 8] = 2.0

class Nothing(LogitsProcessor):
    "Forbids every id."

    def process(self, logits_SV, requests):
        logits_SV.fill_(float("-inf"))

@hookimpl
def nanovllm_logits_processors():
    return [LogitsProcessorSpec(name="assigns", impl="sums:Assigns", contract=1),
            LogitsProcessorSpec(name="nothing", impl="sums:Nothing", contract=1)]
"""


@pytest.fixture(autouse=True)
def sums(install: Install) -> None:
    groups = {"nanovllm.constraints": {"multiples": "sums"},
              "nanovllm.logits_processors": {"assigns": "sums", "nothing": "sums"}}  # fmt: skip
    install("nanovllm-sums", groups, {"sums": SOURCE})


def greedy(of: int | None = None, **fields: Any) -> SamplingParams:
    fails_after = fields.pop("fails_after", 99)
    asked = None if of is None else {"multiples": {"of": of, "fails_after": fails_after}}
    return SamplingParams(
        **{"temperature": 0, "max_tokens": LENGTH, "constraints": asked, **fields}
    )


def in_multiples(reference: Reference, of: int) -> list[int]:
    """The greedy tokens where the sum of all ids is a multiple."""
    ids = list(PROMPT)
    for _ in range(LENGTH):
        logits = reference.logits(ids)[-1]
        sums = torch.arange(VOCAB_SIZE) + sum(ids)
        ids.append(int(logits.masked_fill(sums % of != 0, -torch.inf).argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_rows_keep_to_their_constraints_at_any_depth(
    tiny: Path, reference: Reference, steps_ahead: int
) -> None:
    """Beside free rows, with every other parameter, and in prompts of several chunks."""
    sampled: dict[str, Any] = {"temperature": 0.9, "seed": 3, "top_k": 7, "logprobs": 1}
    params = [
        greedy(),
        greedy(3),
        greedy(5),
        SamplingParams(**sampled, max_tokens=LENGTH),
        greedy(2, **sampled, repetition_penalty=1.2, logit_bias={8: 2.0}, min_tokens=4),
    ]
    with open_tiny(tiny, steps_ahead=steps_ahead, max_num_batched_tokens=8) as free:
        alone = free.generate([PROMPT] * 2, [params[0], params[3]], use_tqdm=False)
    with open_tiny(
        tiny, constraints=["multiples"], steps_ahead=steps_ahead, max_num_batched_tokens=8
    ) as llm:
        plain, three, five, drawn, many = llm.generate([PROMPT] * 5, params, use_tqdm=False)
    assert [plain.token_ids, drawn.token_ids] == [one.token_ids for one in alone]
    assert three.token_ids == in_multiples(reference, 3)
    assert five.token_ids == in_multiples(reference, 5)
    total = sum(PROMPT)
    for token_id in many.token_ids:
        total += token_id
        assert total % 2 == 0
    assert many.logprobs is not None
    assert len(many.logprobs) == LENGTH


def test_a_preempted_request_goes_on_in_its_own_state(tiny: Path) -> None:
    """It was shown each id once, and fills on."""
    prompts = [[i + 1] * 60 for i in range(4)]
    tight: dict[str, Any] = {"cache.num_blocks": 20, "cache.block_size": 16, "max_num_seqs": 4}
    given = []
    for changes in (tight, {}):
        with open_tiny(tiny, constraints=["multiples"], **changes) as llm:
            outputs = llm.generate(prompts, greedy(3, max_tokens=40), use_tqdm=False)
            given.append([one.token_ids for one in outputs])
            if changes:
                assert llm.stats.preemptions > 0
    assert given[0] == given[1]


def test_a_failure_reaches_the_caller_of_its_request_and_nobody_else(tiny: Path) -> None:
    """As an output with what was written before; it survives pickle. The engine goes on."""
    with open_tiny(tiny, constraints=["multiples"]) as llm:
        fails, other = llm.generate(
            [PROMPT] * 2, [greedy(3, fails_after=4), greedy(3)], use_tqdm=False
        )
        assert (fails.finish_reason, fails.token_ids) == ("error", other.token_ids[:4])
        assert (other.finish_reason, other.error) == ("length", None)
        error = pickle.loads(pickle.dumps(fails.error))
        assert isinstance(error, PluginFailedError)
        assert "constraint 'multiples' (nanovllm-sums 1.2.3)" in str(error)
        assert "fill failed: RuntimeError: no more" in str(error)
        [again] = llm.generate([PROMPT], greedy(3), use_tqdm=False)
        assert again.token_ids == other.token_ids
        with pytest.raises(InvalidSamplingError, match=r"constraints\.multiples\.of"):
            llm.generate([PROMPT], SamplingParams(constraints={"multiples": {}}))


def test_a_failure_ends_a_stream_of_an_event_loop(tiny: Path) -> None:
    async def main(llm: AsyncLLM) -> list[tuple[int, str | None]]:
        stream = llm.generate(PROMPT, greedy(3, fails_after=2))
        return [(output.num_token_ids, output.finish_reason) async for output in stream]

    llm = AsyncLLM(
        str(tiny), device="cpu", attention="sdpa", constraints=["multiples"], max_num_seqs=2
    )
    *before, last = asyncio.run(main(llm))
    assert last == (2, "error")
    assert {reason for _, reason in before} <= {None}
    llm.close()


def test_nothing_is_left_where_other_parameters_forbid_what_is_allowed(tiny: Path) -> None:
    """`min_tokens` forbids every id that is a multiple: an error, and no id outside the mask."""
    stops = range(2, VOCAB_SIZE, 3)
    with open_tiny(tiny, constraints=["multiples"]) as llm:
        prompt = [3, 7]
        params = greedy(3, stop_token_ids=stops, min_tokens=2)
        [output] = llm.generate([prompt], params, use_tqdm=False)
    assert output.finish_reason == "error"
    assert output.token_ids == []
    assert "min_tokens or a logits processor of the request forbids" in str(output.error)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_an_id_that_min_tokens_forbids_is_not_given_where_it_is_id_0_either(
    tiny: Path, steps_ahead: int
) -> None:
    """Of a prompt whose sum is a multiple of the vocabulary's size, id 0 alone is allowed."""
    params = greedy(VOCAB_SIZE, stop_token_ids=[0], min_tokens=4, logprobs=0)
    with open_tiny(tiny, constraints=["multiples"], steps_ahead=steps_ahead) as llm:
        output, other = llm.generate([[1, VOCAB_SIZE - 1]] * 2, [params, greedy()], use_tqdm=False)
    assert (output.finish_reason, output.token_ids, output.logprobs) == ("error", [], [])
    assert "min_tokens or a logits processor" in str(output.error)
    assert (other.finish_reason, len(other.token_ids)) == ("length", LENGTH)


def test_a_processor_cannot_allow_an_id_again(tiny: Path) -> None:
    """It assigns logits, also to ids that the mask forbids; the mask comes behind it."""
    with open_tiny(tiny, constraints=["multiples"], logits_processors=["assigns"]) as llm:
        params = greedy(3, logits_processors={"assigns": {}})
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert (output.finish_reason, len(output.token_ids)) == ("length", LENGTH)
    total = sum(PROMPT)
    for token_id in output.token_ids:
        total += token_id
        assert total % 3 == 0


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_processor_that_forbids_every_id_ends_a_request_whose_mask_allows_all(
    tiny: Path, steps_ahead: int
) -> None:
    """Whichever id came out, the mask would allow it, and nobody would know."""
    changes: dict[str, Any] = {"steps_ahead": steps_ahead, "logits_processors": ["nothing"]}
    with open_tiny(tiny, constraints=["multiples"], debug=False, **changes) as llm:
        params = [greedy(1, logits_processors={"nothing": {}}), greedy(1)]
        ended, other = llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert (ended.finish_reason, ended.token_ids) == ("error", [])
    assert "min_tokens or a logits processor of the request forbids" in str(ended.error)
    assert (other.finish_reason, len(other.token_ids)) == ("length", LENGTH)


def test_the_longest_wait_is_a_setting(tiny: Path) -> None:
    changes: dict[str, Any] = {"limits.constraint_seconds": 0.05}
    with open_tiny(tiny, constraints=["multiples"], **changes) as llm:
        slow = SamplingParams(max_tokens=2, constraints={"multiples": {"of": 3, "sleeps": 0.5}})
        [output] = llm.generate([PROMPT], slow, use_tqdm=False)
    assert "fill has not returned, and a mask must be made within 0.05 s" in str(output.error)
