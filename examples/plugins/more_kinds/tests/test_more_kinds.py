"""What the four do beyond their contracts, in an engine and alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import ConfigError
from nanovllm_example_more_kinds.command import read_steps
from nanovllm_example_more_kinds.kernels import Float64Kernels
from nanovllm_example_more_kinds.plugin import nanovllm_cli
from nanovllm_example_more_kinds.sampler import WEIGHT_OF_LIKELIEST, uniform, weights

QUESTION = [{"role": "user", "content": "What is 27 + 15?"}]
STEPS = [
    {"prefill": 20, "decode": 0, "seconds": 0.010},
    {"prefill": 0, "decode": 3, "seconds": 0.001},
    {"prefill": 0, "decode": 3, "seconds": 0.003},
    {"prefill": 5, "decode": 1, "seconds": 0.004},
]


def run_steps(file: Path) -> list[list[str]]:
    """What `nanovllm steps` prints, as words of lines."""
    app = typer.Typer()
    nanovllm_cli(app)
    result = CliRunner().invoke(app, [str(file)], catch_exceptions=False)
    return [line.split() for line in result.output.splitlines()]


def test_an_engine_runs_on_all_of_them_and_its_steps_are_told(tmp_path: Path) -> None:
    """The embedded model still adds, and every token of the engine is in the file once."""
    file = tmp_path / "steps.jsonl"
    with LLM(
        "demo",
        device="cpu",
        executor={"name": "timed", "options": {"path": str(file)}},
        sampler="inverse_cdf",
        kernels="float64",
    ) as llm:
        greedy, drawn, again = (
            llm.chat([QUESTION], SamplingParams(max_tokens=8, **params), use_tqdm=False)[0]
            for params in ({"temperature": 0}, *[{"temperature": 0.3, "seed": 5}] * 2)
        )
    assert greedy.text == "42"
    assert drawn.token_ids == again.token_ids
    steps = read_steps(file)
    # The three prompts are equal; blocks that an earlier one has filled are not computed again.
    length = len(greedy.prompt_token_ids)
    assert length < sum(step.prefill for step in steps) <= 3 * length
    outputs = sum(len(output.token_ids) for output in (greedy, drawn, again))
    assert sum(step.decode for step in steps) >= outputs - 3
    assert all(step.seconds > 0 for step in steps)


def test_a_path_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    executor = {"name": "timed", "options": {"path": str(tmp_path / "none" / "steps.jsonl")}}
    with pytest.raises(ConfigError, match="cannot be opened"):
        LLM("demo", device="cpu", executor=executor)


def test_the_command_sums_up_each_sort_of_step(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(step) + "\n" for step in STEPS))
    assert run_steps(file)[1:] == [
        ["decode", "2", "6", "2.00", "3.00", "1,500"],
        ["mixed", "1", "6", "4.00", "4.00", "1,500"],
        ["prefill", "1", "20", "10.00", "10.00", "2,000"],
    ]


@pytest.mark.parametrize(
    "line", ["no json", "[1]", '{"decode": 1}', '{"prefill": 3, "decode": 0, "seconds": 0}']
)
def test_another_file_is_refused_with_the_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps(STEPS[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"line 2 of .* is no step"):
        read_steps(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_steps(tmp_path / "none")


def test_weights_are_the_softmax_in_whole_numbers() -> None:
    """And 0 for what is forbidden, NaN, or not the likeliest at temperature 0."""
    logits = torch.tensor([[1.0, 3.0, -math.inf, math.nan, 3.0]]).repeat(2, 1)
    warm, greedy = weights(logits, torch.tensor([[2.0], [0.0]]).double())
    most = WEIGHT_OF_LIKELIEST
    assert warm.tolist() == [round(most * math.exp(-1)), most, 0, 0, most]
    assert greedy.tolist() == [0, most, 0, 0, most]
    assert weights(torch.full((1, 3), -math.inf), torch.ones(1, 1)).tolist() == [[0, 0, 0]]


def test_random_numbers_fill_the_unit_interval() -> None:
    """Over 2^16 seeds, then over as many indices of one seed: mean, spread and no repetition."""
    many = torch.arange(2**16)
    for seed, index in ((many, torch.zeros_like(many)), (torch.full_like(many, 7), many)):
        drawn = uniform(seed, index.int())
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert drawn.mean().item() == pytest.approx(0.5, abs=5 / math.sqrt(12 * 2**16))
        assert torch.histc(drawn, 64, 0, 1).std() < 1.5 * math.sqrt(2**10)
        assert drawn.unique().numel() == 2**16


def test_products_are_right_to_the_last_bit_where_float32_is_not() -> None:
    """A sum whose small part is lost beside the large ones in float32."""
    kernels = Float64Kernels(None, torch.device("cpu"))  # type: ignore[arg-type]
    x = torch.tensor([[2.0**30, 1.0, -(2.0**30)]])
    assert kernels.linear(x, torch.ones(1, 3)).item() == 1.0
    assert kernels.linear_add(x, torch.ones(1, 3), torch.ones(1, 1)).item() == 2.0
