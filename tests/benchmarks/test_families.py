"""The benchmark of other families times steps of each number of rows, and shares of their floor."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, with one small model and short answers."""
    monkeypatch.syspath_prepend(FOLDER)
    import families

    small = json.loads((FOLDER / "configs" / "qwen3-6x512" / "config.json").read_text())
    monkeypatch.setattr(families, "MODELS", {"small": {**small, "num_hidden_layers": 1}})
    sizes = {"PROMPT": 8, "SHORT": 2, "LONG": 6, "LONG_PROMPT": 40, "ROWS": (1, 3)}
    for name, value in sizes.items():
        monkeypatch.setattr(families, name, value)
    return families


def test_each_number_of_rows_has_a_step_and_its_share(families: ModuleType) -> None:
    """And the prompt too, of the same engine, whose backends are named."""
    found = families.measure("small")
    assert list(found["step_ms"]) == list(found["step_share"]) == [1, 3]
    assert found["prompt_ms"] > 0
    assert 0 < found["prompt_share"] < 1
    assert found["attention"]


def test_a_step_is_the_difference_of_the_quickest_runs(families: ModuleType, monkeypatch) -> None:
    """One slow run of short answers makes no step too short."""
    seconds = iter([1.9, 1.4, 1.5, 1.0, 7.0, 1.1])
    monkeypatch.setattr(families, "timed_generate", lambda *_: next(seconds))
    llm = SimpleNamespace(info=SimpleNamespace(vocab_size=8192))
    assert families.step_seconds(llm, 3) == pytest.approx((1.4 - 1.0) / 4)


def test_a_model_that_is_not_there_is_refused(families: ModuleType, monkeypatch, capsys) -> None:
    """By name, with those that are."""
    monkeypatch.setattr("sys.argv", ["families.py", "gpt-2"])
    with pytest.raises(SystemExit):
        families.main()
    assert "no model gpt-2; there are small" in capsys.readouterr().err
