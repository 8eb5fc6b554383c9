"""`nanovllm serve`: start an engine and serve it until a signal comes."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import partial
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm_core.cli import engine_options as options
from nanovllm_server.settings import ServerSettings, parse_settings

if TYPE_CHECKING:
    import uvicorn

    from nanovllm_core import AsyncLLM
    from nanovllm_server.watch.watch import Watch

DEFAULT_MODEL = "demo"
DEFAULT_ENGINE_CLIENT = "processes" if hasattr(os, "waitid") else "thread"
"""macOS can watch the processes of engines from Python 3.13 on."""


def serve(
    model: options.Model = None,
    config: options.ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A name of the model for clients (repeatable).")
    ] = None,
    allow_anonymous: Annotated[
        bool | None,
        typer.Option("--allow-anonymous", help="Listen beyond this machine without API keys."),
    ] = None,
    engine_client: Annotated[
        str | None,
        typer.Option(
            help="Where the engine runs: processes (its own) or thread (one of the server's).",
            show_default=DEFAULT_ENGINE_CLIENT,
        ),
    ] = None,
    attention: options.Attention = None,
    scheduler: options.Scheduler = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
) -> None:
    """Serve a model to OpenAI's clients; the embedded model, if no other is named.

    The section `serve:` of the configuration holds every setting of the server; a flag wins.
    """
    loaded = options.loaded_config(
        model, config, attention, scheduler, device, dtype, settings,
        defaults={"model": DEFAULT_MODEL, "engine_client": DEFAULT_ENGINE_CLIENT},
        engine_client=engine_client,
    )  # fmt: skip
    flags = {
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "allow_anonymous": allow_anonymous,
    }
    server_settings = parse_settings(loaded.sections.get("serve"), flags)

    from nanovllm_core import AsyncLLM
    from nanovllm_server.guard.drain import sigterm_as_exit
    from nanovllm_server.guard.hosts import check_address, check_exposure
    from nanovllm_server.guard.keys import read_keys
    from nanovllm_server.watch.health import close_within
    from nanovllm_server.watch.watch import observed

    # Before the model is loaded.
    if server_settings.tls is not None:
        server_settings.tls.check()
    keys = read_keys(server_settings.keys, server_settings.keys_file)
    check_exposure(server_settings.host, bool(keys), server_settings.allow_anonymous)
    check_address(server_settings.host, server_settings.port)
    options.show_choices()
    Thread(target=import_app, daemon=True).start()  # beside the engine's start
    tracing = server_settings.tracing
    with sigterm_as_exit(), observed(loaded.config, tracing) as observed_config:
        llm = AsyncLLM.from_config(observed_config)
        try:
            is_well = run(llm, server_settings)
        finally:
            is_closed = close_within(llm, server_settings.health.stuck_after_s)
    if not (is_well and is_closed):
        raise typer.Exit(1)


def import_app() -> None:
    """Import what serves. An error comes again where it is used."""
    with suppress(Exception):
        import_module("nanovllm_server.app")
        import_module("uvicorn")


def run(llm: AsyncLLM, settings: ServerSettings) -> bool:
    """Serve until SIGINT or SIGTERM, and print the address when requests can come.

    False where the engine's end ended the server.
    """
    from nanovllm_server.guard.logs import configure_logging

    configure_logging(settings.log.format, settings.log.level)
    server, watch = make_watched_server(llm, settings)
    server.run()
    return watch.monitor.failure is None


def make_server(llm: AsyncLLM, settings: ServerSettings) -> uvicorn.Server:
    """uvicorn, which prints the address once it listens."""
    return make_watched_server(llm, settings)[0]


def make_watched_server(llm: AsyncLLM, settings: ServerSettings) -> tuple[uvicorn.Server, Watch]:
    """The server, which ends when its engine does and none replaces it; and what watches it."""
    import uvicorn

    from nanovllm_server.app import make_app
    from nanovllm_server.guard.assemble import guarded, uvicorn_options
    from nanovllm_server.guard.drain import DrainingServer
    from nanovllm_server.guard.keys import read_keys

    keys = read_keys(settings.keys, settings.keys_file)
    app = make_app(llm, settings)
    watch: Watch = app.state.watch
    guarded_app, drain = guarded(app, settings, keys, watch.wrap_requests)

    class Server(DrainingServer):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(f"Serving {settings_name(llm, settings)} at {address(self)}", flush=True)

    # Its warnings are about what strangers send, two lines for each such request.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = Server(
        uvicorn.Config(
            guarded_app,
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            log_config=None,
            access_log=False,
            server_header=False,
            **uvicorn_options(settings),
        ),
        drain,
    )
    watch.connect(partial(setattr, server, "should_exit", True), lambda: drain.is_draining)
    return server, watch


def settings_name(llm: AsyncLLM, settings: ServerSettings) -> str:
    return (settings.served_model_name or (llm.config.model,))[0]


def address(server: uvicorn.Server) -> str:
    """Where a started server listens, as a URL."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    scheme = "https" if server.config.is_ssl else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
