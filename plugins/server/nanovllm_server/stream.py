"""Answers that grow: outputs of the engine as server-sent events, or as one JSON at the end.

Both are plain ASGI: one `send` for each step of the engine, around text that alone is encoded anew.
When the client leaves, the request is aborted at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm_core import AsyncLLM, RequestOutput, SamplingParams
from nanovllm_server.errors import ApiError, of_engine
from nanovllm_server.guard.admission import Admission
from nanovllm_server.guard.asgi import send_error
from nanovllm_server.watch.trace_context import trace_labels

JSON_HEADERS = [(b"content-type", b"application/json")]
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect a stream before it passes it on.
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode


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

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of all prompts as they come, each with its choice's index in the answer.

        Closing the generator aborts every prompt.
        """
        if len(self.prompts) == 1:
            async with aclosing(self._generate(0)) as outputs:
                async for output in outputs:
                    yield output.index, output
            return
        ready: deque[tuple[int, RequestOutput] | BaseException | None] = deque()
        wake = asyncio.Event()
        tasks = [
            asyncio.create_task(self._collect(place, ready, wake))
            for place in range(len(self.prompts))
        ]
        try:
            left = len(tasks)
            while left:
                await wake.wait()
                wake.clear()
                while ready:
                    one = ready.popleft()
                    if isinstance(one, BaseException):
                        raise one
                    if one is None:
                        left -= 1
                    else:
                        yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _generate(self, place: int) -> AsyncGenerator[RequestOutput, None]:
        labels = {**self.labels, **trace_labels()}
        return self.llm.generate(
            self.prompts[place],
            self.params,
            labels=labels,
            cache_salt=self.cache_salt,
            stream=self.stream,
        )

    async def _collect(self, place: int, ready: deque[Any], wake: asyncio.Event) -> None:
        """Put one prompt's outputs into `ready`: then None, or the error that ended it."""
        first = place * self.params.n
        try:
            async with aclosing(self._generate(place)) as outputs:
                async for output in outputs:
                    ready.append((first + output.index, output))
                    wake.set()
            ready.append(None)
        except Exception as error:
            ready.append(error)
        wake.set()


@dataclass(slots=True)
class Usage:
    """The tokens of an answer, counted from the last output of each choice."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Count a finished choice; the prompt is counted with its first one."""
        self.completion_tokens += output.num_token_ids
        if output.index == 0:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Shape(ABC):
    """How an endpoint writes its answers."""

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """The events before the first output of a choice."""

    @abstractmethod
    def event(self, index: int, output: RequestOutput) -> bytes:
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
        self.usage = Usage()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _run(self, send: Send) -> None:
        try:
            with self.work.admission.enter(len(self.work.prompts) * self.work.params.n):
                await self._answer(send)
        except Exception as error:
            await self._fail(of_engine(error, self.work.prompt_field), send)

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs; those that end a choice are counted, and raise where they failed."""
        async with aclosing(self.work.outputs()) as outputs:
            async for index, output in outputs:
                if output.finish_reason is not None:
                    if output.finish_reason not in ("stop", "length"):
                        raise output.error or ApiError(
                            503, "the request was aborted in the server", code="aborted"
                        )
                    self.usage.add(output)
                yield index, output

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
        async for index, output in self._outputs():
            if output.finished:
                last[index] = output
        ordered = {index: last[index] for index in sorted(last)}
        await _send_json(send, 200, encode(self.shape.whole(ordered, self.usage)))

    async def _fail(self, error: ApiError, send: Send) -> None:
        await send_error(send, error)


class EventStream(Answer):
    """Server-sent events. Headers are sent with the first, so that a refusal has its status."""

    has_started = False

    def __init__(self, work: Work, shape: Shape, include_usage: bool) -> None:
        super().__init__(work, shape)
        self.include_usage = include_usage

    async def _answer(self, send: Send) -> None:
        shape, opened = self.shape, set[int]()
        async for index, output in self._outputs():
            event = shape.event(index, output)
            if index not in opened:
                opened.add(index)
                event = shape.opening(index) + event
            if event:
                await self._send(send, event)
        last = shape.usage_event(self.usage) if self.include_usage else b""
        await self._send(send, last + DONE, more=False)

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


def answer(work: Work, shape: Shape, include_usage: bool) -> Response:
    """The response that does the work."""
    return EventStream(work, shape, include_usage) if work.stream else WholeAnswer(work, shape)


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _until_gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
