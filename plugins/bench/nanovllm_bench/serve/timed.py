"""An endpoint whose times are known: it answers by a script, and notes when it did what.

    python -m nanovllm_bench.serve.timed --port 8001 --first-ms 60 --gap-ms 15

Any tool that measures endpoints can be held against it. The answers' texts mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

MODEL = "timed"
LOOK_SECONDS = 0.01
Ending = Literal["done", "cut", "close", "hang", "error", "garbage"]


@dataclass(frozen=True, slots=True)
class Script:
    """How one request is answered; delays in seconds."""

    first: float
    gaps: Sequence[float] = ()
    """Before each chunk after the first."""
    tokens: int = 1
    """Of each chunk."""
    ending: Ending = "done"
    """`cut`: the body ends without [DONE]; `close`: the connection ends within the body; `hang`:
    nothing more comes; `error`: an event with an error; `garbage`: an event that is no JSON."""
    status: int = 200


@dataclass(slots=True)
class Served:
    """What the endpoint did for a request, in seconds of the event loop's clock."""

    body: dict[str, Any]
    headers: Mapping[str, str]
    received: float
    written: list[float] = field(default_factory=list)
    """When each chunk with text was written."""
    left: bool = False
    """The client went before its answer ended."""


def steady(first: float, gap: float) -> Callable[[int, Mapping[str, Any]], Script]:
    """As many tokens as a request asks for, at even times."""
    return lambda _index, body: Script(first, [gap] * (int(body.get("max_tokens") or 16) - 1))


@dataclass(slots=True)
class TimedEndpoint:
    """Answers by `script`, which gets a request's number and its body."""

    script: Callable[[int, Mapping[str, Any]], Script]
    served: list[Served] = field(default_factory=list)

    @asynccontextmanager
    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Serve meanwhile; gives the URL."""
        server = await asyncio.start_server(self._connection, host, port)
        try:
            yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection can bring another."""
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        text = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = request.split()
        if method != "POST":
            found = {"/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]}}
            found["/health"] = {}
            return _whole(writer, 200 if path in found else 404, found.get(path, {}))
        body = json.loads(text)
        served = Served(body, headers, asyncio.get_running_loop().time())
        script = self.script(len(self.served), body)
        self.served.append(served)
        if script.status != 200:
            error = {"message": "as the script says", "type": "scripted", "code": script.status}
            return _whole(writer, script.status, {"error": error})
        is_chat = path == "/v1/chat/completions"
        try:
            await _stream(writer, script, served, reader.at_eof, is_chat=is_chat)
        finally:
            served.left = reader.at_eof()
        return not served.left and script.ending != "close"


async def _stream(
    writer: asyncio.StreamWriter,
    script: Script,
    served: Served,
    is_left: Callable[[], bool],
    *,
    is_chat: bool,
) -> None:
    loop = asyncio.get_running_loop()
    kind = "text/event-stream"
    writer.write(_head(200, kind, "transfer-encoding: chunked"))
    said = {"delta": {"content": " word" * script.tokens}} if is_chat else {}
    choice = {"index": 0, "text": " word" * script.tokens, "finish_reason": None, **said}
    if is_chat:
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        _event(writer, {"choices": [opening]})
    moment = served.received
    for delay in (script.first, *script.gaps):
        moment += delay
        await asyncio.sleep(moment - loop.time())
        if is_left():
            return
        served.written.append(loop.time())
        _event(writer, {"choices": [choice]})
        await writer.drain()
    while script.ending == "hang" and not is_left():
        await asyncio.sleep(LOOK_SECONDS)
    if script.ending in ("hang", "close"):
        return
    if script.ending == "error":
        _event(writer, {"error": {"message": "as the script says", "type": "scripted"}})
    if script.ending == "garbage":
        _chunk(writer, b"data: {not json\n\n")
    if script.ending == "done":
        ending: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        _event(writer, {"choices": [{"index": 0, "finish_reason": "length", **ending}]})
        prompt, output = len(served.body.get("prompt", "")), script.tokens * len(served.written)
        usage = {"prompt_tokens": prompt, "completion_tokens": output}
        _event(writer, {"choices": [], "usage": {**usage, "total_tokens": prompt + output}})
        _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def _head(status: int, kind: str, length: str) -> bytes:
    return f"HTTP/1.1 {status} Scripted\r\ncontent-type: {kind}\r\n{length}\r\n\r\n".encode()


def _whole(writer: asyncio.StreamWriter, status: int, value: object) -> bool:
    body = json.dumps(value).encode()
    writer.write(_head(status, "application/json", f"content-length: {len(body)}") + body)
    return True


def _event(writer: asyncio.StreamWriter, value: Mapping[str, Any]) -> None:
    shared = {"id": "1", "object": "chunk", "created": 0, "model": MODEL}
    _chunk(writer, b"data: %s\n\n" % json.dumps({**shared, **value}).encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def _main(port: int, first: float, gap: float) -> None:
    async with TimedEndpoint(steady(first, gap)).listen(port=port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=60.0)
    parser.add_argument("--gap-ms", type=float, default=15.0)
    given = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(given.port, given.first_ms / 1e3, given.gap_ms / 1e3))
