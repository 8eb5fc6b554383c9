"""The suite of logits processors catches what processors are often written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.errors import ConfigError
from nanovllm_core.frontend.tokenizer import Tokenizer
from nanovllm_core.interfaces.logits_processor import LogitsContext, LogitsProcessor, LogitsRequest
from nanovllm_core.interfaces.specs import LogitsProcessorSpec, NoOptions
from nanovllm_kit import LogitsProcessorConformance, PluginUnderTest
from nanovllm_kit.logits_processor import ROWS, VOCAB, write_tokenizer

Process = Callable[[Tensor, Sequence[LogitsRequest]], Any]


class Nothing(BaseModel):
    """No arguments."""


ASKED: list[BaseModel] = [Nothing() for _ in ROWS]


class Processor(LogitsProcessor):
    """Does as it is told."""

    def __init__(self, does: Process) -> None:
        self._does = does

    def prepare(self, arguments: BaseModel) -> None:
        return None

    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        return self._does(logits_SV, requests)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "wait",
    [
        lambda logits, requests: requests[0].token_ids.tolist(),
        lambda logits, requests: requests[0].token_ids.cpu(),
        lambda logits, requests: requests[0].token_ids.numpy(),
        lambda logits, requests: int(requests[0].num_known),
        lambda logits, requests: requests[0].num_known.item(),
        lambda logits, requests: bool(requests[0].num_known > 3),
        lambda logits, requests: torch.unique(requests[0].token_ids),
        lambda logits, requests: torch.bincount(requests[0].token_ids.clamp(min=0)),
        lambda logits, requests: logits[logits > 0],
        lambda logits, requests: logits.nonzero(),
    ],
    ids=["tolist", "cpu", "numpy", "int", "item", "bool", "unique", "bincount", "mask", "nonzero"],
)
def test_reading_a_value_on_the_host_is_caught(wait: Process) -> None:
    """On a CPU some of these are no operation at all."""
    suite = LogitsProcessorConformance()
    with pytest.raises(AssertionError, match="waits for the device"):
        suite.test_it_does_not_wait_for_the_device(Processor(wait), ASKED)


def test_work_on_the_device_does_not_wait() -> None:
    suite = LogitsProcessorConformance()
    suite.test_it_does_not_wait_for_the_device(
        Processor(lambda logits, requests: logits.where(logits > 0, 0).sum()), ASKED
    )


def test_the_suite_s_tokenizer_writes_any_text_in_ids_of_the_suite_s_vocabulary(
    tmp_path: Path,
) -> None:
    """For whoever reads the folder: the engine's own tokenizer, or transformers."""
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    ours = Tokenizer.find(tmp_path)
    assert ours is not None
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert ours.backend.get_vocab_size() == len(theirs) == VOCAB
    assert ours.eos_token_ids == (theirs.eos_token_id,) == (VOCAB - 1,)
    for text in (" fox", "Mia\n", "naïve 狐"):
        assert ours.decode(ours.encode(text)) == text
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)


def test_stated_arguments_that_no_request_may_ask_are_an_error() -> None:
    """A skip would hide that nothing was tested."""

    class Suite(LogitsProcessorConformance):
        arguments = ({"bias": 1},)

    spec = LogitsProcessorSpec(name="plain", impl="a:B", contract=1)
    plugin = PluginUnderTest(spec, NoOptions(), "a")
    with pytest.raises(ConfigError, match=r"arguments\.bias: unknown option"):
        Suite.asked.__wrapped__(Suite(), plugin)  # type: ignore[attr-defined]


def test_logits_that_are_returned_and_not_changed_are_caught() -> None:
    suite = LogitsProcessorConformance()
    with pytest.raises(AssertionError, match="process returned Tensor, which is ignored"):
        suite.test_rows_are_changed_in_place(Processor(lambda logits, requests: logits - 1), ASKED)


def test_a_processor_that_changes_nothing_proves_nothing() -> None:
    suite = LogitsProcessorConformance()
    with pytest.raises(pytest.skip.Exception, match="state `arguments`"):
        suite.test_rows_are_changed_in_place(Processor(lambda logits, requests: None), ASKED)


