"""`open_engine`: a started engine, on a thread of this process or where a plugin runs it."""

from __future__ import annotations

from typing import cast

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import ConfigError, PluginNotFoundError, shown
from nanovllm_core.frontend.client import EngineClient
from nanovllm_core.frontend.thread import ThreadClient
from nanovllm_core.interfaces.specs import EngineClientSpec, ResolvedPlugin
from nanovllm_core.registry.discovery import extra_command
from nanovllm_core.registry.manager import PluginManager, get_plugin_manager

THREAD, PROCESSES = "thread", "processes"
KIND = "engine_client"


def open_engine(config: EngineConfig, name: str = "engine") -> EngineClient:
    """Start what serves a door; returns when it can take requests.

    Raises the error of the start. Ctrl-C ends the start. `name` is how errors call the engine.
    """
    chosen = client_name(config)
    if chosen == THREAD:
        return ThreadClient(config, name)
    plugins = get_plugin_manager(disable=config.plugins.disable)
    resolved = select_client(plugins, config, chosen)
    return cast(EngineClient, plugins.make(resolved, config, name, plugins))


def client_name(config: EngineConfig) -> str:
    """The engine client; ConfigError for options or a size that a thread does not have."""
    choice, size = config.engine_client, config.data_parallel_size
    if choice.is_auto:
        return THREAD if size == 1 else PROCESSES
    if choice.name == THREAD and choice.options:
        raise ConfigError(
            f"engine_client.options: {shown(choice.options)}, but `thread` has none; leave them "
            f"out, or name another client, such as `{PROCESSES}`"
        )
    if choice.name == THREAD and size > 1:
        raise ConfigError(
            f"data_parallel_size: {size}, but the engine client `thread` runs 1 engine; set it to "
            "1, or engine_client: auto"
        )
    return choice.name


def select_client(plugins: PluginManager, config: EngineConfig, name: str) -> ResolvedPlugin:
    """The plugin of that name; ConfigError where it does not run that many engines."""
    options, size = config.engine_client.options, config.data_parallel_size
    if name == PROCESSES and name not in plugins.names(KIND):
        raise PluginNotFoundError(
            f"no engine_client '{name}' is installed, and data_parallel_size is {size}; "
            + extra_command("data-parallel")
        )
    resolved = plugins.resolve(KIND, name, options, path="engine_client.options")
    most = cast(EngineClientSpec, plugins.spec(KIND, name)).max_data_parallel_size
    if size > most:
        raise ConfigError(
            f"data_parallel_size: {size}, but the engine client {shown(name)} runs at most {most} "
            "engines; set it to that, or engine_client: auto"
        )
    return resolved
