"""Schedulers and policies with one bug each, for the suites to find; and right ones beside them.

All but the last group decide as `InOrder` or `First` do, which are right, except for what the
docstring says.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import ClassVar

from pydantic import BaseModel

from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
    SchedulingPolicy,
)


class InOrder(Scheduler):
    """Begun prompts, then the queue in the order of arrival, each once all of it fits."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        """The queue, first to be admitted first."""
        return sorted(state.waiting, key=lambda request: request.arrival_index)

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        shares: list[PrefillShare] = []
        budget, blocks, rows = state.token_budget, state.free_blocks, state.free_rows
        for request in state.prefilling:
            missing = request.num_tokens - request.num_scheduled
            chunk = min(missing, budget)
            if state.num_new_blocks(request, chunk) > blocks:
                return shares
            blocks -= state.num_new_blocks(request, missing)
            budget -= chunk
            if chunk:
                shares.append(PrefillShare(request.request_id, chunk))
        for request in self.order(state):
            missing = request.num_tokens - state.num_cached_tokens(request)
            blocks -= state.num_new_blocks(request, missing)
            if not budget or not rows or blocks < 0:
                break
            chunk = min(missing, budget)
            budget, rows = budget - chunk, rows - 1
            shares.append(PrefillShare(request.request_id, chunk))
        return shares

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        return max(running, key=lambda request: request.arrival_index).request_id


# -- whole schedulers with a bug


class CountsJoins(InOrder):
    """Knows how often each request joined the queue."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.joins: Counter[str] = Counter()

    def add(self, request: RequestView) -> None:
        self.joins[request.request_id] += 1


class AloneAfterTwo(CountsJoins):
    """After two preemptions a request is served only when it is alone."""

    most_rows = 0

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        self.most_rows = max(self.most_rows, state.free_rows)
        alone = len(state.waiting) == 1 and state.free_rows == self.most_rows
        return [r for r in super().order(state) if alone or self.joins[r.request_id] <= 2]


class NeverAfterFive(CountsJoins):
    """After five preemptions a request is served never again."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        return [r for r in super().order(state) if self.joins[r.request_id] <= 5]


class OnePreemptionTooMany(CountsJoins):
    """Once requests were preempted twenty times in all, none of them is served."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        again = sum(self.joins.values()) - len(self.joins) > 20
        return [r for r in super().order(state) if not again or self.joins[r.request_id] == 1]


class NewestOfMany(InOrder):
    """With over 200 waiting, only the newest is served."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        queue = list(super().order(state))
        return queue[-1:] if len(queue) > 200 else queue


class NewestFirstOfMany(InOrder):
    """With over 1,000 waiting, the order is turned round."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        queue = list(super().order(state))
        return queue[::-1] if len(queue) > 1_000 else queue


class ShortOnly(InOrder):
    """Prompts over 2,000 tokens are never admitted."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        return [r for r in super().order(state) if r.num_prompt_tokens <= 2_000]


class LongLast(InOrder):
    """Prompts over 50,000 tokens are admitted behind all others."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        return sorted(state.waiting, key=lambda r: (r.num_tokens > 50_000, r.arrival_index))


class Squared(InOrder):
    """For each that waits, looks at all others."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        waiting = list(state.waiting)
        rank = {r: sum(o.arrival_index < r.arrival_index for o in waiting) for r in waiting}
        return sorted(waiting, key=rank.__getitem__)


class SquaredInBuiltIns(InOrder):
    """As `Squared`, in loops that no line of Python shows."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        indices = [request.arrival_index for request in state.waiting]
        return sorted(state.waiting, key=lambda r: sorted(indices).index(r.arrival_index))


class Cubed(InOrder):
    """For each two that wait, looks at all others."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        left, queue = list(state.waiting), []
        while left:
            first = next(
                r for r in left if all(r.arrival_index <= o.arrival_index for o in [*left])
            )
            left = [r for r in left if r is not first and r in state.waiting]
            queue.append(first)
        return queue


class WalksByIndex(InOrder):
    """Reads the queue by index, which walks from its start each time."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        queue = [state.waiting[i] for i in range(len(state.waiting))]
        return sorted(queue, key=lambda request: request.arrival_index)


class SquaredVictim(InOrder):
    """The choice of victim compares every two that run."""

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        ranks = [sum(r.arrival_index > o.arrival_index for o in running) for r in running]
        return running[ranks.index(max(ranks))].request_id


