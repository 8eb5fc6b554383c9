"""Short answers first, with ageing.

The key of a request is

    key = maximum tokens of the answer + ageing * arrival step

and the lowest key is admitted first. A request for A tokens that arrives at step a is passed over
by one that arrives at step b only if ageing * (b - a) < A. So a request that arrives more than
A / ageing steps after it is never admitted before it, and it cannot starve.
"""

from __future__ import annotations

from nanovllm_core.api import RequestView, SchedulingPolicy

from nanovllm_scheduler_my_plugin.plugin import MyPluginOptions


class MyPluginPolicy(SchedulingPolicy):
    """The order of admission, and the request to preempt when blocks run out."""

    def __init__(self, options: MyPluginOptions) -> None:
        self.options = options

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        """Read once, when the request joins the queue: it must not depend on the time."""
        answer = request.max_length - request.num_prompt_tokens
        return (answer + self.options.ageing * request.arrival_step,)

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        """The latest arrival is preempted first, so the oldest running request always finishes."""
        return (request.arrival_index,)
