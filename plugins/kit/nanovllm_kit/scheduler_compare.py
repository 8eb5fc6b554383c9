"""Two runs that must be decided alike, compared; a failure says where they part, and likely why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from nanovllm_kit.scheduler_watch import Decision, Watch

TWICE = ("the first time", "the second time")
NOT_TOLD_ALONE = (
    "Likely causes: state that instances share (at a class or a module; keep it on self), or "
    "decisions that depend on a clock, on dice, or on the order of hashes (of a set, of id())"
)
"""Why the same requests may be decided in two ways."""
SHOWN = ("waiting", "prefilling", "missing", "token_budget", "free_rows", "free_blocks")
"""What a decision was shown."""


@dataclass(frozen=True, slots=True)
class Victim:
    """Who was preempted, after the decision of a step."""

    step: int
    running: tuple[str, ...]
    chosen: str


Choice = Decision | Victim


def assert_same_decisions(one: Watch, other: Watch, runs: tuple[str, str], causes: str) -> None:
    """Every share and every victim agree; the message begins with the first that do not.

    `runs` says what the two are, as in "alone" and "beside another engine".
    """
    __tracebackhide__ = True
    for first, second in zip_longest(_choices(one), _choices(other)):
        if first == second:
            continue
        told = [_told(*pair) for pair in ((first, second), (second, first))]
        raise AssertionError(
            f"{_when(first or second)}: {runs[0]}, it {told[0]}; {runs[1]}, it {told[1]}. {causes}"
        )


def _choices(watch: Watch) -> Iterator[Choice]:
    """All that a scheduler chose, in order."""
    victims = [
        Victim(step, *victim)
        for step, victim in zip(watch.victim_steps, watch.victims, strict=True)
    ]
    choices: list[Choice] = [*watch.decisions, *victims]
    # Sorting keeps the order of equals: a step's decision, then its victims.
    yield from sorted(choices, key=lambda choice: choice.step)


def _when(choice: Choice | None) -> str:
    assert choice is not None, "two runs that end together do not part there"
    after = "after the decision of " if isinstance(choice, Victim) else ""
    return f"{after}step {choice.step}"


def _told(choice: Choice | None, other: Choice | None) -> str:
    """What was chosen; and what was shown, where it is that in which another one differs."""
    if choice is None:
        return "decided nothing more"
    if isinstance(choice, Victim):
        return f"preempted {choice.chosen!r} of {', '.join(map(repr, choice.running))}"
    shares = [f"{share.request_id!r} {share.num_tokens} tokens" for share in choice.shares]
    told = f"gave {', '.join(shares) or 'nothing'}"
    if isinstance(other, Decision):
        shown = [
            f"{name} {getattr(choice, name)}"
            for name in SHOWN
            if getattr(choice, name) != getattr(other, name)
        ]
        told += f" (shown {', '.join(shown)})" if shown else ""
    return told
