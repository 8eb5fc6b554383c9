"""The standard streams: neither text that they cannot hold nor a closed one gives a traceback."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO, cast


def prepare_streams() -> None:
    """Replace what cannot be read or written as text by a mark; a closed stream is an empty one."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nothing("r" if name == "stdin" else "w"))
        elif isinstance(stream, io.TextIOWrapper) and name != "stderr":  # which escapes already
            stream.reconfigure(errors="replace")


def give_up_stdout() -> None:
    """Drop what could not be written: Python would try again at exit, and complain."""
    sys.stdout = _nothing("w")


def _nothing(mode: str) -> TextIO:
    return cast(TextIO, open(os.devnull, mode, encoding="utf-8"))
