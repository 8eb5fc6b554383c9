"""The command `nanovllm`.

Each command lives in its own file and imports what is heavy when it runs, so `--help` is quick.
"""

from __future__ import annotations

import sys

import typer

from nanovllm_core.cli import bench, chat, config, explain, generate, plugins
from nanovllm_core.cli import eval as evaluation
from nanovllm_core.config_sources import ENV_PREFIX, load_config
from nanovllm_core.errors import NanoVLLMError, PluginFailedError
from nanovllm_core.plugin_manager import get_plugin_manager


def make_app() -> typer.Typer:
    """The command with all its parts; extensions that the environment enables add theirs."""
    app = typer.Typer(
        name="nanovllm",
        help="A small LLM inference engine whose parts are plugins.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.command()(generate.generate)
    app.command()(chat.chat)
    app.command()(explain.explain)
    app.command("eval")(evaluation.evaluate)
    app.add_typer(bench.app, name="bench")
    app.add_typer(plugins.app, name="plugins")
    app.add_typer(config.app, name="config")
    _add_extensions(app)
    return app


def _add_extensions(app: typer.Typer) -> None:
    """Let extensions add commands: those of `NANOVLLM_PLUGINS__ENABLE`, for no file is read yet."""
    # A command may need no model, so one is made up to be able to read the rest.
    chosen = load_config("none").plugins
    if chosen.enable:
        manager = get_plugin_manager(disable=chosen.disable)
        manager.enable(chosen.enable)
        try:
            manager.hook.nanovllm_cli(app=app)
        except NanoVLLMError:
            raise
        except Exception as error:
            raise PluginFailedError(
                f"nanovllm_cli of one of the extensions {', '.join(chosen.enable)} failed: "
                f"{type(error).__name__}: {error}; take it out of {ENV_PREFIX}PLUGINS__ENABLE"
            ) from error


def main() -> None:
    """Run the command; an error of ours is one message and exit status 1, not a traceback."""
    try:
        make_app()()
    except NanoVLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
