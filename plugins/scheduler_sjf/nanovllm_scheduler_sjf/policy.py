"""Shortest job first by remaining prompt work, with linear ageing.

The key of a request is

    key = work + ageing * arrival_step

where work is the number of known tokens whose KV is still to be computed when it joins the queue.
A shorter prompt has the lower key, and so has one that arrived earlier. Comparing two keys is the
same as comparing `work - ageing * steps waited`, for both at the same moment: every step of waiting
is worth `ageing` tokens.

The bound. Let a request of work W join at step a. Another, of work w >= 1, that arrives at step b
is admitted before it only if w + ageing * b <= W + ageing * a, so only if

    b - a <= (W - 1) / ageing

(or w + ageing * b is equal and it arrived earlier). So a request that arrives more than
(W - 1) / ageing steps after another is never admitted before it, however many arrive and however
short they are. So finitely many are admitted before it, and the default scheduler, which never
passes over the head of its queue, then admits it. The spec declares the bound
(`max_overtaking_steps`), and the conformance suite checks it. With ageing = 0 there is no bound,
and endless arrivals of shorter prompts starve it.

A preempted request joins the queue anew with its first arrival_step; its work then counts the
outputs that must be computed again.
"""

from __future__ import annotations

from nanovllm_core.api import RequestView, SchedulingPolicy
from nanovllm_scheduler_sjf.plugin import SjfOptions


class SjfPolicy(SchedulingPolicy):
    """Least prompt work first, with ageing."""

    def __init__(self, options: SjfOptions) -> None:
        self.options = options

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        work = request.num_tokens - request.num_scheduled
        return (work + self.options.ageing * request.arrival_step,)

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        """The latest arrival is preempted first, so the oldest running request always finishes."""
        return (request.arrival_index,)
