"""The commands of `nanovllm bench` on the embedded model: each says what really ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import ConfigError

for plugin in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

DEMO = ("--model", "demo", "--device", "cpu", "--max-model-len", "64")
CACHE = ("--set", "cache.num_blocks=64")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["bench", *arguments])


def test_latency_prints_percentiles_and_writes_raw_times(tmp_path: Path) -> None:
    out = tmp_path / "latency.json"
    result = bench(
        *("latency", *DEMO, *CACHE, "--attention", "sdpa", "--num-seqs", "3", "--input-len", "8"),
        *("--output-len", "4", "--rate", "1000", "--arrivals", "fixed", "--out", str(out)),
    )
    assert result.exit_code == 0, result.output
    assert "kernel auto" in result.output
    assert "p99" in result.output
    record = json.loads(out.read_text())
    assert len(record["raw_ttft_ms"]) == 3
    assert len(record["raw_inter_token_ms"]) == 3 * 3
    assert record["roofline"]["share"] > 0
    assert record["environment"].keys() >= {"commit", "clean_tree"}


def test_the_table_has_a_winner_in_every_cell(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    result = bench(
        *("table", *DEMO, *CACHE, "--attention", "sdpa,sdpa.math", "--batch", "1,2"),
        *("--lengths", "16", "--out", str(out)),
    )
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert [cell["batch"] for cell in record["cells"]] == [1, 2]
    assert all(cell["winner"] in ("sdpa", "sdpa.math") for cell in record["cells"])
    ran = {name: engine["attention"] for name, engine in record["engines"].items()}
    assert ran["sdpa"].endswith("kernel auto")
    assert ran["sdpa.math"].endswith("kernel math"), "the option reached the backend"


def test_a_cell_that_would_take_too_long_is_left_out() -> None:
    result = bench(
        *("table", *DEMO, *CACHE, "--attention", "sdpa", "--batch", "1", "--lengths", "16"),
        *("--max-seconds", "0.000001"),
    )
    assert result.exit_code == 0, result.output
    assert "> 1e-06 s" in result.output


def test_the_table_refuses_lengths_that_do_not_fit() -> None:
    result = bench("table", *DEMO, "--attention", "sdpa", "--lengths", "16,33")
    assert isinstance(error := result.exception, ConfigError)
    assert "--max-model-len 66, or leave lengths above 32 out" in str(error)


@pytest.mark.parametrize("text", ["1,x", "", "0"])
def test_a_list_of_sizes_must_be_one(text: str) -> None:
    result = bench("table", *DEMO, "--batch", text)
    assert result.exit_code == 2
    assert "no list of whole numbers" in result.output


def test_attention_alone_prints_each_backend(tmp_path: Path) -> None:
    out = tmp_path / "attention.json"
    result = bench(
        *("attention", "--phase", "decode", "--device", "cpu", "--lengths", "16", "--batch", "1"),
        *("--attention", "sdpa,naive", "--repeats", "1", "--out", str(out)),
    )
    assert result.exit_code == 0, result.output
    assert "TB/s" in result.output
    assert set(json.loads(out.read_text())["ran"]) == {"sdpa", "naive"}


def test_compare_prints_how_many_times_as_fast_we_are() -> None:
    result = bench(
        *("compare", "--against", "hf", *DEMO, *CACHE, "--attention", "sdpa", "--num-seqs", "2"),
        *("--shortest", "2", "--longest", "6", "--runs", "1", "--modes", "batch"),
    )
    assert result.exit_code == 0, result.output
    assert "× as fast" in result.output


def test_plot_writes_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    record = {"workload": "2 x 8/8", "num_seqs": 2, "backend": "sdpa", "tokens_per_second": 9.0}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(record))
    result = bench("plot", str(file), "--out", str(tmp_path / "a.svg"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.svg").stat().st_size > 1000
