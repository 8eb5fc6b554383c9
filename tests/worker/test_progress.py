"""Progress is shown to somebody who watches, and to nobody else."""

from __future__ import annotations

import io
import sys

import pytest

from nanovllm_core.worker.progress import counting


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_drawn_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and pipes stay clean."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with counting("Loading") as progress:
        progress(1, 2)
    assert sys.stderr.getvalue() == ""


def test_a_terminal_sees_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The description, and how far it has come."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with counting("Loading") as progress:
        before = sys.stderr.getvalue()
        progress(1, 2)
    drawn = sys.stderr.getvalue()
    assert "Loading" in drawn
    assert "%" not in before.partition("Loading")[2]  # it is not known yet of how many
    assert "50%" in drawn
