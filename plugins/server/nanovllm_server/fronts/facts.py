"""What a front process has in common with the others of its server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nanovllm_server.guard.ledger import Ledger
from nanovllm_server.watch.used_plugins import UsedPlugin


@dataclass(frozen=True)
class FrontFacts:
    """The defaults are those of a server that is one process."""

    ledger: Ledger
    """Of what all have under way."""
    http_folder: Path | None = None
    """Of the files with the metrics of HTTP of each process; None where there is only one."""
    process_ids: Callable[[], Iterable[int]] = lambda: (os.getpid(),)
    """Of the server's processes now, without the engine's."""
    clients: tuple[UsedPlugin, ...] = ()
    """The engine clients of the process that has the engine, where that is another one."""