class SortsAtEachArrival(InOrder):
    """Sorts the whole queue again for each request that joins it."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.queue: list[RequestView] = []

    def add(self, request: RequestView) -> None:
        self.queue = sorted([*self.queue, request], key=lambda r: -r.arrival_index)

    def remove(self, request: RequestView) -> None:
        self.queue.remove(request)

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        return self.queue[::-1]


class RemembersAll(InOrder):
    """Looks through everybody that ever came."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.seen: list[str] = []

    def add(self, request: RequestView) -> None:
        self.seen.append(request.request_id)

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        waiting = {request.request_id: request for request in state.waiting}
        queue = dict.fromkeys(name for name in self.seen if name in waiting)
        return sorted((waiting[name] for name in queue), key=lambda r: r.arrival_index)


class OneQueueForAll(InOrder):
    """Keeps the queue at the class, so that engines share it."""

    queue: ClassVar[dict[str, RequestView]] = {}

    def add(self, request: RequestView) -> None:
        self.queue[request.request_id] = request

    def remove(self, request: RequestView) -> None:
        self.queue.pop(request.request_id, None)

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        waiting = {request.request_id for request in state.waiting}
        mine = [r for r in self.queue.values() if r.request_id in waiting]
        return sorted(mine, key=lambda r: (len(self.queue) > 3) * r.priority)


class OneTurnForAll(InOrder):
    """Takes turns in choosing the victim, and counts the turns at the class."""

    turns: ClassVar[list[None]] = []

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        self.turns.append(None)
        latest = sorted(running, key=lambda request: request.arrival_index)
        return latest[-1 - len(self.turns) % min(2, len(latest))].request_id


class OneOrderForAll(InOrder):
    """Turns the order round in every second step, and counts the steps at the class."""

    steps: ClassVar[list[None]] = []

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        self.steps.append(None)
        return list(super().order(state))[:: -1 if len(self.steps) % 2 else 1]


class VictimByDice(InOrder):
    """The victim is drawn from the dice of the process."""

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        return random.choice(running).request_id


class RemembersSteps(InOrder):
    """Orders by the step in which an id was first seen, also where that was an earlier request."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.seen: dict[str, int] = {}

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        for request in super().order(state):
            self.seen.setdefault(request.request_id, state.step)
        return sorted(super().order(state), key=lambda r: self.seen[r.request_id])


def without_begun(state: SchedulerState) -> SchedulerState:
    """The same step with no unfinished prompt, and without the blocks that these need."""
    rest = sum(state.num_new_blocks(r, r.num_tokens - r.num_scheduled) for r in state.prefilling)
    return replace(state, prefilling=(), free_blocks=max(0, state.free_blocks - rest))


class BegunWhileNoneDecodes(InOrder):
    """Unfinished prompts go on only while nothing decodes."""

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        return super().schedule(without_begun(state) if state.decoding else state)


class BegunLast(InOrder):
    """Unfinished prompts get what the admitted ones leave of the budget."""

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        new = super().schedule(without_begun(state))
        left = state.token_budget - sum(share.num_tokens for share in new)
        return [*super().schedule(replace(state, waiting=(), token_budget=left)), *new]


class BegunWhileNoneWaits(InOrder):
    """Unfinished prompts go on only in steps that admit nobody."""

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        return super().schedule(without_begun(state)) or super().schedule(state)


# -- policies with a bug


class KeepsTheServed(InOrder):
    """Notes each request that was admitted, and never looks there."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.served: list[RequestView] = []

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        shares = super().schedule(state)
        admitted = {share.request_id for share in shares}
        self.served += (one for one in state.waiting if one.request_id in admitted)
        return shares


ADMITTED: list[RequestView] = []


class KeepsInTheModule(InOrder):
    """Notes each request that waits in a list of the module."""

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        ADMITTED.extend(state.waiting[:1])
        return super().schedule(state)


class KeepsInACache(InOrder):
    """The order of a request is computed once, by a cache of a method, without a bound."""

    @cache  # noqa: B019 - the bug
    def place(self, request_id: str) -> tuple[str, int]:
        return request_id, len(request_id)

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        for request in state.waiting:
            self.place(request.request_id)
        return super().schedule(state)


class KeepsInAClosure(InOrder):
    """Notes each request in a list that a function of its own closes over."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        noted: list[RequestView] = []
        self.note = lambda requests: noted.extend(requests)

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        self.note(state.waiting[:1])
        return super().schedule(state)


class First(SchedulingPolicy):
    """In the order of arrival."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options
        self.joins: Counter[str] = Counter()

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.arrival_index,)


