"""`nanovllm serve`: start an engine and serve it until a signal comes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm_core.cli import engine_options as options
from nanovllm_server.settings import ServerSettings, parse_settings

if TYPE_CHECKING:
    import uvicorn

    from nanovllm_core import AsyncLLM

DEFAULT_MODEL = "demo"


def serve(
    model: options.Model = None,
    config: options.ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A name of the model for clients (repeatable).")
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
        defaults={"model": DEFAULT_MODEL},
    )  # fmt: skip
    flags = {"host": host, "port": port, "served_model_name": served_model_name}
    server_settings = parse_settings(loaded.sections.get("serve"), flags)

    from nanovllm_core import AsyncLLM

    options.show_choices()
    llm = AsyncLLM.from_config(loaded.config)
    try:
        run(llm, server_settings)
    finally:
        llm.close()


def run(llm: AsyncLLM, settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM, and print the address when requests can come."""
    make_server(llm, settings).run()


def make_server(llm: AsyncLLM, settings: ServerSettings) -> uvicorn.Server:
    """uvicorn, which prints the address once it listens."""
    import uvicorn

    from nanovllm_server.app import make_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(f"Serving {settings_name(llm, settings)} at {address(self)}", flush=True)

    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return Server(
        uvicorn.Config(
            make_app(llm, settings),
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http="httptools",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
        )
    )


def settings_name(llm: AsyncLLM, settings: ServerSettings) -> str:
    return (settings.served_model_name or (llm.config.model,))[0]


def address(server: uvicorn.Server) -> str:
    """Where a started server listens, as a URL."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
