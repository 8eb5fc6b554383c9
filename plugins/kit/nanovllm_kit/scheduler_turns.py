"""A scheduler that holds another one to its declared bound on being passed over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nanovllm_core.interfaces.scheduler import PrefillShare, RequestView, SchedulerState
from nanovllm_kit.scheduler_watch import ReadOnlyRequest, Watch


@dataclass(frozen=True, slots=True)
class Turn:
    """How long a request that joined the queue can be passed over."""

    request_id: str
    arrival_step: int
    bound: float

    @property
    def until(self) -> float:
        """A request that arrives after this step goes behind it."""
        return self.arrival_step + self.bound


@dataclass
class TurnWatch(Watch):
    """Raises AssertionError where someone is admitted before one whom it may pass no longer.

    Of every pair: a request admitted in a step arrived at most `bound` steps after each of those
    that wait on. The bound is that of a request as it joined the queue.
    """

    bound: Callable[[RequestView], float] = lambda _request: 0.0
    _turns: dict[str, Turn] = field(default_factory=dict)

    def add(self, request: RequestView) -> None:
        bound = self.bound(ReadOnlyRequest(request))
        self._turns[request.request_id] = Turn(request.request_id, request.arrival_step, bound)
        super().add(request)

    def remove(self, request: RequestView) -> None:
        del self._turns[request.request_id]
        super().remove(request)

    def judge(self, state: SchedulerState, shares: tuple[PrefillShare, ...]) -> None:
        """Nothing is recorded: of a long queue that would be too much."""
        admitted = {share.request_id for share in shares}
        new = [self._turns[name] for name in admitted if name in self._turns]
        left = [turn for name, turn in self._turns.items() if name not in admitted]
        if not new or not left:
            return
        last = max(new, key=lambda turn: turn.arrival_step)
        passed = min(left, key=lambda turn: turn.until)
        assert last.arrival_step <= passed.until, (
            f"step {state.step}: {last.request_id!r} was admitted before {passed.request_id!r}, "
            f"which arrived {last.arrival_step - passed.arrival_step} steps earlier and waits with "
            f"{len(left) - 1} others; the declared bound is {passed.bound:g} steps"
        )
