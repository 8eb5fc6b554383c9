"""A request that asks for a logits processor gets it, and nobody else notices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.errors import (
    ConfigError,
    EngineClosedError,
    InvalidSamplingError,
    PluginFailedError,
    PluginLoadError,
)

from .tiny import VOCAB_SIZE, Reference, open_tiny

Install = Callable[..., None]
GROUP = "nanovllm.logits_processors"
PROMPT = [5, 17, 3, 60, 41, 8, 8, 90]
LENGTH = 16
LOOPING = [77, 0, 89, 57]
"""A prompt after which the greedy text says an id several times in a row."""

SOURCE = """
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from nanovllm_core.api import LogitsProcessor, LogitsProcessorSpec, hookimpl

class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

class BanOptions(Strict):
    always: int | None = None

class Banned(Strict):
    ids: list[int]

class Window(Strict):
    last: int = 1

CALLS, PREPARED = [], []

class Ban(LogitsProcessor):
    "Forbids the ids that the request names."

    def prepare(self, arguments):
        PREPARED.append(arguments.ids)
        always = [] if self.options.always is None else [self.options.always]
        return torch.tensor([*arguments.ids, *always], device=self.context.device)

    def process(self, logits_SV, requests):
        CALLS.append([request.arguments.ids for request in requests])
        for logits_V, request in zip(logits_SV, requests):
            logits_V.index_fill_(0, request.state, -torch.inf)

class NoRepeat(LogitsProcessor):
    "Forbids the last ids of the text so far, whose newest the host may not know yet."

    def process(self, logits_SV, requests):
        for logits_V, request in zip(logits_SV, requests):
            back = 1 + torch.arange(request.arguments.last, device=logits_V.device)
            at = (request.num_known - back).clamp(min=0)
            logits_V.index_fill_(0, request.token_ids[at.long()].long(), -torch.inf)

class Watch(LogitsProcessor):
    "Notes the lengths that it is shown; only for tests, for it waits for the device."

    def process(self, logits_SV, requests):
        CALLS.extend((int(r.num_prompt), int(r.num_known)) for r in requests)

class Named(Strict):
    ids: list[int] = Field(alias="banned-ids")

class Once(Strict):
    word: str

    @field_validator("word")
    @classmethod
    def only_yes(cls, word):
        if word != "yes":
            raise ValueError("say yes")
        return "it was yes"

class Silent(LogitsProcessor):
    def process(self, logits_SV, requests):
        pass

class Broken(LogitsProcessor):
    def process(self, logits_SV, requests):
        raise RuntimeError("no such logits")

def beyond(arguments, vocab_size):
    if 666 in arguments.ids:
        raise KeyError("beast")
    wrong = [one for one in arguments.ids if one >= vocab_size]
    return [f"id {one} is not below {vocab_size}" for one in wrong]

@hookimpl
def nanovllm_logits_processors():
    def spec(name, arguments, **more):
        return LogitsProcessorSpec(
            name=name.lower(), impl=__name__ + ":" + name, contract=1, arguments=arguments, **more
        )
    return [
        spec("Ban", Banned, options=BanOptions, check=beyond), spec("NoRepeat", Window),
        spec("Watch", Strict), spec("Broken", Strict),
        LogitsProcessorSpec(name="named", impl=__name__ + ":Silent", contract=1, arguments=Named),
        LogitsProcessorSpec(name="once", impl=__name__ + ":Silent", contract=1, arguments=Once),
    ]
