"""The suite that every plugin with routes must pass; `nanovllm plugins test NAME` runs it.

class TestMyRoutes(RouteConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from starlette.routing import Router

from nanovllm_core import AsyncLLM
from nanovllm_kit import PluginUnderTest, SpecConformance
from nanovllm_server import page
from nanovllm_server.app import make_app
from nanovllm_server.settings import ServerSettings
from nanovllm_server.watch.routes import RouteContext, RoutePlugin, RouteSpec

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANSWER_S = 10.0
"""What a route may take to answer a request without a body."""


@dataclass
class Answer:
    """What an application sent: its messages as they came, and their parts."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        pairs = self.messages[0]["headers"]
        return {name.decode().lower(): value.decode() for name, value in pairs}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def is_complete(self) -> bool:
        return len(self.messages) > 1 and not self.messages[-1].get("more_body")


async def call(
    app: ASGIApp,
    path: str,
    method: str = "GET",
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    scope_type: str = "http",
) -> Answer:
    """Send one request to an application, without a socket."""
    answer = Answer()
    inbox: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()  # The client stays until it has its answer.
        raise AssertionError

    async def send(message: Message) -> None:
        answer.messages.append(dict(message))

    scope = {
        "type": scope_type,
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    await app(scope, receive, send)
    return answer


@cache
def demo_engine() -> AsyncLLM:
    """The embedded model, for the plugins that a test makes; open until the process ends."""
    return AsyncLLM("demo", device="cpu", limits={"max_num_seqs": 4})


PARTS = [b"data: one\n\n", "data: zwölf\n\n".encode(), b"", b"data: [DONE]\n\n"]


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that streams, as the server's own do; it knows nothing but HTTP."""
    assert scope["type"] == "http"
    await receive()
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in PARTS:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class RouteConformance(SpecConformance):
    """What every plugin with routes holds."""

    @pytest.fixture
    def context(self) -> RouteContext:
        """What the server tells a plugin; the engine runs the embedded model."""
        return RouteContext(engine=demo_engine, model_name="demo")

    @pytest.fixture
    def own(self, plugin: PluginUnderTest, context: RouteContext) -> RoutePlugin:
        """A fresh plugin."""
        made: RoutePlugin = plugin.load()(plugin.options, context)
        return made

    def paths(self, own: RoutePlugin) -> Sequence[str]:
        """The paths of its routes, with those that have parameters left out."""
        paths = [str(getattr(route, "path", "")) for route in own.routes()]
        return [path for path in paths if "{" not in path]

    def test_the_spec_names_a_route_plugin(self, plugin: PluginUnderTest) -> None:
        """`impl` is a `RoutePlugin` class, in a `RouteSpec`."""
        assert isinstance(plugin.spec, RouteSpec)
        assert issubclass(plugin.load(), RoutePlugin)

    def test_its_paths_begin_with_a_slash_and_differ(self, own: RoutePlugin) -> None:
        """Two routes of one path would hide each other; methods belong to one route."""
        paths = [getattr(route, "path", None) for route in own.routes()]
        assert all(isinstance(path, str) and path.startswith("/") for path in paths), paths
        assert len(set(paths)) == len(paths)

    def test_its_paths_are_none_of_the_servers(self, own: RoutePlugin) -> None:
        """The server refuses to start with a plugin that has one of its paths.

        What lies beneath the page's folder needs no key, so it is none for a plugin either.
        """
        server = make_app(demo_engine(), ServerSettings())
        taken = {getattr(route, "path", "") for route in server.router.routes}
        for path in self.paths(own):
            assert path not in taken, path
            assert not path.startswith(page.FOLDER), path

    def test_every_route_answers_any_method(self, own: RoutePlugin) -> None:
        """Without a body and without a header: an answer, also if it is an error, in bounded time.

        An exception that leaves a route is a fault of the plugin.
        """
        router = Router(own.routes())

        async def ask() -> None:
            for path in self.paths(own):
                for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
                    answer = await asyncio.wait_for(call(router, path, method), ANSWER_S)
                    assert answer.is_complete, (path, method)
                    assert answer.status < 500 or answer.status == 503, (path, method)

        asyncio.run(ask())

    def test_what_it_does_not_serve_passes_unchanged(self, own: RoutePlugin) -> None:
        """A stream keeps its status and its parts, one by one, so that no text is held back."""
        answer = asyncio.run(call(own.wrap(stream), "/v1/chat/completions", "POST", b"{}"))
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream"
        parts = [message["body"] for message in answer.messages[1:]]
        assert parts == [*PARTS, b""]

    def test_an_application_that_raises_raises_through_it(self, own: RoutePlugin) -> None:
        """The server writes the answer and the log; a plugin that hides an error hides it there."""

        async def broken(scope: Scope, receive: Receive, send: Send) -> None:
            raise LookupError("a fault of the server")

        with pytest.raises(LookupError, match="a fault of the server"):
            asyncio.run(call(own.wrap(broken), "/v1/models"))

    def test_a_scope_that_is_no_request_passes(self, own: RoutePlugin) -> None:
        """Such as `lifespan`, which has neither path nor headers to look at."""
        seen: list[Scope] = []

        async def taken(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope)

        async def nothing() -> Message:
            return {"type": "lifespan.startup"}

        async def ignored(message: Message) -> None:
            """Whatever comes."""

        asyncio.run(_call_plain(own.wrap(taken), {"type": "lifespan"}, nothing, ignored))
        assert [scope["type"] for scope in seen] == ["lifespan"]

    def test_closing_one_leaves_another_of_the_same_options(
        self, plugin: PluginUnderTest, context: RouteContext
    ) -> None:
        """One process may have several servers, one after another."""
        first, second = (plugin.load()(plugin.options, context) for _ in range(2))
        asyncio.run(first.close())
        answer = asyncio.run(call(second.wrap(stream), "/v1/completions", "POST", b"{}"))
        assert answer.status == 200
        asyncio.run(second.close())


async def _call_plain(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)
