"""The examples run, on the embedded model and a CPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
        pytest.importorskip(f"nanovllm_{name}", reason=f"needs the plugin {name}")
    monkeypatch.setenv("NANOVLLM_DEVICE", "cpu")
    # `auto` would take Triton's interpreter, which these tests switch on and which is slow.
    monkeypatch.setenv("NANOVLLM_ATTENTION__BACKEND", "sdpa")
    monkeypatch.setenv("NANOVLLM_CACHE__NUM_BLOCKS", "256")  # not gigabytes of zeros


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_quickstart_answers_rightly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("quickstart.py", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "Attention runs on: " in printed
    assert "Sort: tree apple moon cat\napple cat moon tree\n" in printed
    assert printed.endswith("Reverse: 7 42 19 3\n3 19 42 7\n")


@pytest.mark.parametrize("arguments", [(), ("demo",)])
def test_a_script_for_nano_vllm_runs(
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("nano_vllm_script.py", *arguments, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("Prompt: ") == printed.count("Completion: '") == 2


NANO_VLLM_CALLS = """\
    llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)
    sampling_params = SamplingParams(temperature=0.6, max_tokens=64)
    outputs = llm.generate(prompts, sampling_params)
"""


def test_the_script_for_nano_vllm_makes_the_calls_of_its_readme() -> None:
    """What it shows is the other project's interface, not ours."""
    script = (EXAMPLES / "nano_vllm_script.py").read_text(encoding="utf-8").splitlines()
    assert [line for line in NANO_VLLM_CALLS.splitlines() if line not in script] == []
