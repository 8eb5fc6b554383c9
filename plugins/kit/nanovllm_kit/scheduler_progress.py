"""Checks that a prompt which was begun is finished, whatever arrives.

What arrives is drawn from the suite's seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from nanovllm_kit.conformance import PluginUnderTest
from nanovllm_kit.engine_harness import Setting
from nanovllm_kit.scheduler_base import ONE_TOKEN, SchedulingConformance
from nanovllm_kit.scheduler_fairness import CALM, Others
from nanovllm_kit.scheduler_turns import TurnWatch

CROWDS = 6


@dataclass(frozen=True)
class Crowd:
    """Once the watched prompt is begun, `per_step` short requests arrive in every step.

    There are blocks for all rows, so nobody is preempted; the prompt takes several whole budgets.
    """

    setting: Setting
    length: int
    answer: int
    per_step: int
    watched: int
    """Tokens of the watched prompt."""

    def steps_to_finish(self) -> int:
        """At one token of the watched prompt in as many steps as there are rows.

        A scheduler that shares a step among all rows is faster by far, since a step has a token for
        each row at least. One that stops the prompt while others come never gets there.
        """
        sizes = self.setting
        return self.watched * sizes.max_num_seqs + sizes.steps_ahead + CALM


def draw_decoding(draws: Random) -> Crowd:
    """The others arrive one by one and give several tokens each, so that one always decodes."""
    rows = draws.randint(4, 8)
    return _crowd(
        rows=rows,
        budget=rows + draws.randint(8, 24),
        length=draws.randint(1, 4),
        answer=draws.randint(4, 12),
        per_step=1,
        steps_ahead=draws.randint(0, 3),
        steps=draws.randint(3, 5),
    )


def draw_prompts(draws: Random) -> Crowd:
    """The others' prompts can fill the budget of every step."""
    rows, length = draws.randint(4, 8), draws.randint(4, 8)
    return _crowd(
        rows=rows,
        # A whole number of them: none is left unfinished, where it would hold a row.
        budget=draws.randint(2, rows - 1) * length,
        length=length,
        answer=1,
        per_step=rows,
        steps_ahead=0,
        steps=draws.randint(3, 5),
    )


def _crowd(
    *, rows: int, budget: int, length: int, answer: int, per_step: int, steps_ahead: int, steps: int
) -> Crowd:
    """`steps` of the whole budget would finish the watched prompt."""
    watched = steps * budget
    return Crowd(
        Setting(
            num_blocks=watched + 1 + rows * (length + answer),
            block_size=1,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=watched + 1,
            prefix_caching=False,
            steps_ahead=steps_ahead,
        ),
        length=length,
        answer=answer,
        per_step=per_step,
        watched=watched,
    )


class SchedulerProgress(SchedulingConformance):
    """No prompt stands still."""

    def test_an_admitted_prompt_is_finished_whatever_arrives(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """It gets its share of steps in which others decode, wait, or could take all the budget."""
        for _ in range(CROWDS):
            for draw in (draw_decoding, draw_prompts):
                self._finish(plugin, draw(draws), draws)

    def _finish(self, plugin: PluginUnderTest, crowd: Crowd, draws: Random) -> None:
        sizes = crowd.setting
        watch = TurnWatch(self.make_scheduler(plugin), bound=self.bound(plugin))
        harness = self.harness_of(watch, sizes, debug=False)
        others = Others(harness, draws, answer=crowd.answer)
        # Two rows stay free: whatever the order, the watched prompt is begun while others run.
        for _ in range(sizes.max_num_seqs - 2):
            others.arrive(1, crowd.length)
            harness.step()
        [request] = harness.add("watched", [1] * crowd.watched, ONE_TOKEN)
        for _ in range(CALM):
            if request.wait_steps is None:
                harness.step()
        assert request.wait_steps is not None, (
            f"a prompt waits after {CALM} steps, with rows and blocks free; {crowd}"
        )
        allowed = crowd.steps_to_finish()
        for _ in range(allowed):
            if ("watched", 0) in harness.finished:
                return
            others.arrive(crowd.per_step, crowd.length)
            harness.step()
        raise AssertionError(
            f"an admitted prompt stands still: {request.num_scheduled} of {crowd.watched} tokens "
            f"were computed in {allowed} steps while other requests arrived; unfinished prompts "
            f"must go on in steps that decode or admit others too; {crowd}"
        )