"""

ALL = ["ban", "norepeat", "watch", "broken", "named", "once"]


@pytest.fixture
def open_engine(install: Install, tiny: Path) -> Iterator[Callable[..., LLM]]:
    """Opens engines that know the processors above."""
    install("nanovllm-changes", {GROUP: dict.fromkeys(ALL, "changes")}, {"changes": SOURCE})
    engines: list[LLM] = []

    def make(**changes: Any) -> LLM:
        engines.append(open_tiny(tiny, **{"logits_processors": ALL, **changes}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def greedy(asked: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": LENGTH, "logits_processors": asked, **fields}
    )


def without_repeats(reference: Reference, prompt: list[int], count: int, last: int) -> list[int]:
    """The greedy tokens when none of the last ids may come again."""
    ids = list(prompt)
    for _ in range(count):
        logits = reference.logits(ids)[-1]
        logits[ids[-last:]] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_what_depends_on_the_newest_token_is_right_at_any_depth(
    open_engine: Callable[..., LLM], reference: Reference, steps_ahead: int
) -> None:
    """The row's ids are on the device before the host has them; the neighbours are as alone."""
    llm = open_engine(steps_ahead=steps_ahead)
    asking = [greedy({"norepeat": {"last": last}}) for last in (1, 2, 6)]
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH)
    alone = llm.generate([LOOPING] * 2, [greedy(), seeded])
    plain, *changed, drawn = llm.generate([LOOPING] * 5, [greedy(), *asking, seeded])
    for last, output in zip((1, 2, 6), changed, strict=True):
        assert output.token_ids == without_repeats(reference, LOOPING, LENGTH, last)
        assert output.token_ids != plain.token_ids
    assert [plain.token_ids, drawn.token_ids] == [one.token_ids for one in alone]


def test_a_preempted_request_goes_on_as_it_would_have(
    open_engine: Callable[..., LLM], reference: Reference
) -> None:
    """Its row is prepared anew, from its arguments alone."""
    llm = open_engine(**{"cache.num_blocks": 20, "cache.block_size": 16}, max_num_seqs=4)
    prompts = [[i + 1] * 60 for i in range(4)]
    asking = greedy({"norepeat": {"last": 6}, "ban": {"ids": [9]}}, max_tokens=40)
    outputs = llm.generate(prompts, asking)
    changes = sys.modules["changes"]
    assert llm.stats.preemptions > 0
    assert len(changes.PREPARED) == 4 + llm.stats.preemptions
    roomy = open_engine().generate(prompts, asking)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in roomy]


def test_rows_that_asked_come_in_one_call_per_step_and_the_others_in_none(
    open_engine: Callable[..., LLM],
) -> None:
    llm = open_engine()
    asked = [greedy({"ban": {"ids": [i]}}, max_tokens=4, ignore_eos=True) for i in (1, 2)]
    llm.generate([PROMPT] * 3, [asked[0], greedy(max_tokens=4), asked[1]])
    calls = sys.modules["changes"].CALLS
    assert calls
    assert max(len(call) for call in calls) == 2
    assert sum(len(call) for call in calls) >= 8
    assert {ids for call in calls for (ids,) in call} == {1, 2}
    count = len(calls)
    llm.generate([PROMPT], greedy())
    assert len(calls) == count


def test_a_prompt_in_chunks_is_shown_once_it_is_whole(open_engine: Callable[..., LLM]) -> None:
    llm = open_engine(max_num_batched_tokens=16, **{"cache.prefix_caching": False})
    other = greedy(max_tokens=20, ignore_eos=True, top_k=3, temperature=1.0)
    llm.generate([PROMPT, [3] * 50], [other, greedy({"watch": {}}, max_tokens=3, ignore_eos=True)])
    seen = [pair for pair in sys.modules["changes"].CALLS if pair != (1, 1)]
    assert seen == [(50, 50), (50, 51), (50, 52)]


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_a_row_that_the_device_has_ended_is_shown_with_lengths_that_can_be(
    open_engine: Callable[..., LLM], steps_ahead: int
) -> None:
    """A prompt is never empty, so the newest id may be looked up without a check."""
    llm = open_engine(steps_ahead=steps_ahead)
    ending = greedy({"watch": {}}, temperature=1.0, stop_token_ids=range(8), max_tokens=40)
    llm.generate([PROMPT] * 6, ending)
    seen = set(sys.modules["changes"].CALLS)
    assert all(1 <= num_prompt <= num_known for num_prompt, num_known in seen)
    assert ((1, 1) in seen) == (steps_ahead > 0), "no row was shown after its end"


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"top_k": 3}], ids=str)
def test_a_request_that_is_left_no_id_ends_alone(
    open_engine: Callable[..., LLM],
    reference: Reference,
    steps_ahead: int,
    temperature: float,
    fields: dict[str, Any],
) -> None:
    """At its first id or at a later one; no forbidden id comes out, and its neighbours go on."""
    llm = open_engine(steps_ahead=steps_ahead, debug=False)
    every, keep = list(range(VOCAB_SIZE)), 8
    rest = [one for one in every if one != keep]
    asked: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "ban": ({"ban": {"ids": every}}, {}),
        "ban and min_tokens": ({"ban": {"ids": rest}}, {"min_tokens": 2, "stop_token_ids": [keep]}),
        "ban and norepeat": ({"ban": {"ids": rest}, "norepeat": {"last": 1}}, {}),
    }
    params = [
        greedy(processors, temperature=temperature, seed=3, **fields, **more)
        for processors, more in asked.values()
    ]
    *ended, plain = llm.generate([PROMPT] * 4, [*params, greedy()])
    assert [one.finish_reason for one in ended] == ["error"] * 3
    assert [one.token_ids for one in ended] == [[], [], [keep]]
    for one, names in zip(ended, asked, strict=True):
        assert isinstance(one.error, InvalidSamplingError)
        assert str(one.error) == (
            f"logits_processors: {names} left no id to choose after {len(one.token_ids)} of the "
            "output; change one of them"
        )
        assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
    assert plain.token_ids == reference.tokens(PROMPT, LENGTH)
    assert llm.generate([PROMPT], greedy())[0].token_ids == plain.token_ids
    assert llm.stats.free_blocks == llm.stats.blocks


