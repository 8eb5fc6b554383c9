"""The conformance suite of logits processors.

Shape suffixes as in `nanovllm_core.interfaces.logits_processor`.
"""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tokenizers
import torch
from pydantic import BaseModel, ValidationError
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm_core.config import explain_options
from nanovllm_core.errors import ConfigError
from nanovllm_core.interfaces.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
)
from nanovllm_core.interfaces.specs import LogitsProcessorSpec
from nanovllm_core.registry import read_options
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.reachable import assert_steady, count_reachable

END = "<end>"
VOCAB, LENGTH = 257, 32
"""An id for each byte and one for the end of a text; what a row may hold."""
PROMPT = (7, 3, 3, 11)
Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a prompt and of what was given so far."""
OUTPUTS: Sequence[tuple[int, ...]] = ((), (4,), (9, 9, 2, 30, 1, 12), (5,) * 28)
"""What four rows with this prompt have given so far; the last one's ids fill the table."""
ROWS: Sequence[Row] = (
    *((PROMPT, given) for given in OUTPUTS),
    *(((first,), ()) for first in (3, 7, 5, 30)),
)
"""Prompt and outputs of each row. Of the last four one id is known: a prompt may be that short, and
a row that the device has ended is given so. There are four, so that of up to four different
`arguments` each has one."""
NUM_DRAWS, ALPHABETS = 32, (2, 3, 5, VOCAB)
"""Further batches of rows are drawn where different arguments act alike on `ROWS`. Their ids are of
so many, since few ids repeat sooner."""
KEPT_ROUNDS, KEPT_CALLS = 4, 40
WAITING = (
    *("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount"),
)
"""Operations whose result the host, or a shape, waits for."""
READING = ("tolist", "cpu", "numpy", "item", "__array__", "__bool__", "__int__", "__float__")
"""Methods of a tensor that bring its values to the host; on a CPU they may be no operation."""


