"""One streamed request over HTTP, and the times at which its tokens came.

The client is aiohttp. Per streamed event it needs about a quarter of httpx's CPU time and half as
much again as a protocol of our own would, which would have connections, TLS and pooling to keep
right. uvloop would save little more, and its clock has milliseconds only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import aiohttp
import msgspec

from nanovllm_bench.serve.events import DONE, EventReader, allot_tokens, decode_chunk
from nanovllm_bench.workloads import text_of
from nanovllm_core.errors import clip, shown

Prompts = Literal["ids", "text", "chat"]
KEEP_ALIVE_SECONDS = 2.0
"""Below the time after which servers close an idle connection, which may be five seconds."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go, and what all of them say."""

    url: str
    model: str
    prompts: Prompts = "ids"
    body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 300.0
    """Seconds for one request, from its sending to its end."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.prompts == "chat" else "/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def open_session(self) -> aiohttp.ClientSession:
        """A session without limits of its own on connections or time."""
        return aiohttp.ClientSession(
            self.url,
            headers={**self.headers, "Content-Type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None),
        )

    def encode(self, request: Request) -> bytes:
        """The body of a request."""
        ids = request.prompt
        said: dict[str, Any] = {"prompt": ids if self.prompts == "ids" else text_of(ids)}
        if self.prompts == "chat":
            said = {"messages": [{"role": "user", "content": text_of(ids)}]}
        fields = {
            "model": self.model,
            **said,
            "max_tokens": request.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(fields | dict(self.body))


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt (ids), the tokens that it asks for, and when it arrives."""

    prompt: list[int]
    output_len: int
    at: float | None = None
    """Seconds after the start of the load; None where a client sends it when it is free."""


@dataclass(slots=True)
class Answer:
    """What came of a request; times in seconds of the event loop's clock."""

    asked: int
    arrived: float
    sent: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each chunk with tokens came."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of each such chunk."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    """The kind of error: `http 429`, `timeout`, `connection`, `cut off`, `error event`, ..."""
    message: str = ""


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, request: Request, arrived: float | None
) -> Answer:
    """Send a request and follow its stream; errors are in the answer, never raised."""
    loop = asyncio.get_running_loop()
    body, sent = endpoint.encode(request), loop.time()
    answer = Answer(request.output_len, sent if arrived is None else arrived, sent)
    try:
        async with (
            asyncio.timeout(endpoint.timeout),
            session.post(endpoint.path, data=body) as response,
        ):
            if response.status == 200:
                await _follow(response, answer, loop)
            else:
                answer.error = f"http {response.status}"
                answer.message = clip(await response.text(errors="replace"))
    except TimeoutError:
        answer.error, answer.message = "timeout", f"no end after {endpoint.timeout:g} s"
    except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, OSError) as error:
        answer.error, answer.message = "connection", str(error)
    except aiohttp.ClientPayloadError as error:
        answer.error, answer.message = "cut off", str(error)
    except aiohttp.ClientError as error:
        answer.error, answer.message = type(error).__name__, str(error)
    answer.ended = answer.ended or loop.time()
    return answer


async def _follow(
    response: aiohttp.ClientResponse, answer: Answer, loop: asyncio.AbstractEventLoop
) -> None:
    """Note each chunk's time and, at the end, its tokens."""
    _read_small(response)
    reader, lengths, counted = EventReader(), list[int](), list[int]()
    total: int | None = None
    async for data in response.content.iter_any():
        now = loop.time()
        for payload in reader.feed(data):
            if payload == DONE:
                answer.ended = now
                answer.tokens = tokens_of(total, counted, lengths)
                if not answer.times:
                    answer.error, answer.message = "no tokens", "the stream held none"
                continue  # to the end of the body, so that the connection can be used again
            try:
                chunk = decode_chunk(payload)
            except msgspec.MsgspecError as error:
                answer.error, answer.message = "malformed event", str(error)
                return
            if chunk.error is not None:
                answer.error, answer.message = "error event", shown(chunk.error)
                return
            if chunk.usage is not None:
                total = chunk.usage.completion_tokens
                answer.prompt_tokens = chunk.usage.prompt_tokens
                if (details := chunk.usage.prompt_tokens_details) is not None:
                    answer.cached_tokens = details.cached_tokens
            length = chunk.text_length
            if length or (answer.times and any(choice.is_silent for choice in chunk.choices)):
                answer.times.append(now)
                lengths.append(length)
                if chunk.usage is not None:
                    counted.append(chunk.usage.completion_tokens)
    if not answer.ended:
        answer.error, answer.message = "cut off", "the stream ended without [DONE]"


def _read_small(response: aiohttp.ClientResponse) -> None:
    """Receive into 64 KiB at a time, where asyncio's own transports take 256.

    The C library often maps so large a buffer anew for each event, at twice the cost of the event.
    """
    transport: Any = response.connection and response.connection.transport
    if hasattr(transport, "max_size"):
        transport.max_size = 65_536


def tokens_of(total: int | None, counted: list[int], lengths: list[int]) -> list[int]:
    """Tokens of each chunk: from usage in every chunk, else from the total, else one each.

    `counted` are running totals of the chunks that had them; tokens without text behind the last
    chunk count with it.
    """
    if not lengths or total is None:
        return [1] * len(lengths)
    edges = [0, *counted[:-1], total]
    if len(counted) != len(lengths) or edges != sorted(edges):
        return allot_tokens(total, lengths)
    return [later - earlier for earlier, later in pairwise(edges)]
