"""The default scheduler: a policy's order, a token budget, whole prompts or chunks of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from math import ceil
from numbers import Real
from typing import TypeVar

from nanovllm_core.errors import (
    NanoVLLMError,
    PluginFailedError,
    SchedulerError,
    describe_error,
    shown,
)
from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
    SchedulingPolicy,
)

Answer = TypeVar("Answer")
_Entry = tuple[tuple[float, ...], int, RequestView]
"""Key, arrival index (no two are equal, so requests are never compared), request."""


class FcfsPolicy(SchedulingPolicy):
    """First come, first served; the latest arrival is preempted first."""

    def __init__(self, options: object = None) -> None:
        self.options = options

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.arrival_index,)


class TokenBudgetScheduler(Scheduler):
    """Unfinished prompts first, then the queue in the policy's order, until the budget is spent.

    The head of the queue is never passed over: if it does not fit, no request behind it is
    admitted, so a big request cannot starve. A request fits if the free blocks hold its whole
    prompt and the rest of the unfinished prompts before it, so prompts do not wait for each other's
    blocks; and beside these the policy's `reserve` of all outputs. Equal keys are admitted in order
    of arrival.
    """

    def __init__(self, policy: SchedulingPolicy, name: str = "") -> None:
        """`name` stands for the policy in errors; its class does if there is none.

        SchedulerError where the policy reserves no share.
        """
        self.policy = policy
        self._name = name or type(policy).__name__
        if not (isinstance(policy.reserve, Real) and 0 <= policy.reserve <= 1):
            raise SchedulerError(
                f"{self._name}: reserve is {shown(policy.reserve)}; it must be a share, 0 to 1"
            )
        self._queue: list[_Entry] = []
        """The waiting requests in the order in which they are admitted."""
        self._entries: dict[str, _Entry] = {}

    def add(self, request: RequestView) -> None:
        key = self._key("service_key", request)
        entry = (key, request.arrival_index, request)
        self._entries[request.request_id] = entry
        insort(self._queue, entry)

    def remove(self, request: RequestView) -> None:
        entry = self._entries.pop(request.request_id)
        del self._queue[bisect_left(self._queue, entry)]

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
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
        candidates = self._queue[: state.free_rows] if budget > 0 else ()
        if candidates and self.policy.reserve:
            blocks = state.free_blocks - self._num_reserved_blocks(state)
        for *_, request in candidates:
            if budget <= 0:
                break
            missing = request.num_tokens - state.num_cached_tokens(request)
            blocks -= state.num_new_blocks(request, missing + self._num_reserved(request))
            if blocks < 0:
                break
            chunk = min(missing, budget)
            budget -= chunk
            shares.append(PrefillShare(request.request_id, chunk))
        return shares

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        victim = max(running, key=lambda r: (self._key("victim_key", r), r.arrival_index))
        return victim.request_id

    def _num_reserved_blocks(self, state: SchedulerState) -> int:
        """The blocks that the running requests will take, up to what is reserved for them."""
        return sum(
            state.num_new_blocks(one, max(missing + self._num_reserved(one), 0))
            for one in (*state.prefilling, *state.decoding)
            for missing in (one.num_tokens - one.num_scheduled,)
        )

    def _num_reserved(self, request: RequestView) -> int:
        """The outputs that a request has room for; no key of its last one is ever stored."""
        return ceil(self.policy.reserve * (request.max_length - 1 - request.num_tokens))

    def _key(self, method: str, request: RequestView) -> tuple[float, ...]:
        """The policy's key, which must compare with every other; an error names the policy."""
        try:
            key = getattr(self.policy, method)(request)
        except Exception as error:
            raise PluginFailedError(
                f"{self._name}: {method} failed: {describe_error(error)}"
            ) from error
        # NaN is unequal to itself.
        if not isinstance(key, Sequence) or not all(isinstance(x, Real) and x == x for x in key):
            raise SchedulerError(
                f"{self._name}: {method} gave {key!r:.80}; it must give a tuple of numbers, as in "
                "(3,), and none may be NaN"
            )
        return tuple(key)


class NamedScheduler(Scheduler):
    """A scheduler as the engine asks it: errors say which one it is."""

    def __init__(self, scheduler: Scheduler, name: str = "") -> None:
        """`name` stands for the scheduler; its class does if there is none."""
        self._scheduler = scheduler
        self._name = name or type(scheduler).__name__

    def add(self, request: RequestView) -> None:
        self._ask(self._scheduler.add, request)

    def remove(self, request: RequestView) -> None:
        self._ask(self._scheduler.remove, request)

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        return self._ask(self._scheduler.schedule, state)

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        return self._ask(self._scheduler.choose_victim, running)

    def error(self, decided: str) -> SchedulerError:
        """That it "scheduled nothing ...", or decided something else that cannot be."""
        return SchedulerError(f"{self._name} {decided}")

    def _ask(self, method: Callable[..., Answer], *arguments: object) -> Answer:
        try:
            return method(*arguments)
        except NanoVLLMError:
            raise
        except Exception as error:
            raise PluginFailedError(
                f"{self._name}: {method.__name__} failed: {describe_error(error)}"
            ) from error
