"""The messages between a door's process and an engine's, as msgpack. Nothing is unpickled.

To an engine go pairs (name, content): those of `nanovllm_core.frontend` by the name of their class,
and `START` and `PING`. From an engine come triples (engine, name, content): the names below. The
deltas of a step are one message, a short row for each delta.

To a process that shares its engine go triples (door, name, content), the messages among them. From
it come triples (name, subscriber, content): `STARTED`, answers, and `CLOSED`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from traceback import format_exception
from typing import Any, get_args

import msgspec

from nanovllm_core.api import (
    EngineError,
    InvalidPromptError,
    InvalidSamplingError,
    NanoVLLMError,
    SamplingParams,
    TokenLogprobs,
    WorkerInfo,
)
from nanovllm_core.frontend import (
    AddRequests,
    Answer,
    Ended,
    EngineStats,
    Message,
    NewRequest,
    OutputDelta,
    Refused,
)

START, PING = "start", "ping"
"""The configuration as JSON, and the level of the log; a question that a thread answers.

The answer `PONG` has the turns of the engine's loop, and whether it works or waits for a message.
"""
STARTED, FAILED = "started", "failed"
"""The facts of the engine; the error of its start."""
DELTAS, REFUSED, ENDED, STATS, PONG = "deltas", "refused", "ended", "stats", "pong"
CLOSED = "closed"
"""The last counters, and the error of closing, if any; of a share, the error for its doors."""
OPEN, SUBSCRIBE, UNSUBSCRIBE, LOST = "open", "subscribe", "unsubscribe", "lost"
"""A door's process id; the number of its subscriber, and of one that can take nothing more."""

ADD = AddRequests.__name__
"""Its content is `PackedRequests`."""
MESSAGES: Mapping[str, Any] = {message.__name__: message for message in get_args(Message)}


def _plain(value: Any) -> Any:
    """Mappings of other types than dict, and numbers of other types than Python's."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80} is no plain data")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode = msgspec.msgpack.Decoder().decode


def encode(*parts: object) -> bytes:
    """One message. Raises TypeError, ValueError, OverflowError or RecursionError for other data."""
    return _encode(parts)


def decode(data: bytes) -> Any:
    """The parts of a message, in plain lists and dicts."""
    return _decode(data)


def encode_message(message: Message) -> bytes:
    """A message of a door; raises as `encode` and `pack_request` do."""
    content: Any = message
    if isinstance(message, AddRequests):
        content = PackedRequests(message.subscriber, [*map(pack_request, message.requests)])
    return _encode((type(message).__name__, content))


PackedRequest = tuple[str, list[int], bytes]
"""A request's id, the ids of its prompt, and its other fields as a message of their own."""


@dataclass(frozen=True, slots=True)
class PackedRequests:
    """`AddRequests` as it is sent. Whatever a request holds, the ids of all requests are read."""

    subscriber: int
    requests: list[PackedRequest]


def pack_request(request: NewRequest) -> PackedRequest:
    """A request as it is sent, and read by the other process.

    Raises a RequestError for a request that no message can hold, or that cannot be read from it.
    """
    try:
        array("q", request.prompt_token_ids)
    except OverflowError as error:
        raise InvalidPromptError(
            "the prompt holds a token id beyond 64 bits, outside every vocabulary; use this "
            "model's tokenizer"
        ) from error
    try:
        rest = _encode(replace(request, prompt_token_ids=[]))
        _read_request([], rest)
    except Exception as error:  # RecursionError too, and what a caller's own mapping raises
        raise InvalidSamplingError(
            f"{_unsendable_field(request)} cannot be sent to an engine's process: {error}; it may "
            "hold texts, numbers, true, false, null, lists and mappings alone"
        ) from error
    return request.request_id, request.prompt_token_ids, rest


def _unsendable_field(request: NewRequest) -> str:
    """The parameter that no message can hold; `labels` where all parameters can be sent."""
    for one in fields(request.params):
        try:
            # Nested as in a request: how deep it may nest is a matter of that.
            _decode(_encode({"params": {one.name: getattr(request.params, one.name)}}))
        except Exception:
            return one.name
    return "labels"


def read_message(name: str, content: dict[str, Any]) -> Message | Refused:
    """What `encode_message` was given; `Refused` for requests of which one cannot be read."""
    if name == ADD:
        return _read_requests(content["subscriber"], content["requests"])
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
    }
    message: Message = MESSAGES[name](**values)
    return message


def _read_requests(subscriber: int, packed: list[PackedRequest]) -> AddRequests | Refused:
    requests: list[NewRequest] = []
    try:
        for _, ids, rest in packed:
            requests.append(_read_request(ids, rest))
    except Exception as error:  # such as a RecursionError, where less of the stack is free
        fault = InvalidSamplingError(
            f"the request cannot be read by the engine's process: {error}; simplify the arguments "
            "of logits_processors and constraints"
        )
        return Refused(fault, tuple(name for name, _, _ in packed), len(requests))
    return AddRequests(subscriber, tuple(requests))


def _read_request(ids: list[int], rest: bytes) -> NewRequest:
    content = _decode(rest)
    content["prompt_token_ids"] = ids
    content["params"] = SamplingParams(**content["params"])
    content["output_token_ids"] = tuple(content["output_token_ids"])
    return NewRequest(**content)


