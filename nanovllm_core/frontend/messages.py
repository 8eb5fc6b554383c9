"""The messages between a front door and its engine: plain data, which other processes can read.

A door sends messages, each of which it numbers with the subscriber that the answers are for. The
engine answers with the deltas of a step, all those of one subscriber at once, or with one of the
answers below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nanovllm_core.engine import EngineStats, OutputDelta
from nanovllm_core.interfaces.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """What `Engine.add_request` takes; a request with stop strings is searched by its door.

    `output_token_ids` are outputs that another engine has given already; see there.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool = False
    labels: Mapping[str, str] | None = None
    output_token_ids: tuple[int, ...] = ()
    cache_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Add all of these before the next step, or none: the answer is then `Refused`."""

    subscriber: int
    requests: tuple[NewRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests; those that are not there any more are no error."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EndAt:
    """`Engine.end_at`: the text of a sample was searched."""

    request_id: str
    index: int
    num_tokens: int
    stop: str | None


@dataclass(frozen=True, slots=True)
class GetStats:
    """Answer with `EngineStats`, between two steps."""

    subscriber: int


@dataclass(frozen=True, slots=True)
class WaitIdle:
    """Answer with `EngineStats` once no request is unfinished: the thread then takes no step."""

    subscriber: int


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every cached prefix; the answer is the `EngineStats` after it."""

    subscriber: int


@dataclass(frozen=True, slots=True)
class Close:
    """End the thread, also with requests unfinished. At the end of a process nothing is freed."""

    free: bool = True


Message = AddRequests | Abort | EndAt | GetStats | WaitIdle | ResetPrefixCache | Close


@dataclass(frozen=True, slots=True)
class Refused:
    """Requests of one message were refused; the engine and its other requests go on.

    The one at `index` was at fault.
    """

    error: BaseException
    request_ids: tuple[str, ...]
    index: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine ended, by this error; nothing more comes."""

    error: BaseException


Answer = list[OutputDelta] | EngineStats | Refused | Ended
Deliver = Callable[[Answer], None]
"""Called on the thread that has the answer: it must not wait."""
