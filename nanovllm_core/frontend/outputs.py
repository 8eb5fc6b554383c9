"""From the engine's deltas to the outputs of a caller: text, stop strings, all tokens so far."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Protocol

from nanovllm_core.engine import OutputDelta
from nanovllm_core.errors import NanoVLLMError
from nanovllm_core.interfaces.observer import FinishReason
from nanovllm_core.interfaces.plan import TokenLogprobs
from nanovllm_core.interfaces.sampling_params import SamplingParams


class Detokenizer(Protocol):
    """Turns one sample's output ids into text, a few at a time."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these further ids complete; "" while a character is incomplete."""

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """The rest with these last ids, such as the bytes of half a character; nothing follows."""


EndAt = Callable[[str, int, int, str | None], None]
"""`Engine.end_at`, or a message that has the same effect."""


@dataclass(slots=True, eq=False)
class Transcript:
    """Everything that one sample has given so far. It only grows, so its outputs can share it."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """One for each output that was handed out."""
    logprobs: list[TokenLogprobs] | None = None


@dataclass(kw_only=True, eq=False)
class RequestOutput:
    """One sample of a request, so far (`finish_reason` None) or for good.

    `token_ids` are all output ids, with the end-of-sequence id if that ended them; `text` leaves
    the ending id and the stop string out, and is "" without a tokenizer. `stop_reason` is the id or
    string that stopped the request, `error` what ended it where the reason is "error": a constraint
    that raised or was too slow, or no id that was left. `logprobs` has an entry per output id where
    they were asked for. `num_cached_tokens` counts prompt tokens the prefix cache held,
    `wait_steps` the engine's steps from the arrival to the admission (None before it).

    `token_ids`, `text` and `logprobs` are copied from the transcript when they are first read. A
    stream of which only `new_token_ids` and `new_text` are read copies each token once.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    new_token_ids: list[int]
    new_text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: NanoVLLMError | None = None
    num_cached_tokens: int = 0
    wait_steps: int | None = None
    num_token_ids: int
    """Output ids so far: the length of `token_ids`, without making it."""
    transcript: Transcript = field(repr=False)
    num_texts: int = field(repr=False)

    @cached_property
    def token_ids(self) -> list[int]:
        return self.transcript.token_ids[: self.num_token_ids]

    @cached_property
    def text(self) -> str:
        return "".join(self.transcript.texts[: self.num_texts])

    @cached_property
    def logprobs(self) -> list[TokenLogprobs] | None:
        logprobs = self.transcript.logprobs
        return None if logprobs is None else logprobs[: self.num_token_ids]

    @property
    def finished(self) -> bool:
        """True for the last output of the sample."""
        return self.finish_reason is not None

    def __getitem__(self, key: str) -> object:
        """`output["text"]` and `output["token_ids"]`, as nano-vllm's outputs answer."""
        if key not in ("text", "token_ids"):
            raise KeyError(f"{key!r}; an output answers 'text' and 'token_ids', see its attributes")
        return getattr(self, key)


