"""Answers that grow: outputs of the engine as server-sent events, or as one JSON at the end.

Both are plain ASGI: one `send` for each step of the engine, around text that alone is encoded anew.
When the client leaves, the request is aborted at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm_core import AsyncLLM, RequestOutput, SamplingParams
from nanovllm_core.engine import EngineLimits
from nanovllm_core.errors import EngineClosedError, EngineError, RequestError
from nanovllm_server.bodies import StreamOptions
from nanovllm_server.errors import ApiError, of_engine
from nanovllm_server.guard.admission import Admission
from nanovllm_server.guard.asgi import freeing, send_error
from nanovllm_server.guard.prompts import check_logprobs
from nanovllm_server.watch.trace_context import trace_labels

JSON_HEADERS = [(b"content-type", b"application/json")]
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect a stream before it passes it on.
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
MAX_LOGPROBS_AT_ONCE = 512
"""Of the events that a stream encodes while the event loop waits, alternatives included: so many
take 2 to 4 ms."""
MOST_AT_LAST = 16 * 1024
"""Bytes of a whole answer that are sent when its places are free: a socket takes them at once."""
encode = msgspec.json.encode
Choice = tuple[int, RequestOutput]
"""The index of a choice in the answer, and its next output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one HTTP request asks of the engine."""

    llm: AsyncLLM
    prompts: Sequence[list[int]]
    params: SamplingParams
    labels: Mapping[str, str]
    cache_salt: bytes
    admission: Admission
    stream: bool
    prompt_field: str
    """The field that holds the prompts, for errors."""
    count_lost: Callable[[int], None] = lambda _: None
    """Called with the choices that end with their engine, of which no engine has a record."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def most_tokens(self) -> int:
        """The most tokens that all choices can have together."""
        length = self.llm.info.max_model_len
        most = self.params.max_tokens or length
        return self.params.n * sum(min(most, length - len(ids)) for ids in self.prompts)

    async def outputs(self) -> AsyncGenerator[list[Choice], None]:
        """The outputs of all prompts as they come: those that are ready at one time, together.

        Closing the generator aborts every prompt.
        """
        if self.num_choices == 1:
            try:
                async with aclosing(self._generate(0)) as outputs:
                    async for output in outputs:
                        yield [(0, output)]
            except Exception as error:
                self._count_if_lost(error, 1)
                raise
            return
        if len(self.prompts) > 1:
            self.check_prompts()
        # It holds a step. Of what a slow client leaves in the engine's mailbox, tokens are joined.
        ready: asyncio.Queue[Choice | Exception] = asyncio.Queue(self.num_choices)
        tasks = [
            asyncio.create_task(self._collect(place, ready)) for place in range(len(self.prompts))
        ]
        try:
            left = self.num_choices
            while left:
                found = [await ready.get()]
                while not ready.empty():
                    found.append(ready.get_nowait())
                choices = [one for one in found if not isinstance(one, Exception)]
                left -= sum(output.finished for _, output in choices)
                for one in found:
                    if isinstance(one, Exception):
                        self._count_if_lost(one, left)
                        raise one
                yield choices
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _count_if_lost(self, error: Exception, left: int) -> None:
        """Count the choices that had not ended when the engine did.

        A request that the engine refused, or that came after its end, has not begun.
        """
        if not isinstance(error, ApiError | RequestError | EngineClosedError):
            self.count_lost(left)

    def check_prompts(self) -> None:
        """Raise what the engine would refuse any of the prompts for, before it has one of them.

        Each is a request of its own there, and one that is refused may come behind others that run.
        """
        limits = EngineLimits.of(self.llm.config, self.llm.info)
        for prompt in self.prompts:
            limits.check_length(len(limits.check_prompt(prompt)), self.params)

    def _generate(self, place: int) -> AsyncGenerator[RequestOutput, None]:
        labels = {**self.labels, **trace_labels()}
        return self.llm.generate(
            self.prompts[place],
            self.params,
            labels=labels,
            cache_salt=self.cache_salt,
            stream=self.stream,
        )

    async def _collect(self, place: int, ready: asyncio.Queue[Choice | Exception]) -> None:
        """Put one prompt's outputs into `ready`, or the error that ended it."""
        first = place * self.params.n
        try:
            async with aclosing(self._generate(place)) as outputs:
                async for output in outputs:
                    await ready.put((first + output.index, output))
        except Exception as error:
            await ready.put(error)


