"""The kind `route`: what it declares, how its plugins are chosen, ordered, refused and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, Router

from nanovllm_core import AsyncLLM
from nanovllm_core.api import ConfigError, NoOptions, PluginNotFoundError, ResolvedPlugin
from nanovllm_kit import KindConformance, KindUnderTest, kind_under_test
from nanovllm_server.app import make_app
from nanovllm_server.settings import ServerSettings, parse_settings
from nanovllm_server.watch import route_plugins
from nanovllm_server.watch.plugin import ROUTE
from nanovllm_server.watch.route_plugins import RoutePlugins
from nanovllm_server.watch.routes import RouteContext, RoutePlugin
from nanovllm_server.watch.settings import RouteChoice
from nanovllm_server.watch.testing import RouteConformance, call, demo_engine


class TestRouteKind(KindConformance):
    @pytest.fixture
    def kind(self) -> KindUnderTest:
        return kind_under_test(ROUTE, "nanovllm_server.watch.plugin")


class Named(RoutePlugin):
    """Answers /NAME, and writes its name into the header `trail` of every answer."""

    path = ""

    def routes(self) -> Sequence[BaseRoute]:
        async def answer(request: Request) -> Response:
            return PlainTextResponse(self.context.model_name)

        return [Route(self.path, answer)]

    def wrap(self, app: Any) -> Any:
        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            async def marked(message: Any) -> None:
                if message["type"] == "http.response.start":
                    trail = (b"trail", self.path.encode())
                    message = {**message, "headers": [*message["headers"], trail]}
                await send(message)

            await app(scope, receive, marked)

        return wrapped

    async def close(self) -> None:
        closed.append(self.path)
        if self.path == "/fails":
            raise LookupError(self.path)


closed: list[str] = []


class First(Named):
    path = "/first"


class Fails(Named):
    path = "/fails"


class Health(Named):
    path = "/health"


class Completions(Named):
    path = "/v1/completions"


MADE: dict[str, type[Named]] = {
    "first": First,
    "fails": Fails,
    "health": Health,
    "completions": Completions,
}


class Manager:
    """Stands in for the installed plugins."""

    def __init__(self, disable: Sequence[str] = ()) -> None:
        pass

    def resolve(self, kind: str, name: str, options: Any, path: str) -> ResolvedPlugin:
        return ResolvedPlugin(
            kind=kind, name=name, distribution="some-routes", version="1", impl=name
        )

    def make(self, resolved: ResolvedPlugin, context: RouteContext) -> Named:
        return MADE[resolved.name](NoOptions(), context)


@pytest.fixture
def some_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    closed.clear()
    monkeypatch.setattr(route_plugins, "get_plugin_manager", Manager)


def plugins(*names: str) -> RoutePlugins:
    context = RouteContext(engine=demo_engine, model_name="demo")
    return RoutePlugins([RouteChoice(name=name) for name in names], context)


@pytest.mark.usefixtures("some_routes")
def test_the_first_plugins_middleware_is_outermost_and_all_are_closed() -> None:
    """Also where closing one fails; the routes are those of all plugins."""
    made = plugins("first", "fails")
    router = Router()
    made.add_routes(router)
    app = made.wrap(router)

    async def run() -> None:
        answer = await call(app, "/fails")
        assert answer.body == b"demo"
        trail = [value for name, value in answer.messages[0]["headers"] if name == b"trail"]
        assert trail == [b"/fails", b"/first"]
        with pytest.raises(LookupError):
            await made.close()

    asyncio.run(run())
    assert sorted(closed) == ["/fails", "/first"]


@pytest.mark.usefixtures("some_routes")
def test_a_plugin_that_fails_to_close_leaves_no_engine_open(llm: AsyncLLM) -> None:
    """The engine that took the place of another is the server's to close."""
    watch = make_app(llm, ServerSettings(routes=(RouteChoice(name="fails"),))).state.watch
    other = SimpleNamespace(close=lambda: closed.append("engine"))

    async def run() -> None:
        async with watch.lifespan(None):
            watch._replace(other)

    with pytest.raises(LookupError):
        asyncio.run(run())
    assert closed == ["/fails", "engine"]


