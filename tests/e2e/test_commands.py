"""`nanovllm eval` and `generate` on the embedded model: right with sdpa and with triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanovllm_core.cli.main import make_app

demo = pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")

SMALL = ("--set", "limits.max_model_len=192", "--set", "limits.max_num_seqs=8")


def test_eval_with_sdpa_on_ten_questions_of_each_task(tmp_path: Path) -> None:
    """Thresholds met, exit status 0, and a result file that names what ran."""
    out = tmp_path / "eval.json"
    result = CliRunner().invoke(
        make_app(),
        [
            *("eval", "--model", "demo", "--device", "cpu", "--attention", "sdpa"),
            *("--limit", "10", "--set", "limits.max_model_len=256", "--out", str(out)),
        ],
    )
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert record["passed"] is True
    assert record["overall"]["total"] == 60
    assert "sdpa" in record["attention"]


COMMAND = """
from nanovllm_kit.interpreter import quicken_interpreter
quicken_interpreter()
from nanovllm_core.__main__ import main
main()
"""


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, whose Triton interprets its kernels."""
    pytest.importorskip("nanovllm_attention_triton", reason="needs the plugin attention_triton")
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments, "--attention", "triton"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_triton_answers_a_question_through_the_interpreter() -> None:
    """Prefill and decode kernels in the engine, from a command to the text."""
    done = interpreted(
        *("generate", "Add 15 and 2.", "--chat", "--max-tokens", "8"),
        *("--model", "demo", "--device", "cpu", *SMALL),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "17"


@pytest.mark.slow
def test_eval_with_triton_through_the_interpreter(tmp_path: Path) -> None:
    """One question of each task but the stories, which take a minute; all of them right."""
    questions = Path(demo.__file__).with_name("checkpoint") / "eval.jsonl"
    data, out = tmp_path / "short.jsonl", tmp_path / "eval.json"
    with questions.open() as lines:
        data.write_text("".join(line for line in lines if '"task": "story"' not in line))
    done = interpreted(
        *("eval", "--model", "demo", "--device", "cpu", "--data", str(data), "--limit", "1"),
        *("--out", str(out), *SMALL),
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["overall"] == {"correct": 5, "total": 5, "accuracy": 1.0}
    assert record["attention"].startswith("triton")