def test_a_row_that_may_choose_no_id_is_an_error_in_debug_mode(
    open_engine: Callable[..., LLM],
) -> None:
    """To look costs a wait in every step, so it is done only there; the error names the plugin."""
    everything = greedy({"ban": {"ids": list(range(VOCAB_SIZE))}})
    with pytest.raises(PluginFailedError, match=r"'ban' \(nanovllm-changes .*no id above -inf"):
        open_engine(debug=True).generate([PROMPT], everything)


def test_arguments_are_taken_by_their_aliases(open_engine: Callable[..., LLM]) -> None:
    """What was valid for the request is valid for the worker, which reads it again."""
    [output] = open_engine().generate([PROMPT], greedy({"named": {"banned-ids": [1]}}))
    assert len(output.token_ids) == LENGTH


def test_arguments_that_are_valid_once_only_harm_only_their_request(
    open_engine: Callable[..., LLM],
) -> None:
    """Read again from plain data they are refused; that is found before the request is queued."""
    llm = open_engine()
    with pytest.raises(PluginFailedError, match=r"logits_processors\.once.*plain data"):
        llm.generate([PROMPT], greedy({"once": {"word": "yes"}}))
    assert len(llm.generate([PROMPT], greedy())[0].token_ids) == LENGTH


def test_processors_run_in_the_order_of_the_configuration_before_penalties_and_cuts(
    open_engine: Callable[..., LLM], reference: Reference
) -> None:
    """Of all ids but one forbidden, that one is left, whatever top_k would have kept."""
    likeliest = int(reference.logits(PROMPT)[-1].argmax())
    keep = (likeliest + 1) % VOCAB_SIZE
    rest = [one for one in range(VOCAB_SIZE) if one != keep]
    params = greedy({"ban": {"ids": rest}}, temperature=1.0, top_k=1, max_tokens=2, ignore_eos=True)
    [output] = open_engine().generate([PROMPT], params)
    assert output.token_ids == [keep, keep]


def test_options_of_a_processor_are_the_engines(
    open_engine: Callable[..., LLM], reference: Reference
) -> None:
    [likeliest] = reference.tokens(PROMPT, 1)
    llm = open_engine(logits_processors=[{"name": "ban", "options": {"always": likeliest}}])
    plain, asking = llm.generate(
        [PROMPT] * 2, [greedy(max_tokens=1), greedy({"ban": {"ids": []}}, max_tokens=1)]
    )
    assert plain.token_ids == [likeliest]
    assert asking.token_ids != [likeliest]


