"""Progress is shown to somebody who watches, and to nobody else."""

from __future__ import annotations

import io
import sys

import pytest

from nanovllm_core.worker.progress import counting, track


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_drawn_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and pipes stay clean; the items come all the same."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert list(track([1, 2], "Capturing")) == [1, 2]
    with counting("Loading") as progress:
        assert progress is None
    assert sys.stderr.getvalue() == ""


def test_a_terminal_sees_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The description of both kinds of bar appears."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(track([1, 2], "Capturing")) == [1, 2]
    with counting("Loading") as progress:
        assert progress is not None
        before = sys.stderr.getvalue()
        progress(1, 2)
    drawn = sys.stderr.getvalue()
    assert "Capturing" in drawn
    assert "Loading" in drawn
    assert "%" not in before.partition("Loading")[2]  # it is not known yet of how many
    assert "50%" in drawn