def lower_the_last_but_one(logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
    """A row with one id has none before its last."""
    for logits_V, request in zip(logits_SV, requests, strict=True):
        logits_V[request.token_ids[(request.num_known - 2).long()].long()] -= 1


def test_an_id_that_a_row_of_one_does_not_have_is_not_read() -> None:
    """A prompt may be one id long, and a row that the device has ended is given so."""
    suite = LogitsProcessorConformance()
    with pytest.raises((AssertionError, IndexError)):
        suite.test_only_known_ids_count(Processor(lower_the_last_but_one), ASKED)


def lower_the_one_behind(logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
    """Reads on behind the known ids, where some number always stands."""
    for logits_V, request in zip(logits_SV, requests, strict=True):
        behind = request.num_known.long().clamp(max=len(request.token_ids) - 1)
        logits_V[request.token_ids[behind].long() % len(logits_V)] -= 1


def test_what_stands_behind_the_known_ids_must_not_count() -> None:
    suite = LogitsProcessorConformance()
    with pytest.raises(AssertionError, match="behind the known ones"):
        suite.test_only_known_ids_count(Processor(lower_the_one_behind), ASKED)


def subtract_the_mean(logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
    logits_SV -= logits_SV.mean(-1, keepdim=True)


def multiply_by_a_mask(logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
    logits_SV *= torch.arange(VOCAB) % 2


def forbid_all_but_three_and_normalise(
    logits_SV: Tensor, requests: Sequence[LogitsRequest]
) -> None:
    """As a grammar does; where another processor forbids all three, the fault is shared."""
    logits_SV[:, 3:] = -torch.inf
    logits_SV.copy_(logits_SV.log_softmax(-1))


@pytest.mark.parametrize("planted", [subtract_the_mean, multiply_by_a_mask])
def test_arithmetic_on_what_others_forbade_is_caught(planted: Process) -> None:
    """-inf less -inf, and 0 times -inf, are NaN."""
    suite = LogitsProcessorConformance()
    suite.test_every_row_keeps_an_id(Processor(planted), ASKED)
    with pytest.raises(AssertionError, match="a logit is NaN"):
        suite.test_what_others_forbade_makes_no_nan(Processor(planted), ASKED)


def test_a_processor_with_few_ids_to_choose_from_keeps_one() -> None:
    suite = LogitsProcessorConformance()
    suite.test_what_others_forbade_makes_no_nan(
        Processor(forbid_all_but_three_and_normalise), ASKED
    )


class Shift(BaseModel):
    """How far all logits are shifted."""

    by: float


class Honest(LogitsProcessor):
    """Shifts each row's logits as it asks."""

    def shift_of(self, request: LogitsRequest) -> float:
        assert isinstance(request.arguments, Shift)
        return request.arguments.by

    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        for logits_V, request in zip(logits_SV, requests, strict=True):
            logits_V += self.shift_of(request)


class LastAdmitted(Honest):
    """Remembers what the request that was admitted last asked, for all of them."""

    def prepare(self, arguments: BaseModel) -> None:
        self.kept = arguments

    def shift_of(self, request: LogitsRequest) -> float:
        assert isinstance(self.kept, Shift)
        return self.kept.by


class FirstAdmitted(LastAdmitted):
    """The same with the first."""

    def prepare(self, arguments: BaseModel) -> None:
        self.kept = getattr(self, "kept", arguments)


class Repeats(BaseModel):
    """How many ids in a row are not given twice."""

    n: int


class NoRepeat(LogitsProcessor):
    """Forbids the id that would complete a sequence of `n` ids which the row has already."""

    def length_for(self, request: LogitsRequest) -> int:
        assert isinstance(request.arguments, Repeats)
        return request.arguments.n

    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        for logits_V, request in zip(logits_SV, requests, strict=True):
            known = request.token_ids[: int(request.num_known)].tolist()
            before = self.length_for(request) - 1
            for end in range(before, len(known)):
                if known[end - before : end] == known[len(known) - before :]:
                    logits_V[known[end]] = -torch.inf


class NoRepeatOfLastAdmitted(NoRepeat):
    """Remembers the length that the request which was admitted last asked for."""

    def prepare(self, arguments: BaseModel) -> None:
        assert isinstance(arguments, Repeats)
        self.n = arguments.n

    def length_for(self, request: LogitsRequest) -> int:
        return self.n


def compare(processor: type[LogitsProcessor], asked: Sequence[BaseModel]) -> None:
    """Run the check on rows that ask for these, in turns."""

    class Made(PluginUnderTest):
        def load(self) -> Any:
            return processor

    plugin = Made(LogitsProcessorSpec(name="shift", impl="a:B", contract=1), NoOptions(), "a")
    context = LogitsContext(
        device=torch.device("cpu"), vocab_size=VOCAB, max_model_len=32, max_num_seqs=len(ROWS),
        tokenizer="",
    )  # fmt: skip
    each = [asked[i % len(asked)] for i in range(len(ROWS))]
    LogitsProcessorConformance().test_each_row_gets_what_it_asked_for(plugin, context, each)


def compare_rows(processor: type[LogitsProcessor], shifts: Sequence[float]) -> None:
    compare(processor, [Shift(by=by) for by in shifts])


@pytest.mark.parametrize("planted", [LastAdmitted, FirstAdmitted])
def test_rows_that_get_what_another_asked_for_are_caught(planted: type[LogitsProcessor]) -> None:
    with pytest.raises(AssertionError, match="rows that ask"):
        compare_rows(planted, [1.0, 2.0])


def test_rows_that_ask_differently_get_what_they_ask_for() -> None:
    compare_rows(Honest, [1.0, 2.0, 4.0])


def test_rows_that_all_ask_for_the_same_prove_nothing_about_that() -> None:
    with pytest.raises(pytest.skip.Exception, match="give two sets of `arguments` that differ"):
        compare_rows(LastAdmitted, [1.0, 1.0])


@pytest.mark.parametrize("lengths", [(2, 3), (3, 2), (3, 5), (2, 3, 5)])
def test_arguments_that_act_alike_on_most_rows_are_told_apart(lengths: Sequence[int]) -> None:
    """On the suite's own rows each of these lengths forbids the same ids."""
    asked = [Repeats(n=n) for n in lengths]
    compare(NoRepeat, asked)
    with pytest.raises(AssertionError, match="rows that ask"):
        compare(NoRepeatOfLastAdmitted, asked)


def test_arguments_that_act_alike_on_all_rows_are_refused() -> None:
    """No row would show that it got what another asked for: 40 ids are more than a row has."""
    with pytest.raises(
        AssertionError, match=r"Repeats\(n=40\) and Repeats\(n=50\) do the same .* `arguments` that"
    ):
        compare(NoRepeatOfLastAdmitted, [Repeats(n=40), Repeats(n=50)])


class Keeps(LogitsProcessor):
    """Keeps what it is given, where `keep` says so."""

    def __init__(self, keep: str) -> None:
        self.keep = keep
        self.kept: list[object] = []

    def prepare(self, arguments: BaseModel) -> list[int]:
        state = [1, 2, 3]
        if self.keep == "states":
            self.kept.append(state)
        return state

    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        if self.keep == "logits":
            self.kept = [logits_SV]
        if self.keep == "ids":
            self.kept = [one.token_ids for one in requests]


@pytest.mark.parametrize(
    ("keep", "said"),
    [("states", "rounds of 40 it keeps"), ("logits", "are kept"), ("ids", "are kept")],
)
def test_a_processor_that_keeps_what_it_is_given_is_caught(keep: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        LogitsProcessorConformance().test_nothing_is_kept_of_a_call(Keeps(keep), ASKED)


def test_a_processor_that_keeps_nothing_passes() -> None:
    LogitsProcessorConformance().test_nothing_is_kept_of_a_call(Keeps("nothing"), ASKED)
