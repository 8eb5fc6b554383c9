"""The plugins that a suite may use beside the one under test."""

from __future__ import annotations

from nanovllm_core.config import load_config
from nanovllm_core.registry import PluginManager, get_plugin_manager


def enabled_plugins() -> PluginManager:
    """The installed plugins, without those that the environment's `plugins.disable` names."""
    # A suite needs no model here, so one is made up to be able to read the rest.
    return get_plugin_manager(disable=load_config("none").plugins.disable)
