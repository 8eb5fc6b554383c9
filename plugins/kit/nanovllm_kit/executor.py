"""The conformance suite of executors: plans in order, results in order, late or not.

Plans and results are data. So the suite submits copies that went through pickle, and compares what
it collects with such copies.

A checkpoint's config.json with random weights is enough; which model it is does not matter. The
executor is started with the set-up that the core resolves for it, on a CPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Event, get_ident
from typing import Any, TypeVar

import numpy as np
import pytest

from nanovllm_core.config import load_config
from nanovllm_core.errors import NanoVLLMError, PluginError
from nanovllm_core.interfaces.constraint import allow_ids
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.plan import (
    PADDED,
    Admission,
    PrefillChunk,
    RowSampling,
    StepPlan,
    StepResult,
    TokenMasks,
    WorkerInfo,
    mask_words,
)
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.registry import get_plugin_manager, load_object
from nanovllm_core.selection import start
from nanovllm_core.worker import SingleProcessExecutor, Worker
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.model_settings import LLAMA_LIKE
from nanovllm_kit.plans import decode_plan

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "load_format": "dummy",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "steps_ahead": 3,
    "cache": {"num_blocks": 16, "block_size": 16},
}
PROMPTS = ((9, 8, 7, 6, 5), (3, 3, 1))
NUM_DECODES = 5
WINDOWS = (8, None)
PATIENCE = 5.0
"""Seconds in which any `submit` has returned that does not wait."""


class ExecutorConformance(SpecConformance):
    """The engine cannot tell how the worker is reached."""

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        """A folder with the config.json of a small model that some installed plugin serves."""
        import transformers

        manager = get_plugin_manager()
        for name in manager.names("model"):
            model_class: Any = getattr(transformers, name, None)
            with suppress(PluginError):  # A broken model plugin is no matter of the executor's.
                load_object(manager.spec("model", name).impl)
                if model_class is None:
                    continue
                settings = {**LLAMA_LIKE, "architectures": [name]}
                model_class.config_class(**settings).save_pretrained(tmp_path)
                return tmp_path
        pytest.skip("no installed model plugin is known to transformers; override `checkpoint`")

    @pytest.fixture
    def setup(self, checkpoint: Path) -> WorkerSetup:
        """What the engine would start the executor with."""
        return start(load_config(str(checkpoint), overrides=SETTINGS)).setup

    @contextmanager
    def started(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> Iterator[tuple[Executor, WorkerInfo]]:
        """A fresh executor, closed at the end."""
        executor = plugin.load()(plugin.options)
        assert isinstance(executor, Executor)
        with ExitStack() as stack:
            stack.callback(executor.close)
            yield executor, executor.start(setup)

    def test_started_it_says_what_it_offers(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """The sizes of the set-up, and the blocks that the engine may use."""
        with self.started(plugin, setup) as (_, info):
            assert info.num_blocks == SETTINGS["cache"]["num_blocks"]
            assert info.block_size == setup.block_size
            assert info.max_model_len == setup.max_model_len
            assert info.vocab_size == LLAMA_LIKE["vocab_size"]
            assert info.attention
            assert info.device
            assert copied(info) == info, "a WorkerInfo is another one after pickle"

    def test_results_are_those_of_the_core(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """The same tokens, flags and log-probabilities as from the core's own, step by step."""
        with self.started(plugin, setup) as (executor, _):
            actual = run(executor, two_prompts(), ahead=0)
        reference = SingleProcessExecutor(plugin.options)
        try:
            reference.start(setup)
            assert_same(actual, run(reference, two_prompts(), ahead=0))
        finally:
            reference.close()

    def test_each_cache_group_has_block_tables_of_its_own(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """Of a model with windows in every other layer, the same as from the core's own.

        Blocks are appended in each group, and one that lies behind the window goes to another row.
        """
        setup = with_windows(setup)
        with self.started(plugin, setup) as (executor, info):
            assert info.cache_windows == WINDOWS
            actual = run(executor, two_groups(), ahead=1)
        reference = SingleProcessExecutor(plugin.options)
        try:
            reference.start(setup)
            assert_same(actual, run(reference, two_groups(), ahead=0))
        finally:
            reference.close()

    def test_submit_does_not_wait_for_the_step(
        self, plugin: PluginUnderTest, setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker gives no result before `submit` has returned; so who waits, waits in vain."""
        asked: list[Worker] = []
        waited: list[Worker] = []
        engine, returned, collect = get_ident(), Event(), Worker.collect
        returned.set()

        def held_back(worker: Worker) -> StepResult:
            asked.append(worker)
            if not returned.wait(0 if get_ident() == engine else PATIENCE):
                waited.append(worker)
            return collect(worker)

        monkeypatch.setattr(Worker, "collect", held_back)
        with self.started(plugin, setup) as (executor, _):
            for plan in two_prompts()[: SETTINGS["steps_ahead"]]:
                returned.clear()
                executor.submit(plan)
                returned.set()
                assert not waited, "submit waited for the result of a step: the device would idle"
            executor.collect()
        if not asked:
            pytest.skip("its worker is no Worker of this process, so out of reach")

    @pytest.mark.parametrize("ahead", [1, 3])
    def test_results_come_in_the_order_of_the_plans_however_late(
        self, plugin: PluginUnderTest, setup: WorkerSetup, ahead: int
    ) -> None:
        """Several steps are submitted before the first is collected; nothing changes."""
        with self.started(plugin, setup) as (executor, _):
            at_once = run(executor, two_prompts(), ahead=0)
            assert_same(run(executor, two_prompts(first_epoch=4), ahead=ahead), at_once)

    def test_a_plan_without_the_rows_of_its_epoch_is_refused(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """A plan was lost, or came out of order: an error with both epochs, and no wrong tokens."""
        with self.started(plugin, setup) as (executor, _):
            run(executor, [admit({0: PROMPTS[0]}), *decodes((0,), 2)], ahead=0)
            [_, steady] = decodes((0,), 2, epoch=7)
            with pytest.raises(NanoVLLMError, match=r"epoch 7\b.*epoch 2\b"):
                run(executor, [steady], ahead=0)

    @pytest.mark.parametrize("ahead", [0, 1])
    def test_a_step_in_two_parts_chooses_among_the_allowed_ids(
        self, plugin: PluginUnderTest, setup: WorkerSetup, ahead: int
    ) -> None:
        """Masks that come after the plan count, at once, for their own rows and steps alone.

        With `ahead` the step before is collected between the two parts.
        """
        with self.started(plugin, setup) as (executor, _):
            actual = run_in_two_parts(executor, ahead)
        reference = SingleProcessExecutor(plugin.options)
        try:
            reference.start(setup)
            assert_same(actual, run_in_two_parts(reference, ahead))
        finally:
            reference.close()
        constrained = [outcome.token_ids[0] for outcome in actual]
        expected = [only_id(step) for step in range(len(actual))]
        assert constrained == expected, "a row chose an id that its step's mask does not allow"

    def test_parts_out_of_order_are_refused(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """A plan before the masks, masks that no step waits for, masks of other rows."""
        constrained = constrained_plans()
        wrong: list[tuple[str, Sequence[StepPlan | TokenMasks]]] = [
            (r"step before it waits for .* rows \[0\]", constrained[:2]),
            (r"rows \[0\] came, but no step waits", [admit({0: PROMPTS[0]}), only({0: 5})]),
            (r"for rows \[3\], but the step waits .* rows \[0\]", [constrained[0], only({3: 5})]),
        ]
        for said, calls in wrong:
            with (
                self.started(plugin, setup) as (executor, _),
                pytest.raises(NanoVLLMError, match=said),
            ):
                launch(executor, calls)

    def test_a_row_ends_at_its_length_and_is_padding_from_then_on(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """`finished` with the last token; later steps that still name the row give PADDED."""
        with self.started(plugin, setup) as (executor, _):
            plans = [admit({0: PROMPTS[0]}, max_length=len(PROMPTS[0]) + 2), *decodes((0,), 3)]
            results = run(executor, plans, ahead=3)
        assert [result.finished for result in results[:2]] == [(False,), (True,)]
        assert all(result.token_ids == (PADDED,) for result in results[2:])

    def test_a_row_ends_at_a_stop_id(self, plugin: PluginUnderTest, setup: WorkerSetup) -> None:
        """The device checks the ids that the row was admitted with."""
        with self.started(plugin, setup) as (executor, _):
            [first] = run(executor, [admit({0: PROMPTS[0]})], ahead=0)
            again = admit({0: PROMPTS[0]}, stop=first.token_ids, epoch=2)
            last, padding = run(executor, [again, *decodes((0,), 1, epoch=3)], ahead=1)
        assert (last.token_ids, last.finished) == (first.token_ids, (True,))
        assert padding.token_ids == (PADDED,)

    def test_a_row_may_change_hands(self, plugin: PluginUnderTest, setup: WorkerSetup) -> None:
        """A request in the row and blocks of two others before it: as if it ran alone."""
        outcomes = []
        with self.started(plugin, setup) as (executor, _):
            for turn in range(3):
                prompt, epoch = PROMPTS[turn % 2], 1 + 2 * turn
                plans = [admit({0: prompt}, epoch=epoch), *decodes((0,), 3, epoch + 1)]
                outcomes.append(run(executor, plans, ahead=2))
        first, other, again = outcomes
        assert_same(again, first)
        assert other != first

    def test_closing_twice_is_fine(self, plugin: PluginUnderTest, setup: WorkerSetup) -> None:
        """After work, with steps in flight, and before a start."""
        plugin.load()(plugin.options).close()
        with self.started(plugin, setup) as (executor, _):
            for plan in two_prompts()[:3]:
                executor.submit(plan)
            executor.close()
            executor.close()

    def test_two_executors_live_side_by_side(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """No fixed port, no shared name: two engines on one machine."""
        with (
            self.started(plugin, setup) as (first, _),
            self.started(plugin, setup) as (second, _),
        ):
            assert_same(run(first, two_prompts(), ahead=1), run(second, two_prompts(), ahead=1))

    def test_a_start_that_fails_is_an_error_of_the_project(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """Of a checkpoint without weights, however far away the worker is; closing is fine then."""
        config = setup.config.model_copy(update={"load_format": "auto"})
        executor = plugin.load()(plugin.options)
        try:
            with pytest.raises(NanoVLLMError, match="safetensors"):
                executor.start(replace(setup, config=config))
        finally:
            executor.close()

    def test_after_closing_work_is_refused(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """With an error of the project, not by waiting for ever."""
        with self.started(plugin, setup) as (executor, _):
            executor.close()
            with pytest.raises(NanoVLLMError):
                executor.submit(two_prompts()[0])
            with pytest.raises(NanoVLLMError):
                executor.collect()


def with_windows(setup: WorkerSetup) -> WorkerSetup:
    """The same for a model of the kit's: of its four layers two make each cache group."""
    distribution = "nanovllm-kit"
    model = ResolvedPlugin(
        kind="model",
        name="AlternatingForCausalLM",
        distribution=distribution,
        version=version(distribution),
        impl="nanovllm_kit.alternating_model:AlternatingForCausalLM",
        interface=setup.model.interface,
    )
    layers = {"num_hidden_layers": 4, "windows": WINDOWS}
    return replace(setup, model=model, model_config={**LLAMA_LIKE, **layers})


Data = TypeVar("Data", StepPlan, StepResult, TokenMasks, WorkerInfo)


def copied(original: Data) -> Data:
    """What another process would receive: equal, and another object."""
    copy: Data = pickle.loads(pickle.dumps(original))
    return copy


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step gave.

    `logprobs` by entry and id: those of the most likely ids, and of the sampled one under `None`.
    """

    token_ids: tuple[int, ...]
    finished: tuple[bool, ...]
    logprobs: Mapping[tuple[int, int | None], float]


def outcome_of(result: StepResult) -> Outcome:
    """The same as plain data; it must be data, of the types that `StepResult` states."""
    assert isinstance(result.logprobs, Mapping), f"logprobs is {result.logprobs!r}, not a mapping"
    dtypes = result.token_ids.dtype, result.finished.dtype
    assert dtypes == (np.dtype(np.int32), np.dtype(np.bool_)), (
        f"token ids and finish flags have the dtypes {dtypes}"
    )
    assert copied(result) == result, "a result is another one after pickle"
    logprobs: dict[tuple[int, int | None], float] = {}
    for entry, each in result.logprobs.items():
        logprobs[entry, None] = each.token_logprob
        logprobs |= {(entry, token_id): value for token_id, value in each.top}
    return Outcome(tuple(result.token_ids.tolist()), tuple(result.finished.tolist()), logprobs)


def assert_same(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Step by step; log-probabilities may be computed by other threads, in another order."""
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.token_ids == other.token_ids, f"token ids of step {number}"
        assert one.finished == other.finished, f"finish flags of step {number}"
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4), (
            f"log-probabilities of step {number}"
        )


def admit(
    prompts: dict[int, Sequence[int]],
    *,
    max_length: int = 32,
    stop: tuple[int, ...] = (),
    logprobs: int | None = None,
    constrained: bool = False,
    epoch: int = 1,
    tables: Sequence[Sequence[int]] | None = None,
) -> StepPlan:
    """A step that computes whole prompts, each in a row of its own with two blocks of its own.

    Or with these `tables`, one for each cache group. No row decodes.
    """
    admissions = tuple(
        Admission(
            row=row,
            token_ids=np.array(prompt, np.int32),
            num_prompt_tokens=len(prompt),
            num_computed=0,
            block_ids=np.array(tables or [(3 + 2 * row, 2 * row)], np.int32),
            max_length=max_length,
            sampling=RowSampling(stop_token_ids=stop, logprobs=logprobs, constrained=constrained),
        )
        for row, prompt in prompts.items()
    )
    chunks = tuple(PrefillChunk(row, 0, len(prompt), True) for row, prompt in prompts.items())
    return decode_plan((), epoch, admissions=admissions, prefill=chunks, samples_later=constrained)


def decodes(rows: Sequence[int], count: int, epoch: int = 2) -> list[StepPlan]:
    """The same decode step, several times: the first lists the rows, the others leave them out."""
    first = decode_plan(rows, epoch)
    return [first, *[replace(first, decode_rows=None)] * (count - 1)]


def two_prompts(first_epoch: int = 1) -> list[StepPlan]:
    """Two requests, the second joining while the first decodes, then steady steps of both.

    The second asks for log-probabilities, the first does not.
    """
    alone = first_epoch + 1
    join = admit({2: PROMPTS[1]}, logprobs=2)
    return [
        admit({0: PROMPTS[0]}, epoch=first_epoch),
        *decodes((0,), 1, alone),
        replace(join, epoch=alone, num_decode=1, decode_rows=None),
        *decodes((0, 2), NUM_DECODES, alone + 1),
    ]


def two_groups() -> list[StepPlan]:
    """A row whose 15 ids fill a block of each group, and which then gets another in each.

    Then the first block lies behind the first group's window, and a second row computes its ids
    there.
    """
    ids = tuple(range(20, 35))
    first = admit({0: ids}, tables=[[3], [7]], logprobs=3)
    more = np.array([(0, 0, 1, 5), (0, 1, 1, 1)], np.int32)
    start, *steady = decodes((0,), 12)
    steady[0] = replace(steady[0], appends=more)
    join = admit({1: ids[::-1]}, tables=[[3], [9]], logprobs=3)
    join = replace(join, epoch=2, num_decode=1, decode_rows=None)
    return [first, start, *steady, join, *decodes((0, 1), 2, epoch=3)]


def only_id(step: int) -> int:
    """The one id that row 0 may choose in this step: of another word of the mask each time."""
    return (37 * step + 5) % int(LLAMA_LIKE["vocab_size"])


def constrained_plans() -> list[StepPlan]:
    """A constrained request in row 0; one in row 2, which is free, joins while it decodes."""
    joins = replace(admit({2: PROMPTS[1]}, logprobs=2), epoch=2, num_decode=1, decode_rows=None)
    later = [*decodes((0,), 2), joins, *decodes((0, 2), NUM_DECODES, 3)]
    first = admit({0: PROMPTS[0]}, constrained=True)
    return [first, *(replace(plan, samples_later=True) for plan in later)]


def only(ids: Mapping[int, int]) -> TokenMasks:
    """Masks by which each of these rows may choose one id alone."""
    allowed = np.zeros((len(ids), mask_words(LLAMA_LIKE["vocab_size"])), np.int32)
    for mask, token_id in zip(allowed, ids.values(), strict=True):
        allow_ids(mask, [token_id])
    return TokenMasks(rows=np.array([*ids], np.int32), allowed=allowed)


def all_ids(row: int) -> TokenMasks:
    """A mask that holds nothing back."""
    return TokenMasks(rows=np.array([row], np.int32), allowed=~only({row: 0}).allowed | 1)


def launch(executor: Executor, calls: Sequence[StepPlan | TokenMasks]) -> None:
    """Submit plans and masks in this order, then collect a result."""
    for call in calls:
        if isinstance(call, TokenMasks):
            executor.sample(copied(call))
        else:
            executor.submit(copied(call))
    executor.collect()


def run_in_two_parts(executor: Executor, ahead: int) -> list[Outcome]:
    """Submit, collect what is `ahead` steps behind, sample; row 0 may choose `only_id`."""
    results: list[Outcome] = []
    plans = constrained_plans()
    for step, plan in enumerate(plans):
        executor.submit(copied(plan))
        if step >= ahead > 0:
            results.append(outcome_of(executor.collect()))
        executor.sample(copied(only({0: only_id(step)})))
        if not ahead:
            results.append(outcome_of(executor.collect()))
    return results + [outcome_of(executor.collect()) for _ in range(ahead)]


def run(executor: Executor, plans: Sequence[StepPlan], ahead: int) -> list[Outcome]:
    """Submit all plans and collect all results, `ahead` steps behind.

    Each plan is a copy that went through pickle, so that no two are one object.
    """
    results: list[Outcome] = []
    for number, plan in enumerate(plans):
        executor.submit(copied(plan))
        if number >= ahead:
            results.append(outcome_of(executor.collect()))
    results += [outcome_of(executor.collect()) for _ in range(min(ahead, len(plans)))]
    return results
