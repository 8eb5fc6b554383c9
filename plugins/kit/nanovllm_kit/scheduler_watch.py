"""A scheduler that records what another one decides, and shows it no more than the contract says.

Requests are seen through `ReadOnlyRequest`: what `RequestView` does not name raises AttributeError,
and nothing can be set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
)


class AskedLabels(Mapping[str, str]):
    """The labels of a request, which note in `asked` the names that somebody looks for."""

    def __init__(self, labels: Mapping[str, str], asked: set[str]) -> None:
        self._labels = labels
        self._asked = asked

    def __getitem__(self, name: str) -> str:
        self._asked.add(name)
        return self._labels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)


class ReadOnlyRequest:
    """A `RequestView` and nothing else; `asked` collects the labels that are looked for."""

    __slots__ = ("__asked", "__request")

    def __init__(self, request: RequestView, asked: set[str] | None = None) -> None:
        self.__request = request
        self.__asked = set[str]() if asked is None else asked

    def __repr__(self) -> str:
        return f"<RequestView {self.request_id!r}>"

    @property
    def request_id(self) -> str:
        return self.__request.request_id

    @property
    def arrival_step(self) -> int:
        return self.__request.arrival_step

    @property
    def arrival_index(self) -> int:
        return self.__request.arrival_index

    @property
    def priority(self) -> int:
        return self.__request.priority

    @property
    def labels(self) -> Mapping[str, str]:
        return AskedLabels(self.__request.labels, self.__asked)

    @property
    def num_prompt_tokens(self) -> int:
        return self.__request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return self.__request.num_tokens

    @property
    def num_scheduled(self) -> int:
        return self.__request.num_scheduled

    @property
    def max_length(self) -> int:
        return self.__request.max_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a scheduler was shown before a step, and what it gave out, as plain numbers."""

    step: int
    waiting: tuple[str, ...]
    prefilling: tuple[str, ...]
    missing: dict[str, int]
    """Tokens that each of them has left to compute, less what the prefix cache holds."""
    token_budget: int
    free_rows: int
    free_blocks: int
    shares: tuple[PrefillShare, ...]
    num_tokens: int
    num_rows: int
    num_blocks: int


Rule = Callable[[Decision], None]
"""Raises AssertionError for a decision that breaks it."""


def anything_goes(_decision: Decision) -> None:
    """Recording is enough."""


def keeps_the_budget(decision: Decision) -> None:
    """All shares together."""
    given, most = decision.num_tokens, decision.token_budget
    assert given <= most, f"step {decision.step}: {given} tokens given out, {most} in the budget"


def keeps_the_rows(decision: Decision) -> None:
    """Everybody who is admitted takes one."""
    given, free = decision.num_rows, decision.free_rows
    assert given <= free, f"step {decision.step}: {given} rows given out, {free} free"


def keeps_the_blocks(decision: Decision) -> None:
    """As the core counts them."""
    given, free = decision.num_blocks, decision.free_blocks
    assert given <= free, f"step {decision.step}: {given} blocks given out, {free} free"


def gives_real_work(decision: Decision) -> None:
    """To requests that were shown, one share each, at least a token and at most what is left."""
    names: set[str] = set()
    for name, given in ((share.request_id, share.num_tokens) for share in decision.shares):
        where = f"step {decision.step}: {name!r}"
        assert name not in names, f"{where} got two shares"
        names.add(name)
        assert name in decision.missing, f"{where} neither waits nor has an unfinished prompt"
        left = decision.missing[name]
        assert 1 <= given <= left, f"{where} got {given} tokens, of 1 to {left} that are left"


@dataclass
class Watch(Scheduler):
    """Asks `scheduler`, and checks each decision by `rule` before the core sees it.

    Its class is called as the scheduler's is, since the core's errors name the scheduler by that.
    """

    scheduler: Scheduler
    rule: Rule = anything_goes
    decisions: list[Decision] = field(default_factory=list)
    victims: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """The running requests when one had to be preempted, and the one that was."""
    victim_steps: list[int] = field(default_factory=list)
    """For each victim, the step of the last decision before it."""
    asked_labels: set[str] = field(default_factory=set)
    """The names of labels that the scheduler has looked for."""
    _views: dict[str, ReadOnlyRequest] = field(default_factory=dict)
    _step: int = -1

    def __post_init__(self) -> None:
        self.__class__ = type(type(self.scheduler).__name__, (type(self),), {})

    def add(self, request: RequestView) -> None:
        self._views[request.request_id] = ReadOnlyRequest(request, self.asked_labels)
        self.scheduler.add(self._views[request.request_id])

    def remove(self, request: RequestView) -> None:
        self.scheduler.remove(self._views[request.request_id])

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        self._step = state.step
        shown = replace(
            state,
            waiting=tuple(self._views[r.request_id] for r in state.waiting),
            prefilling=tuple(self._views[r.request_id] for r in state.prefilling),
            decoding=tuple(self._views[r.request_id] for r in state.decoding),
        )
        shares = self.scheduler.schedule(shown)
        assert isinstance(shares, Sequence), f"shares are a {type(shares).__name__}, no sequence"
        for share in shares:
            assert isinstance(share, PrefillShare), (
                f"schedule() gave {share!r} among its shares, a {type(share).__name__}: each must "
                "be a PrefillShare(request_id, num_tokens)"
            )
        self.judge(state, tuple(shares))
        return tuple(shares)

    def judge(self, state: SchedulerState, shares: tuple[PrefillShare, ...]) -> None:
        """Record a decision, and check it; `state` holds the core's own requests."""
        decision = _decision(state, shares)
        self.decisions.append(decision)
        self.rule(decision)

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        ids = tuple(request.request_id for request in running)
        victim = self.scheduler.choose_victim(tuple(self._views[name] for name in ids))
        self.victims.append((ids, victim))
        self.victim_steps.append(self._step)
        return victim


def _decision(state: SchedulerState, shares: tuple[PrefillShare, ...]) -> Decision:
    requests = {r.request_id: r for r in (*state.waiting, *state.prefilling)}
    new = {request.request_id for request in state.waiting}

    def missing(request: RequestView) -> int:
        is_new = request.request_id in new
        done = state.num_cached_tokens(request) if is_new else request.num_scheduled
        return request.num_tokens - done

    known = [share for share in shares if share.request_id in requests and share.num_tokens > 0]
    return Decision(
        step=state.step,
        waiting=tuple(request.request_id for request in state.waiting),
        prefilling=tuple(request.request_id for request in state.prefilling),
        missing={name: missing(request) for name, request in requests.items()},
        token_budget=state.token_budget,
        free_rows=state.free_rows,
        free_blocks=state.free_blocks,
        shares=shares,
        num_tokens=sum(share.num_tokens for share in shares),
        num_rows=len({share.request_id for share in shares} & new),
        num_blocks=sum(state.num_new_blocks(requests[s.request_id], s.num_tokens) for s in known),
    )