class ByClass(First):
    """Right: two classes, where aborted requests of the later one stay behind those that wait."""

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.arrival_step + 50 * (request.priority > 0),)


class LastAfterTwo(First):
    """After two preemptions a request is served behind all others."""

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        self.joins[request.request_id] += 1
        late = self.joins[request.request_id] > 3
        return (math.inf if late else 0, request.arrival_index)


class LastAfterManyOutputs(First):
    """A request that was preempted with over 200 outputs is served behind all others."""

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.num_tokens - request.num_prompt_tokens > 200, request.arrival_index)


class NewestAfterMany(First):
    """Once over 200 requests have joined, the newest is first."""

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        self.joins[""] += 1
        return (request.arrival_index * (-1 if self.joins[""] > 200 else 1),)


class LongNever(First):
    """Prompts over 2,000 tokens come last."""

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.num_prompt_tokens > 2_000, request.arrival_index)


class RemembersIds(First):
    """Orders by the number of the first request that had the id."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.seen: dict[str, int] = {}

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (self.seen.setdefault(request.request_id, request.arrival_index),)


class KeepsKeys(First):
    """Remembers the key of each id, of which none comes again."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.keys: dict[str, tuple[float, ...]] = {}

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        self.keys[request.request_id] = super().service_key(request)
        return self.keys[request.request_id]


class SquaredKey(First):
    """For each that joins, looks at all that joined before."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.seen: list[RequestView] = []

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        self.seen.append(request)
        before = sum(other.arrival_index < 0 for other in self.seen)
        return (before + request.arrival_index,)


class CubedKey(SquaredKey):
    """For each that joins, compares every two that joined before."""

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        self.seen.append(request)
        before = sum(one is not two and one == two for one in self.seen for two in self.seen)
        return (before + request.arrival_index,)


class ListKey(SquaredKey):
    """For each that joins, searches a list of the ids that joined before."""

    ids: list[str]

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        self.ids = getattr(self, "ids", [])
        if request.request_id not in self.ids:
            self.ids.append(request.request_id)
        return (request.arrival_index,)


# -- right ones, of other kinds


class ShortFirst(First):
    """The shortest prompt first, with four tokens of advantage for each step of waiting."""

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.num_tokens + 4 * request.arrival_step,)


class LastInFirstOut(InOrder):
    """The newest first. It promises nothing."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        return reversed(list(super().order(state)))


class Shuffled(InOrder):
    """A random order, from a seed of its own. It promises nothing."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.dice = Random(1)

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        queue = list(super().order(state))
        self.dice.shuffle(queue)
        return queue

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        return self.dice.choice(running).request_id


class FairShare(InOrder):
    """Priorities stand for tenants: whose tenant was given least is next. It promises nothing."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.given: Counter[int] = Counter()

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        queue = sorted(state.waiting, key=lambda r: (self.given[r.priority], r.arrival_index))
        for request in queue:
            self.given[request.priority] += 1
            yield request


class TwoAtOnce(InOrder):
    """A quota: at most two requests run, whatever is free."""

    most_rows = 0

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        self.most_rows = max(self.most_rows, state.free_rows)
        running = self.most_rows - state.free_rows
        return list(super().order(state))[: max(0, 2 - running)]


class LeastDone(InOrder):
    """Whoever has the fewest tokens is preempted, and is served first."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        return sorted(state.waiting, key=lambda r: (r.num_tokens, r.arrival_index))

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        return min(running, key=lambda r: (r.num_tokens, r.arrival_index)).request_id


class KeepsAHeap(InOrder):
    """A queue of its own, from which who leaves is taken out one by one."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self.queue: list[RequestView] = []

    def add(self, request: RequestView) -> None:
        self.queue.append(request)

    def remove(self, request: RequestView) -> None:
        self.queue = [other for other in self.queue if other is not request]

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        return sorted(self.queue, key=lambda r: r.arrival_index)


class SmallChunks(InOrder):
    """A prompt gets at most 16 tokens of each step, and so does all that is begun together."""

    chunk = 16

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        small = min(self.chunk, state.token_budget)
        return super().schedule(replace(state, token_budget=small))


class Ageing(InOrder):
    """A prompt waits as if it had come up to 24 steps later, the longer the later."""

    def order(self, state: SchedulerState) -> Iterable[RequestView]:
        late = {r: r.arrival_step + min(24, r.num_prompt_tokens // 8) for r in state.waiting}
        return sorted(late, key=lambda r: (late[r], r.arrival_index))
