"""One process that serves: uvicorn around the application and its guards."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from nanovllm_core.errors import ConfigError
from nanovllm_server.settings import ServerSettings

if TYPE_CHECKING:
    import uvicorn

    from nanovllm_core import AsyncLLM
    from nanovllm_server.fronts.facts import FrontFacts
    from nanovllm_server.guard.drain import DrainingServer
    from nanovllm_server.watch.watch import Watch


@contextmanager
def held_address(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets for a server that is to listen after its model is loaded, at the address of no other.

    Raises ConfigError where an address cannot be had, or another server of this user holds it.
    """
    from nanovllm_server.guard.hosts import bound_sockets, claimed

    with ExitStack() as held:
        sockets = [held.enter_context(one) for one in bound_sockets(host, port)]
        if sys.platform == "linux":  # where two may be bound while neither listens
            for claim in claimed(sockets):
                held.enter_context(claim)
        yield sockets


def listen(sockets: Sequence[socket.socket]) -> None:
    """Let connections come. Raises ConfigError where another program does so at the address."""
    for one in sockets:
        host, port = one.getsockname()[:2]
        try:
            one.listen()
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen on {host!r}, port {port}: {error.strerror}; choose "
                "others with --host and --port (0 takes a free one)"
            ) from None


def run(llm: AsyncLLM, settings: ServerSettings, sockets: list[socket.socket]) -> bool:
    """Serve until SIGINT or SIGTERM, and print the address when requests can come.

    `sockets` are those of `held_address`. False where the engine's end ended the server.
    """
    from nanovllm_server.guard.files import within_file_limit
    from nanovllm_server.guard.logs import configure_logging

    configure_logging(settings.log.format, settings.log.level)
    settings = within_file_limit(settings)
    server, watch = make_watched_server(llm, settings)
    server.announce = lambda: announce(settings_name(settings, llm.config.model), address(server))
    listen(sockets)
    server.run(sockets)
    return watch.monitor.failure is None


def make_server(llm: AsyncLLM, settings: ServerSettings) -> DrainingServer:
    """uvicorn with the application, which serves this engine."""
    return make_watched_server(llm, settings)[0]


def make_watched_server(
    llm: AsyncLLM,
    settings: ServerSettings,
    front: FrontFacts | None = None,
    server_class: type[DrainingServer] | None = None,
) -> tuple[DrainingServer, Watch]:
    """The server, which ends when its engine does and none replaces it; and what watches it.

    `front` is what it has in common with other processes, if it is one of several.
    """
    import uvicorn

    from nanovllm_server.app import make_app
    from nanovllm_server.fronts.facts import FrontFacts
    from nanovllm_server.guard.assemble import guarded, make_ledger, uvicorn_options
    from nanovllm_server.guard.drain import DrainingServer
    from nanovllm_server.guard.keys import read_keys

    front = front or FrontFacts(make_ledger(settings))
    keys = read_keys(settings.keys, settings.keys_file)
    app = make_app(llm, settings, front)
    watch: Watch = app.state.watch
    guarded_app, drain = guarded(app, settings, keys, watch.wrap_requests, front.ledger)
    # Its warnings are about what strangers send, two lines for each such request.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        guarded_app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        log_config=None,
        access_log=False,
        server_header=False,
        **uvicorn_options(settings, front.ledger, watch.count_refusal),
    )
    server = (server_class or DrainingServer)(config, drain)
    watch.connect(partial(setattr, server, "should_exit", True), lambda: drain.is_draining)
    return server, watch


def settings_name(settings: ServerSettings, model: str) -> str:
    """The first name, which an answer carries if its request has none."""
    return (settings.served_model_name or (model,))[0]


def announce(name: str, url: str) -> None:
    """Tell whoever started the server that requests can come."""
    print(f"Serving {name} at {url}", flush=True)


def address(server: uvicorn.Server) -> str:
    """Where a started server listens, as a URL."""
    return url_of(server.servers[0].sockets[0].getsockname(), server.config.is_ssl)


def url_of(name: tuple[str, int], is_ssl: bool) -> str:
    """The name of a socket as a URL."""
    host, port = name[:2]
    scheme = "https" if is_ssl else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
