"""The text commands on the real engine and the embedded model."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from nanovllm_core.cli import main as cli

for plugin in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

ENGINE = ("--model", "demo", "--device", "cpu", "--attention", "sdpa")


def test_generate_streams_a_right_answer():
    result = CliRunner().invoke(
        cli.make_app(), ["generate", "What is 12 + 30?", "--chat", "--stream", *ENGINE]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "What is 12 + 30?\n42\n"
    assert "tokens/s" in result.stderr


def test_eval_passes_on_a_few_questions_of_each_task():
    result = CliRunner().invoke(cli.make_app(), ["eval", "--limit", "3", *ENGINE])
    assert result.exit_code == 0, result.output
    assert "sdpa" in result.stdout


def test_an_error_of_ours_is_one_line_and_exit_status_1(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nanovllm", "generate", "hi", "--model", "no-such-model"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    message = str(caught.value.code)
    assert message.startswith("error: model: 'no-such-model' is no folder")
    assert "\n" not in message
