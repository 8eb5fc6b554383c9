"""The standard streams: neither text that they cannot hold nor a closed one gives a traceback."""

from __future__ import annotations

import io
import os
import sys


def prepare_streams() -> None:
    """Replace what cannot be read or written as text by a mark; a closed stream is an empty one."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper) and name != "stderr":  # which escapes already
            stream.reconfigure(errors="replace")


def give_up_stdout() -> None:
    """Drop what could not be written: Python would try again at exit, and complain."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it lives until exit
