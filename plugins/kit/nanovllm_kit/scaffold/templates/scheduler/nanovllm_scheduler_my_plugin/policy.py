"""Short answers first, with ageing.

The key of a request is

    key = tokens of answer asked for + ageing * arrival step

and the lowest key is served first. A request for A tokens that arrives at step a is passed over by
one that arrives at step b only if ageing * (b - a) < A: so nobody who arrives more than A / ageing
steps after it is served before it, and it cannot starve.
"""

from __future__ import annotations

from nanovllm_core.api import RequestView, SchedulingPolicy

from nanovllm_scheduler_my_plugin.plugin import MyPluginOptions


class MyPluginPolicy(SchedulingPolicy):
    """The order of service, and who gives way when pages run out."""

    def __init__(self, options: MyPluginOptions) -> None:
        self.options = options

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        """Read once, when the request joins the queue: it must not depend on the time."""
        answer = request.max_length - request.num_prompt_tokens
        return (answer + self.options.ageing * request.arrival_step,)

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        """Whoever came last gives way, so the oldest running request always finishes."""
        return (request.arrival_index,)
