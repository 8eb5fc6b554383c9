"""The commands of `nanovllm bench` on the embedded model: each says what really ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nanovllm_bench.commands.shared import names_of, numbers
from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import ConfigError, DeviceError, UnsupportedError

for plugin in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

DEMO = ("--model", "demo", "--device", "cpu", "--max-model-len", "64")
CACHE = ("--set", "cache.num_blocks=64")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["bench", *arguments])


def words(result: Result) -> str:
    """The output on one line, without the frames around usage errors."""
    return " ".join(result.output.replace("│", "").split())


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
    # Where this machine is busy, the tokens of several steps are seen at once.
    assert (record["roofline"]["share"] is None) is (record["inter_token_ms"]["p50"] == 0)
    assert record["environment"].keys() >= {"commit", "clean_tree"}


@pytest.mark.slow
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
    for cell in record["cells"]:
        assert all(one["roofline"]["share"] > 0 for one in cell["backends"].values())
    ran = {name: engine["attention"] for name, engine in record["engines"].items()}
    assert ran["sdpa"].endswith("kernel auto")
    assert ran["sdpa.math"].endswith("kernel math"), "the option reached the backend"


@pytest.mark.slow
def test_the_table_keeps_the_options_of_the_configuration(tmp_path: Path) -> None:
    """For the backend that it names, as every command does; another has its own."""
    out, config = tmp_path / "table.json", tmp_path / "engine.yaml"
    config.write_text("attention: {backend: sdpa, options: {kernel: math}}")
    result = bench(
        *("table", *DEMO, *CACHE, "--config", str(config), "--attention", "sdpa"),
        *("--batch", "1", "--lengths", "8", "--out", str(out)),
    )
    assert result.exit_code == 0, result.output
    engine = json.loads(out.read_text())["engines"]["sdpa"]
    assert engine["attention"].endswith("kernel math")


def test_the_table_names_a_backend_that_cannot_serve_before_it_measures() -> None:
    result = bench("table", *DEMO, *CACHE, "--attention", "sdpa,sdpa.cudnn", "--lengths", "8")
    assert isinstance(result.exception, UnsupportedError)
    assert "cudnn" in str(result.exception)
    assert "sdpa 1 x" not in result.output


@pytest.mark.parametrize("rate", ["0", "nan"])
def test_a_rate_is_above_zero_before_anything_starts(rate: str) -> None:
    result = bench("latency", *DEMO, "--rate", rate)
    assert result.exit_code == 2, result.output
    assert "must be above 0" in words(result)


def test_all_at_once_has_no_rate(tmp_path: Path) -> None:
    """Infinity is no number of JSON."""
    out = tmp_path / "latency.json"
    result = bench(
        *("latency", *DEMO, *CACHE, "--attention", "sdpa", "--rate", "inf", "--num-seqs", "2"),
        *("--input-len", "8", "--output-len", "2", "--out", str(out)),
    )
    assert result.exit_code == 0, result.output
    assert "all at once" in result.output
    assert json.loads(out.read_text(), parse_constant=pytest.fail)["rate"] is None


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "nope"], "'nope' is not one of"),
        (["--num-heads", "3", "--num-kv-heads", "2"], "3 is no multiple of the 2"),
        (["--lengths", "16,99999999999999999999999"], "is above 2147483647"),
        (["--attention", "sdpa,,naive"], "no list of names"),
    ],
)
def test_attention_refuses_flags_that_it_cannot_measure(arguments: list[str], said: str) -> None:
    result = bench("attention", "--phase", "decode", "--device", "cpu", *arguments)
    assert result.exit_code == 2, result.output
    assert said in words(result)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["--device", "mars"], DeviceError), (["--attention", "a+b"], ConfigError)],
)
def test_attention_names_a_device_or_a_pair_that_it_does_not_take(
    arguments: list[str], error: type[Exception]
) -> None:
    result = bench("attention", "--phase", "decode", "--device", "cpu", *arguments)
    assert isinstance(result.exception, error)


def test_a_backend_and_a_length_named_twice_are_measured_once() -> None:
    assert names_of("sdpa, naive,sdpa", "--attention") == ["sdpa", "naive"]
    assert numbers("16,8,16", "--lengths") == [16, 8]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--attention", ","], "no list of names"),
        (["--max-seconds", "nan"], "nan must be above 0"),
        (["--max-seconds", "-1"], "-1.0 must be above 0"),
    ],
)
def test_the_table_refuses_what_would_measure_nothing(arguments: list[str], said: str) -> None:
    result = bench("table", *DEMO, *arguments)
    assert result.exit_code == 2, result.output
    assert said in words(result)


def test_the_table_says_which_half_of_a_pair_is_missing() -> None:
    result = bench("table", *DEMO, "--attention", "sdpa+")
    assert isinstance(error := result.exception, ConfigError)
    assert "attention.decode.backend: '' must be text of 1" in str(error)


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "attention", "--phase", "decode"],
        ["bench", "throughput", "-m", "none"],
        ["bench", "latency", "-m", "none"],
        ["bench", "table", "-m", "none"],
        ["bench", "compare", "-m", "none"],
        ["eval", "-m", "none"],
    ],
    ids=" ".join,
)
def test_a_result_that_cannot_be_written_is_told_before_the_work(
    command: list[str], tmp_path: Path
) -> None:
    """The model is not there either: looking for it would be the first of the work."""
    file = tmp_path / "file"
    file.touch()
    for out in (tmp_path, file / "below.json"):
        result = CliRunner().invoke(make_app(), [*command, "--out", str(out)])
        assert result.exit_code == 2, (out, result.exception)
        assert "Invalid value for '--out'" in result.output


def test_the_result_of_eval_names_the_dtype_that_ran(tmp_path: Path) -> None:
    """`auto`, as it is configured, would not say which."""
    out = tmp_path / "eval.json"
    arguments = ["eval", "--model", "demo", "--device", "cpu", "--attention", "sdpa"]
    small = ["--set", "limits.max_model_len=256", "--limit", "1", "--out", str(out)]
    thresholds = ["--min-task", "0", "--min-overall", "0"]
    result = CliRunner().invoke(make_app(), [*arguments, *small, *thresholds])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["dtype"] == "float32"


def test_compare_prints_how_many_times_as_fast_we_are() -> None:
    result = bench(
        *("compare", "--against", "hf", *DEMO, *CACHE, "--attention", "sdpa", "--num-seqs", "2"),
        *("--shortest", "2", "--longest", "6", "--runs", "1", "--modes", "batch"),
    )
    assert result.exit_code == 0, result.output
    assert "× as fast" in result.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "is no result file"),
        (b"\xff", "is no result file"),
        (b"[" * 9999, "is no result file"),
        (b"[1]", "it holds list, not an object"),
        (b'{"benchmark": "table"}', "KeyError('cells')"),
        (b'{"benchmark": "throughput", "workload": 3}', "TypeError"),
    ],
)
def test_plot_names_a_file_that_is_no_result(text: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text)
    assert isinstance(error := bench("plot", str(file)).exception, ConfigError)
    assert said in str(error)


def test_plot_takes_no_folder_and_writes_no_other_format(tmp_path: Path) -> None:
    """matplotlib would add .png to a name without an ending, and write a file that is not told."""
    assert "is a directory" in words(bench("plot", str(tmp_path)))
    file = tmp_path / "a.json"
    file.touch()
    for out in ("a", "a.pdf", "a.SVG"):
        result = bench("plot", str(file), "--out", str(tmp_path / out))
        assert "must end in .svg or .png" in words(result)
    assert [*tmp_path.iterdir()] == [file]


def test_plot_writes_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs nanovllm-bench[plot]")
    record = {
        "benchmark": "throughput",
        "workload": "2 x 8/8",
        "num_seqs": 2,
        "backend": "sdpa",
        "device": "cpu",
        "config": {"model": "demo"},
        "tokens_per_second": 9.0,
    }
    file = tmp_path / "a.json"
    file.write_text(json.dumps(record))
    result = bench("plot", str(file), "--out", str(tmp_path / "a.svg"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.svg").stat().st_size > 1000
