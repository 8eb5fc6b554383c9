"""From accepted tokens to what the caller gets: text, stop strings, reasons to finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nanovllm_core.engine.request import Request
from nanovllm_core.interfaces.observer import FinishReason
from nanovllm_core.interfaces.plan import TokenLogprobs


class Detokenizer(Protocol):
    """Turns one request's output ids into text, a few at a time."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these further ids complete; "" while a character is incomplete."""

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """The rest with these last ids, such as the bytes of half a character; nothing follows."""


DetokenizerFactory = Callable[[], Detokenizer]
"""Makes a fresh detokenizer; called once for each sample of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One sample of a request, so far (`finish_reason` None) or for good.

    `token_ids` are all output ids, with the end-of-sequence id if that ended them; `text` leaves
    the ending id and the stop string out, and is "" where the request has no detokenizer.
    `stop_reason` is the id or string that stopped the request. `logprobs` has an entry per output
    id where they were asked for. `num_cached_tokens` counts prompt tokens the prefix cache held,
    `wait_steps` the engine's steps from the arrival to the admission (None before it).
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    new_token_ids: list[int]
    text: str = ""
    new_text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    wait_steps: int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __getitem__(self, key: str) -> object:
        """`output["text"]` and `output["token_ids"]`, as nano-vllm's outputs answer."""
        if key not in ("text", "token_ids"):
            raise KeyError(f"{key!r}; an output answers 'text' and 'token_ids', see its attributes")
        return getattr(self, key)


@dataclass(slots=True, eq=False)
class OutputStream:
    """The output of one request while it grows.

    Only watched requests are pushed token by token; the others come as a whole when they finish.
    """

    request: Request
    detokenizer: Detokenizer | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _num_sent_ids: int = 0
    _num_sent_chars: int = 0

    def push(self, token_ids: Sequence[int], ended: bool) -> None:
        """Take further output ids; `ended` says that the device ended the request at the last.

        Sets `finish_reason` where the request is over: by the device's word, by a stop id (the
        device does not check all of many), or by a stop string.
        """
        self.token_ids += token_ids
        sampling, newest = self.request.sampling, self.token_ids[-1] if self.token_ids else None
        is_stop = len(self.token_ids) >= sampling.min_tokens and newest in sampling.stop_token_ids
        ended = ended or is_stop
        if self.detokenizer is not None:
            last = self.detokenizer.flush if ended else self.detokenizer.push
            self._append_text(last(token_ids[:-1] if is_stop else token_ids))
        if self.finish_reason is None and ended:
            self.finish_reason = "stop" if is_stop else "length"
            self.stop_reason = newest if is_stop else None

    def abort(self) -> None:
        """The caller wants no more than the ids that are known now."""
        if not self.request.is_watched:
            self.push(self.request.output_ids(), ended=False)
        if self.detokenizer is not None:
            self.text += self.detokenizer.flush()
        self.finish_reason = "abort"

    def take(self) -> RequestOutput:
        """The output as it stands; what is new since the last time is in `new_...`."""
        sendable = len(self.text) - (0 if self.finish_reason else self._num_held_back())
        output = RequestOutput(
            request_id=self.request.group_id,
            index=self.request.index,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=self.token_ids[:],
            new_token_ids=self.token_ids[self._num_sent_ids :],
            text=self.text[:sendable],
            new_text=self.text[self._num_sent_chars : sendable],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs[:] if self.request.params.logprobs is not None else None,
            num_cached_tokens=self.request.num_cached_tokens,
            wait_steps=self.request.wait_steps,
        )
        self._num_sent_ids = len(self.token_ids)
        self._num_sent_chars = sendable
        return output

    def _append_text(self, text: str) -> None:
        """Append further text and cut it before the first stop string that it completes."""
        searched = len(self.text)
        self.text += text
        strings = self.request.params.stop_strings
        if not strings or len(self.token_ids) < self.request.params.min_tokens:
            return
        # A match must end in the new text: what came before min_tokens does not count.
        found = [
            (at, string)
            for string in strings
            if (at := self.text.find(string, max(0, searched - len(string) + 1))) >= 0
        ]
        if found:
            at, self.stop_reason = min(found, key=lambda match: match[0])
            self.text = self.text[:at]
            self.finish_reason = "stop"

    def _num_held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max(
            (
                size
                for string in self.request.params.stop_strings
                for size in range(1, len(string))
                if self.text.endswith(string[:size])
            ),
            default=0,
        )
