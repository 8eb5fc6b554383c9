"""The benchmark of next turns measures turns: what lies before them is cached."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch):
    """The program, with a few short turns."""
    monkeypatch.syspath_prepend(FOLDER)
    import turns

    monkeypatch.setattr(turns, "CONTEXTS", (0, 64))
    monkeypatch.setattr(turns, "TURNS", (3, 20))
    monkeypatch.setattr(turns, "RUNS", 2)
    return turns


def run(turns, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    model = str(FOLDER / "configs" / "qwen3-6x512")
    common = ["--model", model, "--device", "cpu", "--attention", "sdpa", "--longest", "64"]
    monkeypatch.setattr(sys, "argv", ["turns.py", *common, *options])
    turns.main()


def test_each_turn_behind_each_context_has_a_time(turns, monkeypatch, tmp_path: Path) -> None:
    """In the order of the tables, with the configuration that was measured."""
    out = tmp_path / "turns.json"
    run(turns, monkeypatch, "--out", str(out))
    result = json.loads(out.read_text())
    found = [(one["context"], one["turn"]) for one in result["turns"]]
    assert found == [(0, 3), (0, 20), (64, 3), (64, 20)]
    assert all(one["ms"] > 0 for one in result["turns"])
    assert "sdpa" in json.dumps(result["config"]["attention"])


def test_a_context_that_is_not_cached_is_not_measured(turns, monkeypatch) -> None:
    """Another one each time, as if the cache had lost it."""
    monkeypatch.setattr(turns, "WARM_UP", 0)
    with pytest.raises(SystemExit, match=r"64 tokens of 64 were not cached"):
        run(turns, monkeypatch)
