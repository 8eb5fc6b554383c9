"""Prompts share each step evenly, so that a short prompt does not wait for a whole long one.

Requests are admitted in order of arrival. If the next one does not fit, no request behind it is
admitted. So a request waits only for requests that arrived before it, and cannot starve.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import PrefillShare, RequestView, Scheduler, SchedulerState

from nanovllm_scheduler_my_plugin.plugin import MyPluginOptions


class MyPluginScheduler(Scheduler):
    """Decides the prompt tokens of each step, from a read-only view of the engine."""

    def __init__(self, options: MyPluginOptions) -> None:
        self.options = options

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        """Divide the token budget among unfinished prompts and those admitted now."""
        work = [(r, r.num_tokens - r.num_scheduled) for r in state.prefilling]
        work += self._admitted(state, work)
        shares: list[PrefillShare] = []
        budget, blocks = state.token_budget, state.free_blocks
        for index, (request, missing) in enumerate(work):
            # The unused part of a share goes to the prompts behind it.
            chunk = min(missing, -(-budget // (len(work) - index)))
            blocks -= state.num_new_blocks(request, chunk)
            if chunk == 0 or blocks < 0:
                break
            budget -= chunk
            shares.append(PrefillShare(request.request_id, chunk))
        return shares

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        """The latest arrival is preempted first, so the oldest running request always finishes."""
        return max(running, key=lambda request: request.arrival_index).request_id

    def _admitted(
        self, state: SchedulerState, work: Sequence[tuple[RequestView, int]]
    ) -> list[tuple[RequestView, int]]:
        """The waiting requests to admit, each with the tokens that it has to compute.

        A request is admitted if the free blocks hold its whole prompt and the rest of the prompts
        before it. Prompts that wait for each other's blocks would wait for ever.
        """
        rows = min(state.free_rows, self.options.max_prompts - len(work))
        blocks = state.free_blocks - sum(state.num_new_blocks(*one) for one in work)
        admitted: list[tuple[RequestView, int]] = []
        for request in sorted(state.waiting, key=lambda request: request.arrival_index):
            missing = request.num_tokens - state.num_cached_tokens(request)
            blocks -= state.num_new_blocks(request, missing)
            if len(admitted) >= rows or blocks < 0:
                break
            admitted.append((request, missing))
        return admitted
