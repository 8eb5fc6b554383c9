"""The plugins of an engine, which its observer notes in the folder of its counts.

The server reads them there. To choose them again in its own process would import torch, could
open the GPU, and could find other devices than the engine's process did.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from nanovllm_core import EngineConfig
from nanovllm_core.api import ResolvedPlugin
from nanovllm_core.registry import KINDS
from nanovllm_core.selection import Decisions

FILE = "plugins.json"
CLIENT = "engine_client"
"""The kind that the server's process chooses; an engine's own process has one of its own."""

UsedPlugin = dict[str, str]
"""`kind`, `name`, `distribution`, `version`."""


def describe(kind: str, plugins: Iterable[ResolvedPlugin]) -> list[UsedPlugin]:
    """The plugins of a kind as /plugins shows them."""
    return [
        {
            "kind": kind,
            "name": one.name,
            "distribution": one.distribution,
            "version": one.version,
        }
        for one in plugins
    ]


def engine_plugins(config: EngineConfig) -> list[UsedPlugin]:
    """What serves in an engine of this configuration; imports torch, as the engine did."""
    decisions = Decisions(config)
    attention = decisions.attention
    used = describe("model", [decisions.model])
    used += describe("attention prefill", [attention.prefill.resolved])
    used += describe("attention decode", [attention.decode.resolved])
    for kind in KINDS.values():
        if kind.choice and kind.name not in ("attention", CLIENT):
            used += describe(kind.name, decisions.named(kind.name))
    return used


def note_plugins(folder: Path, config: EngineConfig) -> None:
    """Write them for the server. Engines of one server have the same, and write at one time."""
    handle, name = tempfile.mkstemp(".part", dir=folder)
    with os.fdopen(handle, "w") as file:
        json.dump(engine_plugins(config), file)
    os.replace(name, folder / FILE)


def read_plugins(folder: Path) -> list[UsedPlugin]:
    """What `note_plugins` wrote."""
    found: list[UsedPlugin] = json.loads((folder / FILE).read_text())
    return found
