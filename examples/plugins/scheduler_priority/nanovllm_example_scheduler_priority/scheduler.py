"""Strict priority classes with ageing, and chunks of unfinished prompts by class as well.

A request's turn is the pair

    (its priority, how many came before it)       until `patience` steps after its arrival
    (minus infinity, how many came before it)     from then on

and the lowest is served first: classes are strict, inside one the order is that of arrival, and who
has waited for `patience` steps goes before every class, the oldest first.

The bound. Let a request arrive at step a. One that arrives at step b and is admitted before it at
step s has the lower turn at s. If the first is overdue by then, the other is too and came earlier.
If it is not, then b <= s < a + patience. So nobody who arrives more than `patience` steps after a
request is admitted before it, and what is admitted before it is finite.

A policy could not do this: its keys are read once, when a request joins the queue, and it has no
say in how unfinished prompts share the budget. Here an urgent prompt overtakes a long one that is
half computed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from nanovllm_core.api import PrefillShare, RequestView, Scheduler, SchedulerState
from nanovllm_example_scheduler_priority.plugin import PriorityOptions


class PriorityScheduler(Scheduler):
    """The lowest `priority` first, with ageing."""

    def __init__(self, options: PriorityOptions) -> None:
        self.options = options
        self._step = 0

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        """Share the budget among unfinished prompts and the queue, in the order of their turns.

        A request is admitted only where its whole prompt fits in the blocks that the unfinished
        prompts do not need, so that none waits for another's blocks. Where the first of the queue
        does not fit, nobody behind it is admitted, so that a big request cannot starve.
        """
        self._step = state.step
        unfinished = {request.request_id for request in state.prefilling}
        free_blocks = state.free_blocks
        spare_blocks = free_blocks - sum(
            state.num_new_blocks(request, request.num_tokens - request.num_scheduled)
            for request in state.prefilling
        )
        # No queue of its own: this is called only while a row is free or a prompt is unfinished.
        next_in_queue = heapq.nsmallest(state.free_rows, state.waiting, key=self._turn)
        budget = state.token_budget
        shares: list[PrefillShare] = []
        for request in sorted((*state.prefilling, *next_in_queue), key=self._turn):
            if budget == 0:
                break
            if request.request_id in unfinished:
                chunk = min(request.num_tokens - request.num_scheduled, budget)
                fits = state.num_new_blocks(request, chunk) <= free_blocks
            else:
                missing = request.num_tokens - state.num_cached_tokens(request)
                chunk = min(missing, budget)
                spare_blocks -= state.num_new_blocks(request, missing)
                fits = spare_blocks >= 0  # and stays below for all behind one that does not fit
            if fits:
                budget -= chunk
                free_blocks -= state.num_new_blocks(request, chunk)
                shares.append(PrefillShare(request.request_id, chunk))
        return shares

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        """The last in turn is preempted, so the first always finishes.

        Turns are as of the last step with a prompt; since then, nobody has waited.
        """
        return max(running, key=self._turn).request_id

    def _turn(self, request: RequestView) -> tuple[float, int]:
        """The lowest is served first."""
        overdue = self._step - request.arrival_step >= self.options.patience
        return (-math.inf if overdue else request.priority, request.arrival_index)
