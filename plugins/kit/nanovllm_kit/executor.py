"""The conformance suite of executors: plans in order, results in order, late or not.

Plans and results are data. So the suite submits copies that went through pickle, and compares what
it collects with such copies.

A checkpoint's config.json with random weights is enough; which model it is does not matter. The
executor is started with the set-up that the core resolves for it, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from threading import Event, get_ident
from typing import Any, ClassVar

import pytest

from nanovllm_core.config import load_config
from nanovllm_core.errors import NanoVLLMError
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.plan import PADDED, StepPlan, StepResult, TokenMasks, WorkerInfo
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.selection import start
from nanovllm_core.worker import SingleProcessExecutor, Worker
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.executor_plans import (
    PROMPTS,
    admit,
    assert_same,
    constrained_plans,
    copied,
    decodes,
    launch,
    masks_of,
    only,
    only_id,
    run,
    run_in_two_parts,
    two_groups,
    two_prompts,
)
from nanovllm_kit.model_settings import LLAMA_LIKE, save_served

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
WINDOWS = (8, None)
PATIENCE = 5.0
"""Seconds in which any `submit` has returned that does not wait."""


class ExecutorConformance(SpecConformance):
    """The engine cannot tell how the worker is reached."""

    changes: ClassVar[Mapping[str, Any]] = {}
    """Settings of the engine beside or instead of the suite's, such as `tensor_parallel_size`.

    Random weights differ between numbers of ranks: for more than one, override `checkpoint` with a
    folder that has weights, and set `load_format: auto`.
    """

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        """A folder with the config.json of a small model that some installed plugin serves."""
        if not save_served(tmp_path):
            pytest.skip("no model plugin serves a model like Llama; override `checkpoint`")
        return tmp_path

    @pytest.fixture
    def setup(self, checkpoint: Path) -> WorkerSetup:
        """What the engine would start the executor with."""
        return start(load_config(str(checkpoint), overrides={**SETTINGS, **self.changes})).setup

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
        """A worker gives no result before `submit` has returned; so who waits, waits in vain.

        Nor does `sample`.
        """
        asked: list[Worker] = []
        waited: list[Worker] = []
        engine, returned, collect = get_ident(), Event(), Worker.collect
        returned.set()

        def held_back(worker: Worker) -> StepResult:
            asked.append(worker)
            if not returned.wait(0 if get_ident() == engine else PATIENCE):
                waited.append(worker)
            return collect(worker)

        def call(method: Callable[[Any], None], argument: StepPlan | TokenMasks) -> None:
            returned.clear()
            method(argument)
            returned.set()
            name = method.__name__
            assert not waited, f"{name} waited for the result of a step: the device would idle"

        monkeypatch.setattr(Worker, "collect", held_back)
        ahead = SETTINGS["steps_ahead"]
        with self.started(plugin, setup) as (executor, _):
            for plan in two_prompts(first_epoch=4)[:ahead]:
                call(executor.submit, plan)
            for _ in range(ahead):
                executor.collect()
            for step, plan in enumerate(constrained_plans()[:ahead]):
                call(executor.submit, plan)
                call(executor.sample, masks_of(step))
            executor.collect()
        if not asked:
            pytest.skip("its worker is no Worker of this process, so out of reach")

    def test_results_come_in_the_order_of_the_plans_however_late(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """One or several steps are submitted before the first is collected; nothing changes."""
        with self.started(plugin, setup) as (executor, _):
            at_once = run(executor, two_prompts(), ahead=0)
            for ahead in (1, 3):
                again = two_prompts(first_epoch=4 * ahead)
                assert_same(run(executor, again, ahead=ahead), at_once)

    def test_a_plan_without_the_rows_of_its_epoch_is_refused(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """A plan was lost, or came out of order: an error with both epochs, and no wrong tokens."""
        with self.started(plugin, setup) as (executor, _):
            run(executor, [admit({0: PROMPTS[0]}), *decodes((0,), 2)], ahead=0)
            [_, steady] = decodes((0,), 2, epoch=7)
            with pytest.raises(NanoVLLMError, match=r"epoch 7\b.*epoch 2\b"):
                run(executor, [steady], ahead=0)

    def test_a_step_in_two_parts_chooses_among_the_allowed_ids(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """Masks that come after the plan count, at once, for their own rows and steps alone.

        Of the last step both rows have ended on the host: it is sampled without masks.
        The step before is collected before the first part, and in a second run between the two.
        """
        with self.started(plugin, setup) as (executor, _):
            actual = run_in_two_parts(executor, ahead=0)
            between = run_in_two_parts(executor, ahead=1)
        reference = SingleProcessExecutor(plugin.options)
        try:
            reference.start(setup)
            assert_same(actual, run_in_two_parts(reference, ahead=0))
            assert_same(between, run_in_two_parts(reference, ahead=1))
        finally:
            reference.close()
        constrained = [outcome.token_ids[:2] for outcome in actual[:-1]]
        expected = [(only_id(step), only_id(step + 1)) for step in range(len(actual) - 1)]
        assert constrained == expected, "a row chose an id that its step's mask does not allow"

    def test_parts_out_of_order_are_refused(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """A plan before the masks, masks that no step waits for, masks of other rows."""
        constrained = constrained_plans()
        wrong: list[tuple[str, Sequence[StepPlan | TokenMasks]]] = [
            (r"step before it waits for .* rows \[0, 2\]", constrained[:2]),
            (r"rows \[0\] came, but no step waits", [admit({0: PROMPTS[0]}), only({0: 5})]),
            (
                r"for rows \[3\], but the step waits .* rows \[0, 2\]",
                [constrained[0], only({3: 5})],
            ),
        ]
        for said, calls in wrong:
            with (
                self.started(plugin, setup) as (executor, _),
                pytest.raises(NanoVLLMError, match=said),
            ):
                launch(executor, calls)

    def test_a_row_ends_at_its_length_or_a_stop_id_and_is_padding_from_then_on(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """`finished` with the last token; later steps that still name the row give PADDED.

        The device checks the length and the ids that the row was admitted with.
        """
        with self.started(plugin, setup) as (executor, _):
            plans = [admit({0: PROMPTS[0]}, max_length=len(PROMPTS[0]) + 2), *decodes((0,), 3)]
            results = run(executor, plans, ahead=3)
            again = admit({0: PROMPTS[0]}, stop=results[0].token_ids, epoch=3)
            last, padding = run(executor, [again, *decodes((0,), 1, epoch=4)], ahead=1)
        assert [result.finished for result in results[:2]] == [(False,), (True,)]
        assert all(result.token_ids == (PADDED,) for result in results[2:])
        assert (last.token_ids, last.finished) == (results[0].token_ids, (True,))
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

    def test_closing_twice_is_fine_and_work_is_refused_from_then_on(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        """After work, with steps in flight, and before a start; an error comes, and no wait."""
        plugin.load()(plugin.options).close()
        with self.started(plugin, setup) as (executor, _):
            for plan in two_prompts()[:3]:
                executor.submit(plan)
            executor.close()
            executor.close()
            with pytest.raises(NanoVLLMError):
                executor.submit(two_prompts()[0])
            with pytest.raises(NanoVLLMError):
                executor.collect()

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
