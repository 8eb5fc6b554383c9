"""Longest processing time first, by the output tokens that a request may still give.

The rule is Graham's, "Bounds on Multiprocessing Timing Anomalies" (SIAM Journal on Applied
Mathematics 17, 1969). A batch is done when its last answer is. An answer of n tokens takes n steps
however empty these are, and a step with few rows reads all weights for few tokens. So the long
answers begin first, and the prompts of the short ones are computed beside them, in steps that would
otherwise be less full. That takes steps of a small budget (`limits.max_num_batched_tokens`): with a
large one all prompts are computed before anything decodes, and their order is of no matter.

The key of a request is

    key = ageing * arrival_step - outputs

where outputs is the number of tokens that it may still give. Let a request of n outputs join at
step a. Another, of m outputs, that arrives at step b is admitted before it only if
ageing * b - m <= ageing * a - n, so only if

    b - a <= (m - n) / ageing

No request gives more outputs than the model has positions, so with ageing finitely many are
admitted before any. The spec declares no bound, since it does not know the longest sequence.
"""

from __future__ import annotations

from nanovllm_core.api import RequestView, SchedulingPolicy
from nanovllm_scheduler_lpt.plugin import LptOptions


class LptPolicy(SchedulingPolicy):
    """Most output tokens first, with ageing; blocks are reserved for whole answers."""

    def __init__(self, options: LptOptions) -> None:
        self.options = options
        self.reserve = options.reserve

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        outputs = request.max_length - request.num_tokens
        return (self.options.ageing * request.arrival_step - outputs,)

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        """The latest arrival is preempted first, so the oldest running request always finishes."""
        return (request.arrival_index,)
