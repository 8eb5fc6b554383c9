"""`nanovllm serve`: start an engine and serve it until a signal comes."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm_core.cli import engine_options as options
from nanovllm_server.server import held_address, run
from nanovllm_server.settings import ServerSettings, parse_settings

if TYPE_CHECKING:
    from nanovllm_core import EngineConfig

DEFAULT_MODEL = "demo"
DEFAULT_ENGINE_CLIENT = "processes" if hasattr(os, "waitid") else "thread"
"""macOS can watch the processes of engines from Python 3.13 on."""


def serve(
    ctx: typer.Context,
    model: options.Model = None,
    config: options.ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A name of the model for clients (repeatable).")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes for HTTP, tokenising and text.", show_default="1")
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
        ctx, defaults={"model": DEFAULT_MODEL, "engine_client": DEFAULT_ENGINE_CLIENT}
    )
    flags = {
        "host": host,
        "port": port,
        "processes": processes,
        "served_model_name": served_model_name,
        "allow_anonymous": allow_anonymous,
    }
    server_settings = parse_settings(loaded.sections.get("serve"), flags)

    from nanovllm_server.fronts.fronts import check_processes
    from nanovllm_server.guard.drain import signals_as_exit
    from nanovllm_server.guard.files import raise_file_limit
    from nanovllm_server.guard.hosts import check_address, check_exposure
    from nanovllm_server.guard.keys import read_keys
    from nanovllm_server.watch.watch import observed

    # Before the model is loaded.
    check_processes(server_settings.processes)
    if server_settings.tls is not None:
        server_settings.tls.check()
    keys = read_keys(server_settings.keys, server_settings.keys_file)
    check_exposure(server_settings.host, bool(keys), server_settings.allow_anonymous)
    check_address(server_settings.host, server_settings.port)
    options.show_choices()
    raise_file_limit()
    tracing = server_settings.tracing
    with signals_as_exit(), observed(loaded.config, tracing) as observed_config:
        serve_it = serve_in_process if server_settings.processes == 1 else serve_by_fronts
        is_well = serve_it(observed_config, server_settings)
    if not is_well:
        raise typer.Exit(1)


def serve_in_process(config: EngineConfig, settings: ServerSettings) -> bool:
    """Start the engine, and serve it in this process; False where something ended the server.

    The address is held from now on, so that of two servers one ends before it has loaded a model.
    """
    from nanovllm_core import AsyncLLM
    from nanovllm_server.watch.health import close_within

    with held_address(settings.host, settings.port) as sockets:
        Thread(target=import_app, daemon=True).start()  # beside the engine's start
        llm = AsyncLLM.from_config(config)
        try:
            is_well = run(llm, settings, sockets)
        finally:
            is_closed = close_within(llm, settings.health.stuck_after_s)
    return is_well and is_closed


def serve_by_fronts(config: EngineConfig, settings: ServerSettings) -> bool:
    """The same, where several processes serve the engine."""
    from nanovllm_server.fronts.fronts import Fronts

    return Fronts(config, settings).run()


def import_app() -> None:
    """Import what serves. An error comes again where it is used."""
    with suppress(Exception):
        import_module("nanovllm_server.app")
        import_module("uvicorn")
