"""When an abort takes effect that comes while the engine is at work."""

from __future__ import annotations

import pytest

from nanovllm_core.engine import FcfsPolicy, TokenBudgetScheduler
from nanovllm_core.errors import EngineClosedError
from nanovllm_core.interfaces.plan import StepPlan, StepResult
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import RequestView
from nanovllm_kit.engine_harness import Harness, Letters, Setting


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def test_an_abort_that_comes_within_a_step_is_answered_by_that_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it is the last request, after which nobody may ask for another step."""
    harness = Harness(Setting(steps_ahead=0))
    harness.add("gone", range(5), greedy(20))
    submit = harness.executor.submit

    def aborting(plan: StepPlan) -> None:
        harness.engine.abort("gone")
        submit(plan)

    monkeypatch.setattr(harness.executor, "submit", aborting)
    (output,) = harness.step()
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 1)
    assert not harness.engine.has_unfinished()


class AbortsWhenAdding(TokenBudgetScheduler):
    """Aborts "gone" as soon as a second request is added."""

    harness: Harness

    def add(self, request: RequestView) -> None:
        super().add(request)
        if request.request_id == "late":
            self.harness.engine.abort("gone")


def test_an_abort_that_comes_while_a_request_is_added_precedes_the_next_plan() -> None:
    """Nothing is computed for a request that was aborted before the step began."""
    scheduler = AbortsWhenAdding(FcfsPolicy())
    scheduler.harness = harness = Harness(scheduler=scheduler)
    harness.add("gone", range(5), greedy(20))
    harness.add("late", range(20, 26), greedy(2))
    harness.step()
    (admission,) = harness.executor.plans[0].admissions
    assert admission.token_ids.tolist() == [*range(20, 26)]
    harness.run()
    assert harness.finished["gone", 0].token_ids == []


def test_an_abort_of_samples_ends_all_of_them_and_frees_the_blocks_that_they_share() -> None:
    harness = Harness(Setting(max_num_seqs=3, steps_ahead=0))
    harness.add("gone", range(9), greedy(20, n=3))
    for _ in range(4):
        harness.step()
    assert harness.engine.stats.running == 3
    harness.engine.abort("gone")
    assert harness.engine.stats.free_blocks == harness.setting.num_blocks
    harness.run()
    assert sorted(index for _, index in harness.finished) == [0, 1, 2]


def test_an_output_aborted_before_its_admission_has_nothing() -> None:
    """No token, no text, no cached token, no number of steps waited."""
    harness = Harness(Setting(max_num_seqs=1))
    harness.add("first", range(9), greedy(4))
    harness.add("gone", range(9), greedy(4), detokenizer=Letters)
    harness.step()
    harness.engine.abort("gone")
    output = harness.run()["gone", 0]
    assert (output.token_ids, output.text, output.new_text) == ([], "", "")
    assert (output.num_cached_tokens, output.wait_steps, output.logprobs) == (0, None, None)
    assert (output.finish_reason, output.stop_reason, output.index) == ("abort", None, 0)


@pytest.mark.parametrize("part", ["_carry_out_aborts", "_absorb"])
def test_only_the_wait_for_a_result_can_be_interrupted_and_taken_up_again(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the parts of a step round it ends the engine, though a wait was interrupted."""
    harness = Harness()
    harness.add("a", range(5), greedy(12))

    def interrupted(*_: object) -> StepResult:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(harness.executor, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            harness.engine.step()
    monkeypatch.setattr(harness.engine, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        harness.engine.step()
    with pytest.raises(EngineClosedError, match="ended with KeyboardInterrupt"):
        harness.engine.step()


def test_an_error_of_the_executor_while_its_result_is_waited_for_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only Ctrl-C is no error of the step."""
    harness = Harness()
    harness.add("a", range(5), greedy(12))

    def broken() -> StepResult:
        raise OSError("the device is gone")

    monkeypatch.setattr(harness.executor, "collect", broken)
    with pytest.raises(OSError, match="gone"):
        harness.engine.step()
    with pytest.raises(EngineClosedError, match="ended with OSError: the device is gone"):
        harness.engine.step()


def test_an_abort_of_an_id_that_nobody_has_does_not_end_a_later_request_of_that_id() -> None:
    harness = Harness()
    harness.engine.abort("later")
    harness.add("later", range(5), greedy(3))
    assert harness.run()["later", 0].finish_reason == "length"
