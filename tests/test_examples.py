"""The examples run, on the embedded model and a CPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("tile", [1, 7, 64])
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 77), (77, 77), (30, 100)])
def test_flash_attention_equals_naive_attention(
    queries: int, keys: int, block_size: int, tile: int
) -> None:
    """For every length, block and tile; blocks it does not own and unused tails are NaN."""
    example = runpy.run_path(str(EXAMPLES / "flash_attention.py"))
    torch.manual_seed(keys)
    q_TD = torch.randn(queries, 32, dtype=torch.float64) * 5  # peaked weights: order matters
    k_LD, v_LD = torch.randn(2, keys, 32, dtype=torch.float64).unbind()
    num_blocks = -(-keys // block_size)
    block_table = torch.randperm(num_blocks + 3)[:num_blocks]
    k_NPD, v_NPD = torch.full((2, num_blocks + 3, block_size, 32), torch.nan).double().unbind()
    for position in range(keys):
        block, offset = block_table[position // block_size], position % block_size
        k_NPD[block, offset], v_NPD[block, offset] = k_LD[position], v_LD[position]
    out_TD = example["flash_attention"](q_TD, k_NPD, v_NPD, block_table, keys, tile)
    torch.testing.assert_close(out_TD, example["naive_attention"](q_TD, k_LD, v_LD))


def test_flash_attention_says_how_close_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("flash_attention.py", monkeypatch=monkeypatch)
    difference, scores = capsys.readouterr().out.splitlines()
    assert float(difference.rsplit(maxsplit=1)[1]) < 1e-6
    assert scores == "scores at once: 300,000 naive, 1,024 here"
