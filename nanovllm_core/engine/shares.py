"""Checks what a scheduler decides: whose prompts a step computes, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

from nanovllm_core.engine.request import Request
from nanovllm_core.errors import SchedulerError, shown
from nanovllm_core.interfaces.scheduler import PrefillShare, SchedulerState


def check_shares(
    shares: Sequence[PrefillShare],
    state: SchedulerState,
    find_prompt: Callable[[str], Request | None],
    error: Callable[[str], SchedulerError],
) -> list[Request]:
    """The requests of the shares that a scheduler gave for `state`.

    `find_prompt` gives the request of an id that waits or has an unfinished prompt. Raises the
    `error` that says what the scheduler decided, for shares that cannot be.
    """
    if not isinstance(shares, Sequence) or not all(isinstance(s, PrefillShare) for s in shares):
        raise error(f"scheduled {shown(shares)}; schedule() must return a sequence of PrefillShare")
    requests: dict[str, Request] = {}
    num_blocks = 0
    for share in shares:
        name = share.request_id
        request = find_prompt(name) if isinstance(name, str) else None
        if request is None or name in requests:
            raise error(
                f"scheduled {shown(name)}, which neither waits nor has an unfinished prompt, "
                "or has a share already; give each request of state.waiting and "
                "state.prefilling one share at most, and no others"
            )
        done = state.num_cached_tokens(request) if request.row < 0 else request.num_scheduled
        missing = request.num_tokens - done
        num_tokens = share.num_tokens
        if not (isinstance(num_tokens, Integral) and 1 <= num_tokens <= missing):
            raise error(
                f"gave {name!r} {shown(num_tokens)} tokens; it has {missing} to compute, so a "
                f"share is a whole number from 1 to {missing}"
            )
        requests[name] = request
        num_blocks += state.num_new_blocks(request, num_tokens)
    for what, taken, limit in (
        ("tokens", sum(share.num_tokens for share in shares), state.token_budget),
        ("rows", sum(request.row < 0 for request in requests.values()), state.free_rows),
        ("blocks", num_blocks, state.free_blocks),
    ):
        if taken > limit:
            raise error(
                f"gave out {taken} {what} in one step; {limit} were left, and SchedulerState says "
                "so"
            )
    return list(requests.values())