class LogitsProcessorConformance(SpecConformance):
    """Rows are changed in place, each by its own request alone, without waiting for the device."""

    arguments: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """What requests ask, as in `SamplingParams.logits_processors`; row i takes number i, round.

    Give two that act differently on the suite's ids: whether each row gets what it asked for shows
    only there.
    """

    @pytest.fixture
    def context(self, tmp_path: Path) -> LogitsContext:
        """A small engine on the CPU, with a tokenizer that has an id for every byte."""
        write_tokenizer(tmp_path)
        return LogitsContext(
            device=torch.device("cpu"),
            vocab_size=VOCAB,
            max_model_len=LENGTH,
            max_num_seqs=len(ROWS),
            tokenizer=str(tmp_path),
        )

    @pytest.fixture
    def asked(self, plugin: PluginUnderTest) -> list[BaseModel]:
        """The validated arguments of one row each."""
        assert isinstance(plugin.spec, LogitsProcessorSpec)
        model = plugin.spec.arguments
        try:
            valid = [read_options(model, each) for each in self.arguments]
        except ValidationError as error:
            problem = explain_options(error, model, "arguments", plugin.spec.name)
            if self.arguments is not LogitsProcessorConformance.arguments:
                raise ConfigError(problem) from None
            pytest.skip(
                "state what a request may ask, in `arguments` of the test class or with "
                f"--argument KEY=VALUE: {problem}".replace("\n", "; ")
            )
        return [valid[i % len(valid)] for i in range(len(ROWS))]

    @pytest.fixture
    def processor(
        self, plugin: PluginUnderTest, context: LogitsContext, asked: list[BaseModel]
    ) -> LogitsProcessor:
        """Made as the worker makes it; only where there is something to ask of it."""
        return make(plugin, context)

    def test_arguments_forbid_unknown_keys(self, plugin: PluginUnderTest) -> None:
        """A misspelt key of a request is refused, never ignored."""
        assert isinstance(plugin.spec, LogitsProcessorSpec)
        extra = plugin.spec.arguments.model_config.get("extra")
        assert extra == "forbid", f'the arguments\' model_config has extra={extra!r}, not "forbid"'

    def test_valid_arguments_are_not_refused(
        self, plugin: PluginUnderTest, asked: list[BaseModel], context: LogitsContext
    ) -> None:
        """`check` returns a list of reasons, here an empty one."""
        assert isinstance(plugin.spec, LogitsProcessorSpec)
        for arguments in asked:
            reasons = plugin.spec.check(arguments, context.vocab_size)
            assert reasons == [], f"{arguments!r} is refused: {reasons}"

    def test_every_row_keeps_an_id(
        self, processor: LogitsProcessor, asked: list[BaseModel]
    ) -> None:
        """Nothing becomes NaN or +inf, and no row is all -inf."""
        logits_SV = random_logits()
        processor.process(logits_SV, make_requests(processor, asked))
        _assert_numbers(logits_SV)
        assert (logits_SV > float("-inf")).any(-1).all(), "a row has no id left"

    def test_what_others_forbade_makes_no_nan(
        self, processor: LogitsProcessor, asked: list[BaseModel]
    ) -> None:
        """Some logits are -inf already, as a processor before this one leaves them."""
        # Each row keeps an id that it may choose, or it would be the former one's fault.
        kept_S = run(processor, asked, range(len(ROWS))).argmax(-1)
        logits_SV = random_logits()
        forbidden_SV = torch.arange(VOCAB).remainder(3).ne(1).repeat(len(ROWS), 1)
        forbidden_SV.scatter_(1, kept_S[:, None], False)
        logits_SV.masked_fill_(forbidden_SV, float("-inf"))
        processor.process(logits_SV, make_requests(processor, asked))
        _assert_numbers(logits_SV)

    def test_rows_are_changed_in_place(
        self, processor: LogitsProcessor, asked: list[BaseModel]
    ) -> None:
        """`process` changes the logits in place; the worker ignores its result."""
        logits_SV = random_logits()
        returned: object = processor.process(logits_SV, make_requests(processor, asked))
        assert returned is None, f"process returned {type(returned).__name__}, which is ignored"
        if torch.equal(logits_SV, random_logits()):
            pytest.skip(
                "it changed no logit: state `arguments`, or --argument KEY=VALUE, with which it "
                "does something"
            )

    def test_a_row_is_changed_by_its_own_request_alone(
        self, processor: LogitsProcessor, asked: list[BaseModel]
    ) -> None:
        """Alone, or in another order: the same logits."""
        together = run(processor, asked, range(len(ROWS)))
        reverse = run(processor, asked, reversed(range(len(ROWS))))
        _assert_same(reverse.flip(0), together, "the rows in reverse order")
        for row in range(len(ROWS)):
            _assert_same(run(processor, asked, [row])[0], together[row], f"row {row} alone")

    def test_each_row_gets_what_it_asked_for(
        self, plugin: PluginUnderTest, context: LogitsContext, asked: list[BaseModel]
    ) -> None:
        """Rows that ask differently, admitted in any order: as by a processor of their own."""
        different = [one for i, one in enumerate(asked) if one not in asked[:i]]
        if len(different) < 2:
            pytest.skip(
                "all rows ask for the same: if requests can ask differently, give two sets of "
                "`arguments` that differ, in the test class"
            )
        _assert_as_alone(plugin, context, ROWS, asked)
        for first, second in combinations(different, 2):
            table = _table_that_tells_apart(plugin, context, first, second)
            for turns in ((first, second), (second, first)):
                _assert_as_alone(plugin, context, table, turns * (len(table) // 2))

    def test_a_second_call_does_what_the_first_did(
        self, processor: LogitsProcessor, asked: list[BaseModel]
    ) -> None:
        """What `prepare` returns follows from the arguments, and nothing is remembered."""
        first = run(processor, asked, range(len(ROWS)))
        requests = make_requests(processor, asked)
        for _ in range(3):
            logits_SV = random_logits()
            processor.process(logits_SV, requests)
            _assert_same(logits_SV, first, "a further call")

    def test_only_known_ids_count(self, processor: LogitsProcessor, asked: list[BaseModel]) -> None:
        """Behind the known ids stands what a former request left there, or nonsense."""
        rows = range(len(ROWS))
        expected = run(processor, asked, rows)
        for filler in (-7, 3, VOCAB - 1, VOCAB + 1000):
            changed = run(processor, asked, rows, filler)
            _assert_same(changed, expected, f"ids {filler} behind the known ones")

    def test_tables_are_only_read(self, processor: LogitsProcessor, asked: list[BaseModel]) -> None:
        """The ids and lengths are the engine's."""
        requests = make_requests(processor, asked)
        before = [(r.token_ids.clone(), int(r.num_prompt), int(r.num_known)) for r in requests]
        processor.process(random_logits(), requests)
        for request, (ids, num_prompt, num_known) in zip(requests, before, strict=True):
            lengths = int(request.num_prompt), int(request.num_known)
            assert torch.equal(request.token_ids, ids), "token_ids were written"
            assert lengths == (num_prompt, num_known), "a length was written"

    def test_nothing_is_kept_of_a_call(
        self, processor: LogitsProcessor, asked: list[BaseModel]
    ) -> None:
        """No tensor of it, and nothing of every request that `prepare` was called for."""
        kept = []
        for _ in range(KEPT_ROUNDS):
            for _ in range(KEPT_CALLS):
                requests, logits_SV = make_requests(processor, asked), random_logits()
                processor.process(logits_SV, requests)
            tensors = [weakref.ref(logits_SV), *(weakref.ref(one.token_ids) for one in requests)]
            del requests, logits_SV
            gc.collect()
            left = [tuple(one.shape) for ref in tensors if (one := ref()) is not None]
            assert not left, (
                f"tensors of a call, of shapes {left}, are kept behind it: the engine writes the "
                "next step's numbers there, so compute what you need in each call"
            )
            kept.append(count_reachable(processor, type(processor)))
        remedy = "nothing of a call may be kept, and a request's state is what prepare() returns"
        assert_steady(kept, KEPT_CALLS, remedy)

    def test_it_does_not_wait_for_the_device(
        self, processor: LogitsProcessor, asked: list[BaseModel]
    ) -> None:
        """No value is read on the host, and no shape depends on one."""
        requests = make_requests(processor, asked)
        logits_SV = random_logits()
        with RefuseReading(), RefuseWaiting():  # type: ignore[no-untyped-call]
            processor.process(logits_SV, requests)


class RefuseReading(TorchFunctionMode):
    """Fails where a tensor's values are brought to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READING:
            raise AssertionError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


class RefuseWaiting(TorchDispatchMode):
    """Fails at an operation for which the host would wait on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in WAITING:
            raise AssertionError(f"{func} waits for the device")
        if name == "index" and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        ):
            raise AssertionError("indexing with a mask waits for the device; use torch.where")
        return func(*args, **(kwargs or {}))


def write_tokenizer(folder: Path) -> None:
    """The files of a tokenizer for any text, of `VOCAB` ids: an id for each byte, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {byte: token_id for token_id, byte in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def make(plugin: PluginUnderTest, context: LogitsContext) -> LogitsProcessor:
    """A fresh processor."""
    made = plugin.load()(plugin.options, context)
    assert isinstance(made, LogitsProcessor), f"{type(made).__name__} is no LogitsProcessor"
    return made


def random_logits() -> Tensor:
    """Logits of all rows, the same every time."""
    return torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(0))


def make_requests(
    processor: LogitsProcessor,
    asked: Sequence[BaseModel],
    rows: Sequence[int] = range(len(ROWS)),
    filler: int = -7,
    table: Sequence[Row] = ROWS,
) -> list[LogitsRequest]:
    """These rows of the table, prepared in this order, with `filler` behind their known ids."""
    requests = []
    for row in rows:
        prompt, outputs = table[row]
        known = [*prompt, *outputs]
        ids = known + [filler] * (LENGTH - len(known))
        requests.append(
            LogitsRequest(
                arguments=asked[row],
                state=processor.prepare(asked[row]),
                token_ids=torch.tensor(ids, dtype=torch.int32),
                num_prompt=torch.tensor(len(prompt), dtype=torch.int32),
                num_known=torch.tensor(len(known), dtype=torch.int32),
            )
        )
    return requests


def run(
    processor: LogitsProcessor,
    asked: Sequence[BaseModel],
    rows: Iterable[int],
    filler: int = -7,
    table: Sequence[Row] = ROWS,
) -> Tensor:
    """What the logits of these rows become, in a call of these rows."""
    chosen = list(rows)
    logits_SV = random_logits()[chosen].contiguous()
    processor.process(logits_SV, make_requests(processor, asked, chosen, filler, table))
    return logits_SV


def _assert_as_alone(
    plugin: PluginUnderTest,
    context: LogitsContext,
    table: Sequence[Row],
    asked: Sequence[BaseModel],
) -> None:
    """All rows at once, in both orders, become what a processor for each argument makes of them."""
    orders = [*range(len(table))], [*reversed(range(len(table)))]
    together = [run(make(plugin, context), asked, order, table=table) for order in orders]
    for arguments in (one for i, one in enumerate(asked) if one not in asked[:i]):
        rows = [row for row in orders[0] if asked[row] == arguments]
        alone = run(make(plugin, context), asked, rows, table=table)
        for order, logits_SV in zip(orders, together, strict=True):
            mixed = logits_SV[[order.index(row) for row in rows]]
            _assert_same(mixed, alone, f"rows that ask {arguments!r}, among others")


def _table_that_tells_apart(
    plugin: PluginUnderTest, context: LogitsContext, first: BaseModel, second: BaseModel
) -> Sequence[Row]:
    """Rows of which one becomes something else with the first arguments than with the second."""
    processors = make(plugin, context), make(plugin, context)
    for table in _tables():
        made = [
            run(processor, [arguments] * len(table), range(len(table)), table=table)
            for processor, arguments in zip(processors, (first, second), strict=True)
        ]
        if not torch.equal(*made):
            return table
    raise AssertionError(
        f"{first!r} and {second!r} do the same to all of the suite's rows, so a row that gets the "
        "other's would not be noticed: give `arguments` that act differently on ids below "
        f"{VOCAB}, of which a row knows at most {LENGTH}"
    )


def _tables() -> Iterator[Sequence[Row]]:
    """The suite's rows, then drawn ones, which repeat what the few of the suite do not."""
    yield ROWS
    draw = random.Random(0)
    for i in range(NUM_DRAWS):
        ids = draw.sample(range(VOCAB), ALPHABETS[i % len(ALPHABETS)])
        yield [_draw_row(draw, ids) for _ in ROWS]


def _draw_row(draw: random.Random, ids: Sequence[int]) -> Row:
    num_prompt = draw.randint(1, len(PROMPT))
    known = draw.choices(ids, k=draw.randint(num_prompt, LENGTH))
    return tuple(known[:num_prompt]), tuple(known[num_prompt:])


def _assert_numbers(logits_SV: Tensor) -> None:
    assert not logits_SV.isnan().any(), "a logit is NaN"
    assert not logits_SV.isposinf().any(), "a logit is +inf"


def _assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    differing = int((actual != expected).sum())
    assert differing == 0, f"{what}: {differing} of {expected.numel()} logits differ"
