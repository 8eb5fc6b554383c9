"""Weighted fair share of tokens by tenant: the virtual token counter.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Every tenant has a
counter: the tokens that it was served, divided by its weight. A prompt's uncached tokens are
charged when it is admitted, an answer's tokens as they are written; what a preemption computes
again is charged to nobody. The next request is the oldest of the tenant with the lowest counter.

A tenant that comes back from a pause starts no lower than the lowest counter of those who wait, so
that nobody saves up credit. Where nobody waited, all counters start again at 0.

The bound. Tenant i is admitted only while its key is the lowest of those who wait, where a key is
the counter plus `ageing` times the step in which the tenant's oldest waiting request arrived. From
then until its next admission it is charged at most

    U_i = its longest prompt + max_num_seqs * its longest answer

tokens. So while two tenants both wait, their counters differ by at most the larger of U_i / w_i and
U_j / w_j, and what they get in that time, by weight, by at most the sum of these; with ageing by
`ageing` times the steps between the arrivals of their oldest waiting requests more.

Nobody starves. While a request is the oldest of its tenant i that waits, its key grows by at most
U_i / w_i, and is below some K. Counters are not negative, so a tenant whose oldest request arrived
after step K / ageing has a higher key. So finitely many are admitted before it, and then the next
of its tenant is the oldest.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm_core.api import PrefillShare, RequestView, Scheduler, SchedulerState
from nanovllm_example_scheduler_fair_share.plugin import FairShareOptions


@dataclass(slots=True)
class Account:
    """A request that is not over, and how many of its tokens its tenant has been charged."""

    request: RequestView
    tenant: str
    charged: int = 0


class FairShareScheduler(Scheduler):
    """The tenant that was served least for its weight is next."""

    def __init__(self, options: FairShareOptions) -> None:
        self.options = options
        self._waiting: dict[int, Account] = {}
        self._running: dict[int, Account] = {}
        """Both by arrival index."""
        self._queues: dict[str, list[int]] = {}
        """Heaps of arrival indices by tenant, of tenants that wait; aborted ones are left in."""
        self._counters: dict[str, float] = {}
        """Tokens by weight."""
        self._floor: float | None = None
        """The lowest counter of those who wait; None where that must be looked up."""

    # -- the queue

    def add(self, request: RequestView) -> None:
        index = request.arrival_index
        tenant = self._tenant(request)
        account = self._running.pop(index, None) or Account(request, tenant)
        self._charge_written(account)  # of a preempted request
        if tenant not in self._queues:
            self._begin_to_wait(tenant)
        self._waiting[index] = account
        heapq.heappush(self._queues[tenant], index)

    def remove(self, request: RequestView) -> None:
        """Nothing is left to do for one that was admitted; others were aborted."""
        account = self._waiting.pop(request.arrival_index, None)
        if account is not None:
            self._tidy(account.tenant)

    def _tidy(self, tenant: str) -> None:
        """Keep a waiting request at the head of the tenant's queue, and no empty queue."""
        queue = self._queues[tenant]
        while queue and queue[0] not in self._waiting:
            heapq.heappop(queue)
        if not queue:
            del self._queues[tenant]
            self._floor = None

    # -- a step

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        """Unfinished prompts first, then the queues, until budget, rows or blocks run out.

        A request is admitted only where its whole prompt fits in the blocks that the unfinished
        prompts do not need. Where the next one does not fit, nobody behind it is admitted, so that
        a big request cannot starve.
        """
        self._settle()
        shares: list[PrefillShare] = []
        budget, blocks = state.token_budget, state.free_blocks
        for request in state.prefilling:
            missing = request.num_tokens - request.num_scheduled
            chunk = min(missing, budget)
            if state.num_new_blocks(request, chunk) > blocks:
                return shares
            blocks -= state.num_new_blocks(request, missing)
            budget -= chunk
            if chunk:
                shares.append(PrefillShare(request.request_id, chunk))
        rows = state.free_rows
        if not budget or not rows:
            return shares
        turns = [self._turn(tenant) for tenant in self._queues]
        heapq.heapify(turns)
        while turns and budget and rows:
            _, index, tenant = heapq.heappop(turns)
            request = self._waiting[index].request
            missing = request.num_tokens - state.num_cached_tokens(request)
            blocks -= state.num_new_blocks(request, missing)
            if blocks < 0:
                break
            self._admit(index, missing)
            chunk = min(missing, budget)
            budget, rows = budget - chunk, rows - 1
            shares.append(PrefillShare(request.request_id, chunk))
            if tenant in self._queues:
                heapq.heappush(turns, self._turn(tenant))
        return shares

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        """The newest request of the tenant that was served most for its weight is preempted."""
        self._settle()

        def turn(request: RequestView) -> tuple[float, int]:
            return self._counters.get(self._tenant(request), 0.0), request.arrival_index

        return max(running, key=turn).request_id

    def _turn(self, tenant: str) -> tuple[float, int, str]:
        """The lowest is next: by counter and ageing, then in the order of arrival."""
        index = self._queues[tenant][0]
        step = self._waiting[index].request.arrival_step
        return self._counters[tenant] + self.options.ageing * step, index, tenant

    def _admit(self, index: int, missing: int) -> None:
        account = self._running[index] = self._waiting.pop(index)
        num_tokens = account.request.num_tokens
        self._charge(account.tenant, min(missing, num_tokens - account.charged))
        account.charged = num_tokens
        self._tidy(account.tenant)

    # -- counters

    def _settle(self) -> None:
        """Charge what was written since the last look; forget requests that are over."""
        for index, account in tuple(self._running.items()):
            self._charge_written(account)
            if not account.request.num_scheduled:
                del self._running[index]

    def _charge_written(self, account: Account) -> None:
        if account.charged:  # admitted at some time
            self._charge(account.tenant, account.request.num_tokens - account.charged)
            account.charged = account.request.num_tokens

    def _charge(self, tenant: str, tokens: int) -> None:
        weight = self.options.weights.get(tenant, self.options.default_weight)
        if tokens:
            self._counters[tenant] = self._counters.get(tenant, 0.0) + tokens / weight
            self._floor = None

    def _begin_to_wait(self, tenant: str) -> None:
        """Lift its counter to the lowest of those who wait; where nobody does, all start at 0."""
        self._settle()
        if not self._queues:
            self._counters.clear()
        if self._floor is None:
            self._floor = min((self._counters[name] for name in self._queues), default=0.0)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)
        self._queues[tenant] = []

    def _tenant(self, request: RequestView) -> str:
        return request.labels.get(self.options.label, "")