# -- answers


def answer_row(answer: Answer) -> tuple[str, Any]:
    """The name and the content of an answer: all deltas of a step are one message."""
    if isinstance(answer, list):
        return DELTAS, [*map(delta_row, answer)]
    if isinstance(answer, Refused):
        return REFUSED, [error_row(answer.error), answer.request_ids, answer.index]
    if isinstance(answer, Ended):
        return ENDED, error_row(answer.error)
    return STATS, stats_row(answer)


def read_answer(name: str, content: Any) -> Answer:
    """That of `answer_row`."""
    if name == DELTAS:
        return [read_delta(row, row[0], row[1]) for row in content]
    if name == REFUSED:
        error, request_ids, index = content
        return Refused(read_error(error), tuple(request_ids), index)
    if name == ENDED:
        return Ended(read_error(content))
    return read_stats(content)


def delta_row(delta: OutputDelta) -> tuple[Any, ...]:
    """Short where the sample goes on and has no log-probabilities, as nearly always."""
    row = (
        delta.request_id,
        delta.index,
        delta.new_token_ids,
        delta.num_cached_tokens,
        delta.wait_steps,
    )
    if delta.finish_reason is None and delta.new_logprobs is None:
        return row
    logprobs = None
    if delta.new_logprobs is not None:
        # As for pickle: the bytes of a row, or the two fields.
        logprobs = [one.__reduce__()[1] for one in delta.new_logprobs]
    error = None if delta.error is None else error_row(delta.error)
    return (*row, logprobs, delta.finish_reason, delta.stop_reason, error)


def read_delta(row: list[Any], request_id: str, index: int) -> OutputDelta:
    """The delta of a row, as one of this request and sample."""
    delta = OutputDelta(
        request_id=request_id,
        index=index,
        new_token_ids=row[2],
        num_cached_tokens=row[3],
        wait_steps=row[4],
    )
    if len(row) > 5:
        _, _, _, _, _, logprobs, delta.finish_reason, delta.stop_reason, error = row
        if logprobs is not None:
            delta.new_logprobs = [_read_logprobs(*one) for one in logprobs]
        if error is not None:
            delta.error = read_error(error)
    return delta


def _read_logprobs(first: bytes | float, top: list[list[Any]] | None = None) -> TokenLogprobs:
    if isinstance(first, bytes):
        return TokenLogprobs.of_bytes(first)
    return TokenLogprobs(first, tuple((token_id, value) for token_id, value in top or ()))


# -- errors

ErrorRow = tuple[str, str, int | None, list[str], list[str]]


def error_row(error: BaseException, where: str = "") -> ErrorRow:
    """An error as its type's name, its message behind `where`, and its notes.

    With `where`, a traceback is a further note.
    """
    notes = [*getattr(error, "__notes__", ())]
    if where:
        notes.append("".join(format_exception(error)))
    reasons = [str(reason) for reason in getattr(error, "reasons", ())]
    kind, message, known = type(error), str(error), {*_error_types().values()}
    if kind not in known:  # a plugin's: what it was made from, so a fault of the caller stays one
        kind = next((one for one in kind.__mro__ if one in known), NanoVLLMError)
        if kind is NanoVLLMError:
            kind, message = EngineError, f"{type(error).__name__}: {message}"
    row = (kind.__name__, where + message, getattr(error, "prompt_index", None), reasons, notes)
    return msgspec.to_builtins(_valid(row))  # type: ignore[no-any-return]


def _valid(value: Any) -> Any:
    """Texts without half surrogate pairs, which no encoding has."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return type(value)(map(_valid, value)) if isinstance(value, list | tuple) else value


def read_error(row: ErrorRow | list[Any]) -> NanoVLLMError:
    """The error of a row: one of the core's types."""
    name, message, prompt_index, reasons, notes = row
    error = _error_types()[name](message)
    for field, value in (("prompt_index", prompt_index), ("reasons", tuple(reasons))):
        if value not in (None, ()):
            setattr(error, field, value)
    for note in notes:
        error.add_note(note)
    return error


def _error_types() -> dict[str, type[NanoVLLMError]]:
    """The core's own, whose first argument is the message. A plugin's type stays in its process."""
    found, left = {}, [NanoVLLMError]
    while left:
        one = left.pop()
        if one.__module__ == NanoVLLMError.__module__:
            found[one.__name__] = one
        left += one.__subclasses__()
    return found


# -- facts and counters


def stats_row(stats: EngineStats) -> dict[str, Any]:
    """The counters of one engine, or of several with those of each."""
    return asdict(stats)


def read_stats(content: dict[str, Any]) -> EngineStats:
    """Those of `stats_row`."""
    return EngineStats(**{**content, "engines": tuple(map(read_stats, content["engines"]))})


def info_row(info: WorkerInfo) -> dict[str, Any]:
    """The state of an engine's workers."""
    return {one.name: getattr(info, one.name) for one in fields(info)}


def read_info(content: dict[str, Any]) -> WorkerInfo:
    """That of `info_row`."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
    }
    return WorkerInfo(**values)