@dataclass(slots=True)
class Usage:
    """The tokens of an answer, counted as its outputs come."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts of which the first choice has ended."""

    def add(self, output: RequestOutput) -> None:
        self.completion_tokens += len(output.new_token_ids)
        if output.finished and output.index == 0:
            self.cached_tokens += output.num_cached_tokens

    @property
    def so_far(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    @property
    def body(self) -> dict[str, Any]:
        return {**self.so_far, "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


class Shape(ABC):
    """How an endpoint writes its answers. `after` ends an event, behind its choice."""

    @abstractmethod
    def opening(self, index: int, after: bytes) -> bytes:
        """The events before the first output of a choice."""

    @abstractmethod
    def event(self, index: int, output: RequestOutput, after: bytes) -> bytes:
        """The event of an output; b"" where it has nothing to tell."""

    @abstractmethod
    def usage_event(self, usage: Usage) -> bytes:
        """The event that ends a stream with `include_usage`."""

    @abstractmethod
    def whole(self, outputs: Mapping[int, RequestOutput], usage: Usage) -> dict[str, Any]:
        """The answer at once, from the last output of each choice, in order."""


class Answer(Response):
    """The base of both forms: it ends the work when the client leaves, and tells errors."""

    def __init__(self, work: Work, shape: Shape) -> None:
        # Not the parent's, which would render a body.
        self.work = work
        self.shape = shape
        self.background = None
        self.usage = Usage(sum(map(len, work.prompts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work  # It raises what kept the answer or its error from being sent.
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _run(self, send: Send) -> None:
        try:
            with ExitStack() as held:
                held.enter_context(self.work.admission.enter(self.work.num_choices))
                await self._answer(freeing(send, held))
        except Exception as error:
            await self._fail(of_engine(error, self.work.prompt_field), send)

    async def _outputs(self) -> AsyncGenerator[list[Choice], None]:
        """The outputs, counted; those that failed raise."""
        async with aclosing(self.work.outputs()) as outputs:
            async for choices in outputs:
                for _, output in choices:
                    if output.finish_reason not in (None, "stop", "length"):
                        if isinstance(output.error, EngineError):  # it ran on too many that ended
                            self.work.count_lost(1)
                        raise output.error or ApiError(
                            503, "the request was aborted in the server", code="aborted"
                        )
                    self.usage.add(output)
                yield choices

    @abstractmethod
    async def _answer(self, send: Send) -> None:
        """Do the work, and send what it gives."""

    @abstractmethod
    async def _fail(self, error: ApiError, send: Send) -> None:
        """Send an error, after whatever was sent."""


class WholeAnswer(Answer):
    """One JSON, when every choice has ended."""

    async def _answer(self, send: Send) -> None:
        last: dict[int, RequestOutput] = {}
        async for choices in self._outputs():
            last.update((index, output) for index, output in choices if output.finished)
        ordered = {index: last[index] for index in sorted(last)}
        if self.work.params.logprobs is None:
            body = self._encode(ordered)
        else:  # Those of a long answer take seconds, in which the event loop serves others.
            body = await asyncio.to_thread(self._encode, ordered)
        await _send_json(send, 200, body)

    def _encode(self, outputs: dict[int, RequestOutput]) -> bytes:
        return encode(self.shape.whole(outputs, self.usage))

    async def _fail(self, error: ApiError, send: Send) -> None:
        await send_error(send, error)


class EventStream(Answer):
    """Server-sent events. Headers are sent with the first, so that a refusal has its status."""

    has_started = False

    def __init__(self, work: Work, shape: Shape, options: StreamOptions) -> None:
        super().__init__(work, shape)
        self.options = options
        self._opened: set[int] = set()

    async def _answer(self, send: Send) -> None:
        async for choices in self._outputs():
            for place, part in enumerate(_parts(choices, self.work.params.logprobs)):
                if place:
                    await asyncio.sleep(0)  # Others go on between two parts.
                if events := self._events(part):
                    await self._send(send, events)
        last = self.shape.usage_event(self.usage) if self.options.include_usage else b""
        await self._send(send, last + DONE, more=False)

    def _events(self, choices: Sequence[Choice]) -> bytes:
        """The events of some outputs; b"" where they have nothing to tell."""
        after = b"}]}\n\n"
        if self.options.continuous_usage_stats:
            after = b'}],"usage":%b}\n\n' % encode(self.usage.so_far)
        elif self.options.include_usage:
            after = b'}],"usage":null}\n\n'
        events = []
        for index, output in choices:
            if index not in self._opened:
                self._opened.add(index)
                events.append(self.shape.opening(index, after))
            events.append(self.shape.event(index, output, after))
        return b"".join(events)

    async def _fail(self, error: ApiError, send: Send) -> None:
        if self.has_started:
            await self._send(send, b"data: %b\n\n" % encode(error.body), more=False)
        else:
            await send_error(send, error)

    async def _send(self, send: Send, events: bytes, more: bool = True) -> None:
        if not self.has_started:
            self.has_started = True
            start = {"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS}
            await send(start)
        await send({"type": "http.response.body", "body": events, "more_body": more})


def answer(work: Work, shape: Shape, options: StreamOptions | None) -> Response:
    """The response that does the work; ApiError for a whole one that could be too large."""
    if not work.stream:
        check_logprobs(work.params.logprobs, work.most_tokens)
        return WholeAnswer(work, shape)
    return EventStream(work, shape, options or StreamOptions())


def _parts(choices: list[Choice], num_alternatives: int | None) -> Iterator[list[Choice]]:
    """The same outputs in parts of at most `MAX_LOGPROBS_AT_ONCE`, or of one token.

    `num_alternatives` come with each token; None for no log-probabilities, and one part.
    """
    if num_alternatives is None:
        yield choices
        return
    most = max(1, MAX_LOGPROBS_AT_ONCE // (1 + num_alternatives))
    part: list[Choice] = []
    room = most
    for index, output in choices:
        for piece in _pieces(output, most):
            room -= len(piece.new_token_ids)
            if room < 0:
                yield part
                part, room = [], most - len(piece.new_token_ids)
            part.append((index, piece))
    yield part


def _pieces(output: RequestOutput, most: int) -> Iterator[RequestOutput]:
    """An output in pieces of so many new tokens: the first has its text, the last its end."""
    ids = output.new_token_ids
    if len(ids) <= most:
        yield output
        return
    for start in range(0, len(ids), most):
        new_ids = ids[start : start + most]
        num_left = len(ids) - start - len(new_ids)
        yield replace(
            output,
            new_token_ids=new_ids,
            num_token_ids=output.num_token_ids - num_left,
            new_text="" if start else output.new_text,
            finish_reason=None if num_left else output.finish_reason,
        )


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if first := body[:-MOST_AT_LAST]:
        await send({"type": "http.response.body", "body": first, "more_body": True})
    await send({"type": "http.response.body", "body": body[-MOST_AT_LAST:]})


async def _until_gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
