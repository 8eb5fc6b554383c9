"""Commands of extensions: of those that the environment enables, for no file is read yet."""

from __future__ import annotations

import typer

from nanovllm_core.config.sources import ENV_PREFIX, load_config
from nanovllm_core.errors import NanoVLLMError, PluginFailedError
from nanovllm_core.registry.manager import get_plugin_manager

VARIABLE = f"{ENV_PREFIX}PLUGINS__ENABLE"


def add_extensions(app: typer.Typer) -> None:
    """Let each extension that `VARIABLE` names add its commands to `app`.

    Raises what the plugin manager raises, and PluginFailedError where adding them fails.
    """
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
                f"{type(error).__name__}: {error}; take it out of {VARIABLE}"
            ) from error
