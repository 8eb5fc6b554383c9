"""The benchmark of bursts times what it is asked for, and every prompt anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nanovllm_core import LLM

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bursts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    import bursts

    monkeypatch.setattr(bursts, "WARM_UP", 1)
    return bursts


def test_each_burst_has_a_time_and_no_prompt_comes_twice(
    bursts, monkeypatch, tmp_path: Path
) -> None:
    """In the order that was asked for, with the configuration that was measured."""
    seen: list[tuple[int, ...]] = []
    generate = LLM.generate

    def watch(llm: LLM, prompts, *others, **named):
        seen.extend(tuple(prompt) for prompt in prompts)
        return generate(llm, prompts, *others, **named)

    monkeypatch.setattr(LLM, "generate", watch)
    out, model = tmp_path / "bursts.json", str(FOLDER / "configs" / "qwen3-6x512")
    asked = ["--model", model, "--device", "cpu", "--attention", "sdpa", "--runs", "2"]
    asked += ["--bursts", "2x5", "1x40", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bursts.py", *asked])
    bursts.main()
    result = json.loads(out.read_text())
    assert [(one["prompts"], one["length"]) for one in result["bursts"]] == [(2, 5), (1, 40)]
    assert all(one["ms"] > 0 for one in result["bursts"])
    assert result["runs"] == 2
    assert "sdpa" in json.dumps(result["config"]["attention"])
    assert [len(prompt) for prompt in seen] == [5] * 6 + [40] * 3
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("text", ["8", "8x", "0x5", "5x0", "a x b"])
def test_a_burst_that_is_none_is_refused(bursts, text: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|literal|0"):
        bursts.parse_burst(text)
