"""The contracts of scheduling, at two levels.

A *policy* says in which order requests are served and who gives way; most authors want this one. A
whole *scheduler* decides every step. Both only read: the core checks what they decide and commits
rows and pages itself.

Who calls what, and when, all on the host and on the engine's thread:

    Policy(options), Scheduler(options)     once, at start
    service_key                             when a request joins the queue
    victim_key, choose_victim               when a decoding row needs a page and none is free
    add, remove                             when a request joins or leaves the queue
    schedule                                once per planned step in which a prompt waits or is
                                            unfinished; a steady decode step asks nothing

Steps are planned ahead: a view's `num_tokens` lags behind the device by the steps in flight. Any
error ends the engine. An engine makes an instance of its own; instances share nothing.

Whoever waits is served in the end, whatever its length, however many wait with it and however often
it gave way. A scheduler that promises an order states it as `SchedulerSpec.max_overtaking_steps`.

Work is counted in steps: a line of Python, a call, or a comparison, a hash or a sum of what a view
gives. Of n requests that are there, one call of `schedule` or `choose_victim` takes at most
32 n log2(n + 2) + 1000 steps, and so does one of `remove`, and all calls of `add` and `service_key`
together with which n requests arrive. So `schedule` may sort the queue, `remove` may look through
it, and `add` may keep it in order, but nothing compares each request with each. An entry of a
request that left may cost one look more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class RequestView(Protocol):
    """What a scheduler may read of a request. Lengths are in tokens."""

    @property
    def request_id(self) -> str:
        """Unique among the requests of an engine; further samples have ids of their own."""

    @property
    def arrival_step(self) -> int:
        """The engine's step counter when the request was added; a preemption does not change it."""

    @property
    def arrival_index(self) -> int:
        """How many requests were added to the engine before this one; no two are equal."""

    @property
    def priority(self) -> int:
        """What the request's sampling parameters ask for: lower is to be served first; 0 if not."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Texts by name that the caller gave, such as a tenant; read-only. Any may be missing."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; after a preemption too, not the outputs computed again."""

    @property
    def num_tokens(self) -> int:
        """Known ids: prompt and outputs so far."""

    @property
    def num_scheduled(self) -> int:
        """Tokens whose KV is computed or planned; 0 while the request waits and when it is over."""

    @property
    def max_length(self) -> int:
        """Prompt and output tokens at most."""


class SchedulingPolicy(ABC):
    """The order of service and the choice of victim.

    Keys compare as tuples do, lowest first. A key is read once, when the request joins the queue
    (on arrival, and again after a preemption), so it must not depend on the time of reading: ageing
    is expressed through `arrival_step`.
    """

    @abstractmethod
    def service_key(self, request: RequestView) -> tuple[float, ...]:
        """The lowest key is admitted first."""

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        """The highest key is preempted first; by default whoever is served last."""
        return self.service_key(request)


@dataclass(frozen=True, slots=True)
class PrefillShare:
    """What one prompt gets of a step; a waiting request is admitted by it."""

    request_id: str
    """Of a request in `waiting` or `prefilling`."""
    num_tokens: int
    """Further tokens to compute: at least 1, at most as many as it has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """A read-only look at the engine before a step.

    The decoding rows, their pages and their share of the budget are already taken care of:
    `token_budget`, `free_rows` and `free_blocks` are what is left for prompts.
    """

    step: int
    """The engine's step counter, which `arrival_step` is a reading of."""
    waiting: Sequence[RequestView]
    """Requests without a row, in the order in which they joined the queue. Iterate over it: an
    index walks from the start."""
    prefilling: Sequence[RequestView]
    """Requests with a row and prompt tokens left, in the order of admission."""
    token_budget: int
    """Tokens that all shares may add up to."""
    free_rows: int
    """Requests that may be admitted."""
    free_blocks: int
    """Pages that all shares may take."""
    num_cached_tokens: Callable[[RequestView], int]
    """Tokens of a waiting request that the prefix cache holds. It has `num_tokens` less these left
    to compute; one in `prefilling` has `num_tokens - num_scheduled` left."""
    num_new_blocks: Callable[[RequestView, int], int]
    """Free pages that computing this many more tokens of a request would take, for a request of
    `waiting` or `prefilling`."""


class Scheduler(ABC):
    """Decides what prompts get of a step, and who gives way when pages run out."""

    def add(self, request: RequestView) -> None:  # noqa: B027 - optional bookkeeping
        """A request joins the queue: it arrived, or was preempted."""

    def remove(self, request: RequestView) -> None:  # noqa: B027 - optional bookkeeping
        """A request leaves the queue: it was admitted or aborted."""

    @abstractmethod
    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        """Share the token budget among prompts. Called only when a prompt waits or is unfinished.

        The core refuses shares beyond the budget, the free rows or the free pages. Where nothing
        runs, something must be given out. Prompts that were begun and cannot go on give way to each
        other: begin one once the pages for all of it are free, or that may never end.
        """

    @abstractmethod
    def choose_victim(self, running: Sequence[RequestView]) -> str:
        """The id of the request to preempt: a decoding row needs a page and none is free.

        `running` have a row, and are the only ones to choose from; it may be one alone.
        """


PolicyOrScheduler = SchedulingPolicy | Scheduler
"""The objects of scheduler plugins; `SchedulerSpec.level` says which."""
