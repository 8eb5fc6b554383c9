"""The contracts of scheduling, at two levels.

A *policy* gives the order of admission and the request to preempt; most authors want a policy. A
whole *scheduler* decides every step. Both only read: the core checks their decisions and commits
rows and blocks itself.

Who calls what, and when, all on the host and on the engine's thread:

    Policy(options), Scheduler(options)     once, at start
    service_key                             when a request joins the queue
    victim_key, choose_victim               when a decoding row needs a block and none is free
    add, remove                             when a request joins or leaves the queue
    schedule                                once per planned step in which a prompt waits or is
                                            unfinished; not in a steady decode step

Steps are planned ahead: a view's `num_tokens` lags behind the device by the steps in flight. Any
error ends the engine. An engine makes an instance of its own; instances share nothing.

Every waiting request is served in the end, whatever its length, however many wait with it and
however often it was preempted. A scheduler with a bound on overtaking declares it as
`SchedulerSpec.max_overtaking_steps`. Nothing is kept of requests that ended.

Work is counted in steps: a line of Python, a call, or a comparison, hash or sum of a value from a
view. With n requests, each of these takes at most 32 n log2(n + 2) + 1000 steps: one call of
`schedule`, `choose_victim` or `remove`, and all calls of `add` and `service_key` for n arriving
requests together. So `schedule` may sort the queue, `remove` may scan it, and `add` may keep it in
order, but no call may compare every pair of requests. Dropping the entry of a request that left may
cost one more look.
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
        """Unique among the unfinished requests of an engine; further samples have their own.
        An id may come again once its request has ended."""

    @property
    def arrival_step(self) -> int:
        """The engine's step counter when the request was added; a preemption does not change it."""

    @property
    def arrival_index(self) -> int:
        """How many requests were added to the engine before this one; no two are equal."""

    @property
    def priority(self) -> int:
        """`SamplingParams.priority`: a lower number is admitted earlier; 0 by default."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Strings by name, from the caller, such as a tenant; read-only. Any may be missing."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; after a preemption too, without the outputs to compute again."""

    @property
    def num_tokens(self) -> int:
        """Known token ids: prompt and outputs so far."""

    @property
    def num_scheduled(self) -> int:
        """Tokens whose KV is computed or planned; 0 while the request waits and after its end."""

    @property
    def max_length(self) -> int:
        """The most prompt and output tokens together."""


class SchedulingPolicy(ABC):
    """The order of admission and the choice of victim.

    Keys compare as tuples do, lowest first. A key is read once, when the request joins the queue
    (on arrival, and again after a preemption), so it must not depend on the time of reading: ageing
    is expressed through `arrival_step`.
    """

    reserve: float = 0.0
    """The share, 0 to 1, of the outputs that running requests may still give for which blocks are
    kept free. A request is admitted where its prompt and this share of its outputs fit beside
    theirs. With 1 no request is ever preempted; with 0, as many as fit now are admitted."""

    @abstractmethod
    def service_key(self, request: RequestView) -> tuple[float, ...]:
        """The lowest key is admitted first."""

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        """The highest key is preempted first; by default the request admitted last."""
        return self.service_key(request)


@dataclass(frozen=True, slots=True)
class PrefillShare:
    """The tokens of one prompt in a step; a share admits a waiting request."""

    request_id: str
    """The id of a request in `waiting` or `prefilling`."""
    num_tokens: int
    """Further tokens to compute: at least 1, at most as many as the prompt has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """A read-only view of the engine before a step.

    The decoding rows already have their blocks and their share of the budget. `token_budget`,
    `free_rows` and `free_blocks` are the rest, for prompts.
    """

    step: int
    """The engine's step counter; `arrival_step` is its value when a request arrived."""
    waiting: Sequence[RequestView]
    """Requests without a row, in the order in which they joined the queue. Iterate over it:
    indexing walks from the start."""
    prefilling: Sequence[RequestView]
    """Requests with a row and prompt tokens left, in the order of admission."""
    decoding: Sequence[RequestView]
    """Requests with a row and no prompt tokens left: each computes one token in this step."""
    token_budget: int
    """Tokens that all shares may add up to."""
    free_rows: int
    """Requests that may be admitted."""
    free_blocks: int
    """KV-cache blocks that all shares may take."""
    num_cached_tokens: Callable[[RequestView], int]
    """Tokens of a waiting request that the prefix cache holds. The request has `num_tokens` minus
    these left to compute; a request in `prefilling` has `num_tokens - num_scheduled` left."""
    num_new_blocks: Callable[[RequestView, int], int]
    """The most free blocks that computing this many more tokens would take, for a request in
    `waiting`, `prefilling` or `decoding`. Of more tokens than a step's budget: in several steps,
    between which the blocks that a sliding window leaves behind are free again."""


class Scheduler(ABC):
    """Decides the prompt tokens of each step, and the request to preempt when blocks run out."""

    def add(self, request: RequestView) -> None:  # noqa: B027 - optional bookkeeping
        """A request joins the queue: it arrived, or was preempted."""

    def remove(self, request: RequestView) -> None:  # noqa: B027 - optional bookkeeping
        """A request leaves the queue: it was admitted or aborted."""

    @abstractmethod
    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        """Share the token budget among prompts. Called only when a prompt waits or is unfinished.

        The core refuses shares beyond the budget, the free rows or the free blocks. When nothing
        runs, a share must be returned. Unfinished prompts that cannot continue preempt each other,
        possibly without end: admit a prompt only when the blocks for all of it are free.
        """

    @abstractmethod
    def choose_victim(self, running: Sequence[RequestView]) -> str:
        """The id of the request to preempt: a decoding row needs a block and none is free.

        `running` are the requests with a row, at least one. Only these may be chosen.
        """


PolicyOrScheduler = SchedulingPolicy | Scheduler
"""The objects of scheduler plugins; `SchedulerSpec.level` says which."""