@pytest.mark.usefixtures("some_routes")
def test_a_plugins_route_has_one_path(llm: AsyncLLM) -> None:
    """With a slash at its end it is the server's 404, not a redirect to a host of the caller's."""
    app = make_app(llm, ServerSettings(routes=(RouteChoice(name="first"),)))
    http = TestClient(app, follow_redirects=False)
    assert http.get("/first").text == "demo"
    answer = http.get("/first/")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.usefixtures("some_routes")
@pytest.mark.parametrize("name", ["health", "completions"])
def test_a_path_of_the_server_is_refused(llm: AsyncLLM, name: str) -> None:
    """At start, with the plugin and the path: of two routes of one path only one is reached."""
    settings = ServerSettings(routes=(RouteChoice(name=name),))
    with pytest.raises(
        ConfigError, match=rf"{name} \(some-routes\) adds the path '{MADE[name].path}'.*server"
    ):
        make_app(llm, settings)


def test_a_plugin_that_is_not_installed_is_named(llm: AsyncLLM) -> None:
    with pytest.raises(PluginNotFoundError, match="no route 'nobody' is installed"):
        make_app(llm, parse_settings({"routes": ["nobody"]}))


@pytest.mark.parametrize("wrong", [[{"nam": "admin"}], [{"name": ""}], "admin", [7]])
def test_choices_that_say_nothing_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"serve\.routes"):
        parse_settings({"routes": wrong})


# ------------------------------------------------------------------------------ the suite


class Swallows(RoutePlugin):
    """Middleware that joins the parts of a stream."""

    def wrap(self, app: Any) -> Any:
        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            parts: list[bytes] = []

            async def joined(message: Any) -> None:
                if message["type"] == "http.response.start":
                    await send(message)
                    return
                parts.append(message["body"])
                if not message.get("more_body"):
                    await send({"type": "http.response.body", "body": b"".join(parts)})

            await app(scope, receive, joined)

        return wrapped


class Raises(RoutePlugin):
    """A route that fails."""

    def routes(self) -> Sequence[BaseRoute]:
        async def answer(request: Request) -> Response:
            raise LookupError

        return [Route("/raises", answer)]


@pytest.mark.parametrize("path", ["/version", "/live", "/v1/models", "/", "/openapi.json"])
def test_every_path_of_the_server_is_one_that_the_suite_knows(path: str) -> None:
    """A plugin that passes it lets the server start."""
    with pytest.raises(AssertionError, match=path):
        check_paths(path)


def test_paths_that_the_server_does_not_have_are_free() -> None:
    """Such as those of OpenAI's that a plugin may add."""
    check_paths("/v1/embeddings")
    check_paths("/healthy")


def check_paths(path: str) -> None:
    """What the suite says of a plugin with a route there."""
    made = type("Made", (Named,), {"path": path})
    own = made(NoOptions(), RouteContext(engine=demo_engine, model_name="demo"))
    RouteConformance().test_its_paths_are_none_of_the_servers(own)


@pytest.mark.parametrize(
    ("impl", "check", "error"),
    [
        (Swallows, "test_what_it_does_not_serve_passes_unchanged", AssertionError),
        (Raises, "test_every_route_answers_any_method", LookupError),
        (Health, "test_its_paths_are_none_of_the_servers", AssertionError),
    ],
)
def test_the_suite_catches(impl: type[RoutePlugin], check: str, error: type[Exception]) -> None:
    """A stream that is held back, a route that raises, a path of the server."""
    made = impl(NoOptions(), RouteContext(engine=demo_engine, model_name="demo"))
    with pytest.raises(error):
        getattr(RouteConformance(), check)(made)
