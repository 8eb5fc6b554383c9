"""The check that nothing is kept of requests that ended."""

from __future__ import annotations

from random import Random

from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.conformance import PluginUnderTest
from nanovllm_kit.engine_harness import Setting
from nanovllm_kit.reachable import assert_steady, count_reachable
from nanovllm_kit.scheduler_base import SchedulingConformance

ROUNDS, REQUESTS = 4, 300
SIZES = Setting(
    num_blocks=17, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=24,
    prefix_caching=False,
)  # fmt: skip
"""There are blocks for half of the rows' answers, so that requests are preempted."""


class SchedulerMemory(SchedulingConformance):
    """An engine runs for months."""

    def test_nothing_is_kept_of_requests_that_ended(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """Behind each of some rounds of equally many requests, the scheduler keeps as much."""
        scheduler = self.make_scheduler(plugin)
        harness = self.harness_of(scheduler, SIZES, debug=False)
        kept = []
        for number in range(ROUNDS):
            for index in range(REQUESTS):
                params = SamplingParams(temperature=0, max_tokens=draws.randint(1, 16))
                harness.add(f"{number}, {index}", [1] * draws.randint(1, 6), params)
            harness.run()
            kept.append(count_reachable(scheduler, plugin.load()))
        remedy = (
            "a scheduler forgets requests that ended, which are in no state of schedule() any "
            "more; a policy keeps nothing of a request"
        )
        assert_steady(kept, REQUESTS, remedy)
