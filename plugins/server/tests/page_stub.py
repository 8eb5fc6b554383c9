"""A server that pretends, for work on the page: `python page_stub.py` serves it on port 8000.

The last word of the last message chooses what it does: `markdown` writes some, `hostile` writes
markup and scripts, `forever` writes until its client goes, `refuse` gets an error, `break` an error
after some words, `vanish` the end of the connection. Any other message gets a short story.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanovllm_server.page import page_routes

STORY = (
    "Once upon a time there was a clever fox named Mia. Mia lived near the forest. One day Mia "
    "found a red kite in the tall grass. The wind was strong, and the kite flew over the trees. "
    "Mia ran after it until the evening came, and then they went home together."
)
MARKDOWN = """## A merge sort

It splits the list, sorts **both halves**, and *merges* them:

```python
def merge_sort(items: list[int]) -> list[int]:
    if len(items) < 2:
        return items
    middle = len(items) // 2
    left, right = merge_sort(items[:middle]), merge_sort(items[middle:])
    return list(heapq.merge(left, right))
```

1. `heapq.merge` walks both halves at once.
2. The time is **O(n log n)**:
   - log n levels
   - n comparisons each
3. See [the documentation](https://docs.python.org/3/library/heapq.html).

| size | comparisons |
|---|---|
| 8 | 17 |
| 1024 | 8977 |

> The order of equal items is kept.
"""
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">

[click](javascript:window.hacked=3) ![i](http://elsewhere.invalid/i.png) <b>not bold</b>

```html"><img src=x onerror=window.hacked=4>
</code></pre><script>window.hacked = 5</script>
```
- <svg onload="window.hacked = 6">
"""
ANSWERS = {"markdown": MARKDOWN, "hostile": HOSTILE}


class Stub:
    """The stub's state: what it was asked, what it was told to do, and how many clients went."""

    def __init__(self) -> None:
        self.url = ""
        self.running = 0
        self.reset()

    def reset(self) -> None:
        """Forget what happened; answer at once, and without a key.

        Answers get to their tenth word while they are held.
        """
        self.requests: list[dict[str, Any]] = []
        self.disconnects = 0
        self.polls = 0
        self.pause = 0.0
        self.held = False
        self.key = ""
        self.problem: str | None = None

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/live", self.live),
            Route("/plugins", self.plugins),
            Route("/version", lambda request: JSONResponse({"version": "0.1.0"})),
        ]
        return Starlette(routes=[*page_routes(), *routes])

    def refusal(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return error_response(401, "This server needs an API key.")

    async def models(self, request: Request) -> Response:
        models = {"object": "list", "data": [{"id": "stand-in", "object": "model"}]}
        return self.refusal(request) or JSONResponse(models)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        word = body["messages"][-1]["content"].split()[-1]
        if word == "refuse":
            return error_response(400, "max_tokens is 0; it is at least 1.", param="max_tokens")
        if refusal := self.refusal(request):
            return refusal
        return StreamingResponse(self.events(word), media_type="text/event-stream")

    async def events(self, word: str) -> AsyncIterator[str]:
        self.running += 1
        written = 0
        try:
            async for text in self.words(word):
                written += 1
                while written == 10 and self.held:
                    await asyncio.sleep(0.005)
                yield event({"choices": [{"index": 0, "delta": {"content": text}}]})
            if word == "break":
                yield event(
                    {"error": {"message": "The engine has failed.", "type": "server_error"}}
                )
            elif word != "vanish":
                yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
                yield event({"choices": [], "usage": {"completion_tokens": written}})
                yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.disconnects += 1
            raise
        finally:
            self.running -= 1

    async def words(self, word: str) -> AsyncIterator[str]:
        text = "Some words." if word in ("break", "vanish") else ANSWERS.get(word, STORY)
        while True:
            for piece in text.splitlines(keepends=True):
                for part in piece.replace(" ", " \0").split("\0"):
                    await asyncio.sleep(self.pause)
                    yield part
            if word != "forever":
                return
            await asyncio.sleep(0.01)

    async def live(self, request: Request) -> Response:
        self.polls += 1
        wave = 1 + 0.25 * math.sin(self.polls / 9) + 0.08 * random.random()
        return self.refusal(request) or JSONResponse(
            {
                "running": round(5 * wave) if self.pause else self.running,
                "waiting": round(max(0.0, 9 * (wave - 1.1))) if self.pause else 0,
                "tokens_per_second": 860 * wave,
                "step_ms": 5.8 * wave,
                "kv_usage": 0.41 * wave,
                "prefix_hit_rate": min(1.0, 0.6 * wave),
                "first_token_ms": {"p50": 21 * wave, "p90": 34 * wave, "p99": 52 * wave},
                "problem": self.problem,
                "inter_token_ms": {"p50": 5.9 * wave, "p90": 7.4 * wave, "p99": 11 * wave},
            }
        )

    async def plugins(self, request: Request) -> Response:
        used = [
            ("attention prefill", "triton", "attention-triton", "first of flash, triton, sdpa"),
            ("attention decode", "triton", "attention-triton", "first of triton, sdpa"),
            ("kernels", "triton", "kernels-triton", "all operations that the model asks for"),
            ("model", "qwen3", "model-qwen3", ""),
            ("scheduler", "sjf", "scheduler-sjf", ""),
        ]
        plugins = [
            {
                "kind": kind,
                "name": name,
                "distribution": f"nanovllm-{distribution}",
                "version": "0.1.0",
                "reason": reason and f"{kind}: {name} runs on this device, {reason}",
            }
            for kind, name, distribution, reason in used
        ]
        return self.refusal(request) or JSONResponse(
            {"plugins": plugins, "choices": ["kernels auto: not torch: triton comes first"]}
        )


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def error_response(status: int, message: str, param: str | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return JSONResponse({"error": error}, status_code=status)


@contextmanager
def serve_stub() -> Iterator[Stub]:
    """A stub on a thread, at a free port."""
    stub = Stub()
    config = uvicorn.Config(stub.app(), log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # Connections wait until the thread takes them.
        stub.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield stub
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    stub = Stub()
    stub.pause = 0.02
    uvicorn.run(stub.app())
