"""Prompts share each step evenly: a short one behind a long one need not wait for all of it.

Who is admitted is decided in the order of arrival, and nobody is passed over: where the next one
does not fit, nobody behind it is admitted. So a request waits only for requests that came before
it, and cannot starve.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import PrefillShare, RequestView, Scheduler, SchedulerState

from nanovllm_scheduler_my_plugin.plugin import MyPluginOptions


class MyPluginScheduler(Scheduler):
    """Decides what prompts get of each step, over a read-only view of the engine."""

    def __init__(self, options: MyPluginOptions) -> None:
        self.options = options

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        """Divide the token budget among unfinished prompts and those admitted now."""
        work = [(r, r.num_tokens - r.num_scheduled) for r in state.prefilling]
        work += self._admitted(state, work)
        shares: list[PrefillShare] = []
        budget, blocks = state.token_budget, state.free_blocks
        for index, (request, missing) in enumerate(work):
            # What a prompt leaves of its part goes to those behind it.
            chunk = min(missing, -(-budget // (len(work) - index)))
            blocks -= state.num_new_blocks(request, chunk)
            if chunk == 0 or blocks < 0:
                break
            budget -= chunk
            shares.append(PrefillShare(request.request_id, chunk))
        return shares

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        """Whoever came last gives way, so the oldest running request always finishes."""
        return max(running, key=lambda request: request.arrival_index).request_id

    def _admitted(
        self, state: SchedulerState, work: Sequence[tuple[RequestView, int]]
    ) -> list[tuple[RequestView, int]]:
        """The waiting requests that may begin, each with the tokens that it has to compute.

        One may begin where the free pages hold its whole prompt and all that the prompts before it
        still need: prompts that wait for each other's pages would wait for ever.
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
