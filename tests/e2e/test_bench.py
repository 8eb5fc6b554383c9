"""The benchmark: the workload that everyone quotes, and a result that says what really ran."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nanovllm_bench.environment import describe_commit, describe_environment
from nanovllm_bench.throughput import measure_throughput
from nanovllm_bench.workloads import Workload, fixed_workload, nano_workload
from nanovllm_core import LLM
from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import ConfigError, InconsistentStateError, RequestTooLongError

from .tiny import open_tiny, write_config


def test_the_nano_workload_is_the_quoted_one() -> None:
    """142,827 prompt tokens, 133,966 output tokens, the longest sequence 2,011."""
    workload = nano_workload()
    assert len(workload.prompts) == 256
    assert workload.num_prompt_tokens == 142_827
    assert workload.num_output_tokens == 133_966
    assert workload.longest == 2_011
    assert max(max(prompt) for prompt in workload.prompts) <= 10_000
    assert nano_workload() == workload


def test_a_fixed_workload_has_the_lengths_asked_for() -> None:
    workload = fixed_workload(3, 5, 7)
    assert [len(prompt) for prompt in workload.prompts] == [5, 5, 5]
    assert workload.output_lens == [7, 7, 7]
    assert workload.longest == 12
    assert workload.prompts[0] != workload.prompts[1], "or the prefix cache would do the work"


def test_a_small_vocabulary_changes_ids_and_no_length() -> None:
    workload = nano_workload(4)
    assert workload.within(151_936) is workload
    small = workload.within(97)
    assert small.output_lens == workload.output_lens
    assert [len(p) for p in small.prompts] == [len(p) for p in workload.prompts]
    assert max(max(prompt) for prompt in small.prompts) < 97


def test_a_result_says_what_ran(tiny: Path) -> None:
    """Counts, raw times, implementation, configuration and environment, all of it as JSON."""
    with open_tiny(tiny, steps_ahead=2) as llm:
        record = measure_throughput(llm, fixed_workload(3, 20, 5), temperature=0.6, runs=2)
        steps = llm.stats.steps
    assert record == json.loads(json.dumps(record)), "it can be written as it is"
    assert (record["num_seqs"], record["prompt_tokens"], record["output_tokens"]) == (3, 60, 15)
    assert len(record["seconds"]) == 2
    assert record["tokens_per_second"] == pytest.approx(15 / min(record["seconds"]), rel=5e-2)
    assert "sdpa" in record["attention"]
    assert record["device"] == "cpu", "where it ran, whatever else the machine has"
    assert record["scheduler"] == "fcfs"
    assert record["cuda_graphs"] is False
    assert record["block_size"] == 16
    assert record["config"]["steps_ahead"] == 2
    assert record["environment"].keys() >= {"python", "packages", "device", "commit", "clean_tree"}
    assert "torch" in record["environment"]["packages"]
    assert steps == 3 * record["steps"], "every run computes its prompts anew"
    assert record["host_us_per_step"] > 0


def test_a_run_that_gives_too_few_tokens_is_no_result(
    shared_engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that ends requests early would make the engine look fast."""
    generate = shared_engine.generate
    monkeypatch.setattr(shared_engine, "generate", lambda *a, **k: generate(*a, **k)[1:])
    with pytest.raises(InconsistentStateError, match="asks for 8 output tokens, 4 came"):
        measure_throughput(shared_engine, Workload("two", [[1], [2]], [4, 4]), runs=1)


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert describe_commit(tmp_path / "a.py") == {"commit": None, "clean_tree": None}
    assert describe_environment()["device"]["name"]


def test_the_commit_around_an_installed_package_is_not_ours(tmp_path: Path) -> None:
    """A virtual environment lies in the checkout of the project that uses it, which ignores it."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    installed, tracked = tmp_path / ".venv" / "package.py", tmp_path / "tracked.py"
    installed.parent.mkdir()
    for file in (installed, tracked):
        file.touch()
    (tmp_path / ".gitignore").write_text(".venv/")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *arguments], check=True)
    assert describe_commit(installed) == {"commit": None, "clean_tree": None}
    assert len(describe_commit(tracked)["commit"]) == 40
    assert describe_commit(tracked)["clean_tree"] is True


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["bench", "throughput", *arguments])


SMALL = ("--num-seqs", "2", "--input-len", "8", "--output-len", "4", "--runs", "1")


def test_the_command_measures_and_names_what_ran(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "results" / "tiny.json"
    result = bench(
        *("--model", str(tiny), "--device", "cpu", "--attention", "sdpa+sdpa"),
        *("--max-model-len", "64", "--set", "cache.block_size=32"),
        *(*SMALL, "--out", str(out)),
    )
    assert result.exit_code == 0, result.output
    assert "2 x 8/4: 2 requests, 16 prompt tokens, 8 output tokens" in result.output
    assert "sdpa" in result.output
    assert "output tok/s" in result.output
    record = json.loads(out.read_text())
    assert record["config"]["limits"]["max_model_len"] == 64
    assert record["block_size"] == 32
    assert "touched_experts" not in record, "the model has none"


def test_the_embedded_model_can_be_measured() -> None:
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")
    result = bench("--model", "demo", "--device", "cpu", "--attention", "sdpa", *SMALL)
    assert result.exit_code == 0, result.output


def test_random_weights_need_a_config_alone(tmp_path: Path) -> None:
    """The model comes from the configuration file; `--load-format dummy` invents the weights."""
    file = tmp_path / "engine.yaml"
    file.write_text(f"model: {write_config(tmp_path / 'model')}\ndevice: cpu\nattention: sdpa\n")
    result = bench("--config", str(file), "--load-format", "dummy", *SMALL)
    assert result.exit_code == 0, result.output


def test_without_a_model_it_says_what_to_give() -> None:
    """No model is made up: neither flag nor file names one."""
    assert isinstance(error := bench(*SMALL).exception, ConfigError)
    assert "model" in str(error)


def test_lengths_go_together_and_fit(tiny: Path) -> None:
    result = bench("--model", str(tiny), "--input-len", "8")
    assert result.exit_code == 2
    assert "--input-len and --output-len go together" in result.output
    result = bench("--model", str(tiny), *SMALL, "--max-model-len", "10", "--device", "cpu")
    assert isinstance(result.exception, RequestTooLongError)