def test_logprobs_are_of_the_logits_before_the_processors(open_engine: Callable[..., LLM]) -> None:
    llm = open_engine()
    [plain] = llm.generate([PROMPT], greedy(logprobs=2, max_tokens=1))
    ban = {"ban": {"ids": plain.token_ids}}
    [changed] = llm.generate([PROMPT], greedy(ban, logprobs=2, max_tokens=1))
    assert plain.logprobs is not None
    assert changed.logprobs is not None
    assert changed.logprobs[0].top == plain.logprobs[0].top
    assert changed.token_ids == [plain.logprobs[0].top[1][0]]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"bann": {}}, r"no logits processor 'bann'; did you mean ban\?; it has ban, norepeat"),
        ({"ban": {}}, r"logits_processors\.ban\.ids: missing"),
        ({"ban": {"ids": [1], "id": 2}}, r"ban\.id: unknown option .* did you mean ids\?"),
        ({"ban": {"ids": ["x"]}}, r"logits_processors\.ban\.ids\[0\]: 'x' must be a whole number"),
        ({"ban": {"ids": [5000]}}, r"logits_processors\.ban: id 5000 is not below \d+"),
    ],
)
def test_a_bad_argument_harms_only_its_request(
    open_engine: Callable[..., LLM], asked: dict[str, Any], said: str
) -> None:
    llm = open_engine()
    llm.engine.add_request("good", PROMPT, greedy())
    with pytest.raises(InvalidSamplingError, match=said):
        llm.engine.add_request("bad", PROMPT, greedy(asked))
    finished = []
    while llm.engine.has_unfinished():
        finished += llm.engine.step()
    assert [len(delta.new_token_ids) for delta in finished] == [LENGTH]


def test_a_check_that_raises_harms_only_its_request(open_engine: Callable[..., LLM]) -> None:
    llm = open_engine()
    llm.engine.add_request("good", PROMPT, greedy())
    with pytest.raises(PluginFailedError, match=r"the check of 'ban' failed: KeyError: 'beast'"):
        llm.engine.add_request("bad", PROMPT, greedy({"ban": {"ids": [666]}}))
    [finished] = [output for _ in range(LENGTH + 2) for output in llm.engine.step()]
    assert len(finished.new_token_ids) == LENGTH


@pytest.mark.parametrize("asked", [3, ["ban"], {"ban": None}, {1: {}}])
def test_what_is_no_mapping_of_mappings_is_refused_at_once(asked: Any) -> None:
    with pytest.raises(InvalidSamplingError, match="must map names of processors to their arg"):
        SamplingParams(logits_processors=asked)


def test_a_processor_that_raises_ends_the_engine_with_its_distributions_name(
    open_engine: Callable[..., LLM],
) -> None:
    llm = open_engine()
    with pytest.raises(PluginFailedError) as caught:
        llm.generate([PROMPT], greedy({"broken": {}}))
    assert "logits_processor 'broken' (nanovllm-changes 1.2.3): process failed" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EngineClosedError, match="no such logits"):
        llm.generate([PROMPT], greedy())


def test_a_state_that_cannot_be_prepared_is_told_with_the_plugins_name(
    install: Install, tiny: Path
) -> None:
    source = SOURCE.replace("PREPARED.append(arguments.ids)", "raise KeyError('no table')")
    install("nanovllm-changes", {GROUP: dict.fromkeys(ALL, "changes")}, {"changes": source})
    with (
        open_tiny(tiny, logits_processors=["ban"]) as llm,
        pytest.raises(PluginFailedError, match="prepare failed: KeyError: 'no table'"),
    ):
        llm.generate([PROMPT], greedy({"ban": {"ids": []}}))


def test_the_same_processor_twice_is_a_mistake_of_the_configuration(
    open_engine: Callable[..., LLM],
) -> None:
    with pytest.raises(ConfigError, match=r"logits_processors: .*'ban' is listed 2 times"):
        open_engine(logits_processors=["ban", {"name": "ban"}])


def test_wrong_options_name_their_place_in_the_list(open_engine: Callable[..., LLM]) -> None:
    wrong = [{"name": "norepeat"}, {"name": "ban", "options": {"alway": 1}}]
    with pytest.raises(ConfigError, match=r"logits_processors\[1\]\.options\.alway: .*always"):
        open_engine(logits_processors=wrong)
    with pytest.raises(ConfigError, match=r"logits_processors\[0\]\.opts: .* did you mean options"):
        open_engine(logits_processors=[{"name": "ban", "opts": {}}])


def test_arguments_that_would_accept_typos_are_refused(install: Install, tiny: Path) -> None:
    source = SOURCE.replace("class Banned(Strict)", "class Banned(BaseModel)")
    install("nanovllm-changes", {GROUP: dict.fromkeys(ALL, "changes")}, {"changes": source})
    with pytest.raises(PluginLoadError, match='Banned must set extra="forbid"'):
        open_tiny(tiny, logits_processors=["ban"])
