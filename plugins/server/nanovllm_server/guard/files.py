"""The process's limit of open files, and how many connections fit beneath it."""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm_server.settings import ServerSettings

log = logging.getLogger("nanovllm_server")

RESERVE = 256
"""Files that are kept for all but connections: the engine's, the page's, metrics, sockets."""


def raise_file_limit() -> None:
    """Set the soft limit of open files to the hard one. Processes started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS refuses a limit above its own.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def within_file_limit(settings: ServerSettings) -> ServerSettings:
    """The settings with as many connections as files allow; a warning where those are fewer.

    The limit is each process's, and one front may get the connections of all.
    """
    files, asked = resource.getrlimit(resource.RLIMIT_NOFILE)[0], settings.limits.max_connections
    room = max(1, files - min(RESERVE, files // 2))
    if files == resource.RLIM_INFINITY or asked <= room:
        return settings
    log.warning(
        "serve.limits.max_connections is %d, and this process may open %d files: connections are "
        "limited to %d; raise the limit of open files (ulimit -Hn, LimitNOFILE of systemd) to %d, "
        "or lower max_connections",
        *(asked, files, room, asked + RESERVE),
    )
    limits = settings.limits.model_copy(update={"max_connections": room})
    return settings.model_copy(update={"limits": limits})