class _StopStrings:
    """The stop strings of a request; to look for a thousand takes hardly longer than for one."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._places = {string: place for place, string in reversed([*enumerate(strings)])}
        self._lengths = sorted({len(string) for string in strings})
        self._sorted = sorted(strings)

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """The stop string that begins first of those that end in `text` behind `start`, and where.

        Of several that begin there it is the first in the request's order.
        """
        found = [
            (end - length, self._places[text[end - length : end]])
            for end in range(start + 1, len(text) + 1)
            for length in self._lengths
            if length <= end and text[end - length : end] in self._places
        ]
        if not found:
            return None
        at, place = min(found)
        return at, self._strings[place]

    def num_begun(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        for start in range(max(0, len(text) - self._lengths[-1] + 1), len(text)):
            end = text[start:]
            following = bisect_right(self._sorted, end)  # If one goes on from `end`, it is this.
            if following < len(self._sorted) and self._sorted[following].startswith(end):
                return len(end)
        return 0


_index = lru_cache(maxsize=16)(_StopStrings)
"""One for all samples of a request."""


class OutputStream:
    """Makes the outputs of one sample from its deltas; only the last one without `stream`.

    A request with stop strings is added to the engine with `searched=True`. Where its text ends is
    reported by `end_at`; ids that the engine computed beyond that are dropped.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        end_at: EndAt,
        stream: bool = True,
    ) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._detokenizer = detokenizer
        self._end_at = end_at
        self._stream = stream
        self._stop_strings = _index(params.stop_strings) if params.stop_strings else None
        self._min_tokens = params.min_tokens
        self._transcript = Transcript(logprobs=None if params.logprobs is None else [])
        self._stop: str | None = None
        """The stop string that was found."""
        self._held = ""
        """Text that was not handed out: it may be the beginning of a stop string."""
        self._num_sent = 0

    def push(self, delta: OutputDelta) -> RequestOutput | None:
        """The next output; None without `stream`, and behind a stop string, until the last."""
        is_last = delta.finish_reason is not None
        if self._stop is None:
            self._read(delta)
            if self._stop is not None or (is_last and self._stop_strings):
                size = len(self._transcript.token_ids)
                self._end_at(delta.request_id, delta.index, size, self._stop)
        if not is_last and (self._stop is not None or not self._stream):
            return None
        return self._take(delta)

    def _read(self, delta: OutputDelta) -> None:
        """Add the ids and the text of a delta, up to the first stop string."""
        ids, is_last = delta.new_token_ids, delta.finish_reason is not None
        before = len(self._transcript.token_ids)
        if not self._stop_strings:
            self._transcript.token_ids += ids
            self._held += self._decode(ids, delta, is_last)
        else:
            # One id at a time: the output ends with the id that completes a stop string.
            for place, token_id in enumerate(ids, 1):
                self._transcript.token_ids.append(token_id)
                text = self._decode([token_id], delta, is_last and place == len(ids))
                if self._append(text):
                    break
            if is_last and not ids:
                self._held += self._decode([], delta, is_last)
        if self._transcript.logprobs is not None and delta.new_logprobs is not None:
            taken = len(self._transcript.token_ids) - before
            self._transcript.logprobs += delta.new_logprobs[:taken]

    def _decode(self, token_ids: list[int], delta: OutputDelta, is_last: bool) -> str:
        """The text of further ids; an id that ended the sample has none."""
        if self._detokenizer is None:
            return ""
        if not is_last:
            return self._detokenizer.push(token_ids)
        ended_by_id = isinstance(delta.stop_reason, int)
        return self._detokenizer.flush(token_ids[:-1] if ended_by_id else token_ids)

    def _append(self, text: str) -> bool:
        """Append further text and cut it before a stop string; True if it completes one."""
        # A match must end in the new text: what came before min_tokens does not count. Its
        # beginning was held back.
        searched = len(self._held)
        self._held += text
        if len(self._transcript.token_ids) < self._min_tokens:
            return False
        found = self._stop_strings and self._stop_strings.find(self._held, searched)
        if found:
            at, self._stop = found
            self._held = self._held[:at]
        return bool(found)

    def _take(self, delta: OutputDelta) -> RequestOutput:
        is_last, transcript = delta.finish_reason is not None, self._transcript
        stops = None if is_last else self._stop_strings
        held_back = 0 if stops is None else stops.num_begun(self._held)
        sendable = len(self._held) - held_back
        new_text, self._held = self._held[:sendable], self._held[sendable:]
        transcript.texts.append(new_text)
        start, self._num_sent = self._num_sent, len(transcript.token_ids)
        return RequestOutput(
            request_id=delta.request_id,
            index=delta.index,
            prompt_token_ids=self._prompt_token_ids,
            new_token_ids=transcript.token_ids[start:],
            new_text=new_text,
            finish_reason=delta.finish_reason if self._stop is None else "stop",
            stop_reason=delta.stop_reason if self._stop is None else self._stop,
            error=delta.error if self._stop is None else None,
            num_cached_tokens=delta.num_cached_tokens,
            wait_steps=delta.wait_steps,
            num_token_ids=self._num_sent,
            transcript=transcript,
            num_texts=len(transcript.texts),
        )
