"""The access that a plugin has to the plugins of its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from nanovllm_core.interfaces.specs import PluginSpec, ResolvedPlugin


class Plugins(Protocol):
    """The installed plugins, less those that the configuration disables.

    Works alike for the core's kinds and for those that plugins declare. Given to
    `nanovllm_configure` and to observers; for start-up, never for a step.
    """

    def names(self, kind: str) -> list[str]:
        """The names of one kind that may be selected, from metadata alone."""

    def spec(self, kind: str, name: str) -> PluginSpec:
        """Import one plugin's light module and return its spec, of the kind's type.

        Raises PluginNotFoundError, PluginConflictError or PluginLoadError.
        """

    def resolve(
        self, kind: str, name: str, options: Mapping[str, Any] | None = None, path: str = ""
    ) -> ResolvedPlugin:
        """Check the options of a plugin; `path` is where they stand, for ConfigError to name."""

    def load(self, resolved: ResolvedPlugin) -> Any:
        """Import what a resolved plugin's `impl` names."""

    def make(self, resolved: ResolvedPlugin, *arguments: object) -> Any:
        """Call a resolved plugin's `impl` with its options, then `arguments`.

        Raises PluginLoadError, with the distribution, where that fails, or what it makes is not of
        the interface of its kind.
        """
