"""The committed results: their rates and shares follow from their raw times, the page from them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
import torch

from nanovllm_bench.latency import percentiles
from nanovllm_bench.plots import Point, draw, series_of
from nanovllm_bench.rates import model_costs
from nanovllm_bench.record import write_record
from nanovllm_bench.roofline import ModelCosts, Rates, recompute
from nanovllm_bench.table import judge
from nanovllm_bench.workloads import fixed_workload, recorded_workload
from nanovllm_core.config.sources import load_config
from nanovllm_core.errors import ConfigError, UnsupportedError

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
FILES = {
    f"{file.parent.name}/{file.stem}": json.loads(file.read_text())
    for file in sorted((BENCHMARKS / "results").glob("*/*.json"))
}
PEERS = json.loads((BENCHMARKS / "peers.json").read_text())


def measured(kind: str) -> list[Any]:
    """The committed records of one benchmark."""
    return [
        pytest.param(record, id=name)
        for name, record in FILES.items()
        if isinstance(record, dict) and record.get("benchmark") == kind
    ]


@pytest.mark.parametrize("name", ["performance.md", "attention_implementation.md"])
def test_the_page_is_what_the_result_files_say(generator: ModuleType, name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert generator.render(text, generator.DOCUMENTS[name]) == text, "run: python docs/generate.py"


def test_a_changed_figure_would_be_noticed(generator: ModuleType) -> None:
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    changed = text.replace("| 21,550 |", "| 21,551 |")
    assert changed != text
    assert generator.render(changed, generator.DOCUMENTS["performance.md"]) == text


@pytest.mark.parametrize("name", ["performance.md", "attention_implementation.md"])
def test_no_measured_figure_is_typed_by_hand(name: str) -> None:
    """Outside the generated parts no number has a unit of speed, time, memory or share."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    prose = re.sub(r"<!-- generated: .*?<!-- end -->", "", text, flags=re.DOTALL)
    units = r"(tok/s|TB|TFLOP|GiB|MiB|ms|µs|s|%|×)"
    assert re.findall(rf"\b\d[\d.,]*\s?{units}(?!\w)", re.sub(r"\d+ ×|× \d+|\d ×", "", prose)) == []


@pytest.mark.parametrize("record", measured("throughput"))
def test_rate_and_share_follow_from_the_raw_times(record: dict[str, Any]) -> None:
    workload, roofline = recorded_workload(record), record["roofline"]
    assert workload.num_output_tokens == record["output_tokens"]
    best = min(record["seconds"])
    assert record["tokens_per_second"] == pytest.approx(record["output_tokens"] / best, rel=1e-3)
    floor = recompute(roofline, workload.lengths, record["max_num_seqs"])
    assert roofline["floor_seconds"] == pytest.approx(floor.seconds, rel=1e-4)
    assert roofline["share"] == pytest.approx(floor.seconds / best, abs=2e-3)
    if histogram := record.get("touched_experts", {}).get("histogram"):
        mean = sum(k * count for k, count in enumerate(histogram)) / sum(histogram)
        assert roofline["touched_experts"] == pytest.approx(mean)


@pytest.mark.parametrize("record", measured("table"))
def test_every_cell_follows_from_its_raw_times(record: dict[str, Any]) -> None:
    for cell in record["cells"]:
        workload = fixed_workload(cell["batch"], cell["length"], cell["length"])
        for name, one in cell["backends"].items():
            if isinstance(one["result"], str):
                continue
            best = min(one["seconds"])
            assert one["result"] == pytest.approx(workload.num_output_tokens / best, rel=1e-3)
            rows = record["engines"][name]["max_num_seqs"]
            floor = recompute(one["roofline"], workload.lengths, rows)
            assert one["roofline"]["share"] == pytest.approx(floor.seconds / best, abs=2e-3)
        winner = {name: cell[name] for name in ("winner", "speed_up")}
        assert winner == judge(cell["backends"])


@pytest.mark.parametrize("record", measured("latency"))
def test_percentiles_follow_from_the_raw_times(record: dict[str, Any]) -> None:
    for name in ("ttft_ms", "inter_token_ms"):
        computed = percentiles(record[f"raw_{name}"])
        assert record[name] == pytest.approx(computed, abs=2e-3)


@pytest.mark.parametrize("record", measured("compare"))
def test_every_ratio_follows_from_both_raw_times(record: dict[str, Any]) -> None:
    tokens = recorded_workload(record).num_output_tokens
    ours = tokens / min(record["ours"]["seconds"])
    for mode, one in record["transformers"].items():
        assert one["tokens_per_second"] == pytest.approx(tokens / min(one["seconds"]), abs=0.06)
        ratio = ours / one["tokens_per_second"]
        assert record["speed_up"][mode] == pytest.approx(ratio, rel=1e-2)


@pytest.mark.parametrize("record", measured("serve_agreement"))
def test_two_tools_agree_by_the_medians_of_their_turns(record: dict[str, Any]) -> None:
    """`nanovllm bench serve` and guidellm differ by at most three in a hundred."""
    assert len(record["differences"]) >= 2
    for figure, difference in record["differences"].items():
        a, b = (median(turn[figure] for turn in turns) for turns in record["raw"].values())
        assert difference == pytest.approx(a / b - 1)
        assert abs(difference) <= record["limit"] <= 0.03


@pytest.mark.parametrize("record", measured("serve_start"))
def test_a_server_s_first_token_comes_soon(record: dict[str, Any]) -> None:
    """From the command: of the embedded model on a CPU in 5 seconds, of a model on a GPU in 8."""
    limit = 5.0 if "device=cpu" in record["arguments"] else 8.0
    assert median(record["seconds"]) <= limit


@pytest.mark.parametrize("record", measured("attention"))
def test_attention_s_rates_follow_from_its_times(record: dict[str, Any]) -> None:
    per_key = 2 * record["num_kv_heads"] * record["head_size"]
    itemsize = getattr(torch, record["dtype"]).itemsize
    heads = record["num_heads"] * record["head_size"]
    rates = Rates(**record["rates"])
    for row in record["rows"]:
        timed = {n: c for n, c in row["backends"].items() if not isinstance(c["ms"], str)}
        assert row["winner"] == min(timed, key=lambda name: min(timed[name]["raw_ms"]))
        for cell in timed.values():
            assert cell["ms"] == min(cell["raw_ms"])
            seconds = cell["ms"] * 1e-3
            if record["phase"] == "decode":
                rate = record["batch"] * row["length"] * per_key * itemsize / seconds
                assert cell["tb_per_s"] == pytest.approx(rate / 1e12, rel=1e-2)
                assert cell["share"] == pytest.approx(rate / rates.copy_bytes_per_s, rel=1e-2)
            else:
                rate = 2 * record["batch"] * row["length"] ** 2 * heads / seconds
                assert cell["tflop_per_s"] == pytest.approx(rate / 1e12, rel=1e-2)
                assert cell["share"] == pytest.approx(rate / rates.matmul_flops_per_s, rel=1e-2)


def test_the_costs_cited_with_the_peers_are_the_model_plugin_s() -> None:
    pytest.importorskip("nanovllm_model_qwen3", reason="needs the plugin model_qwen3")
    config = load_config(str(ROOT / PEERS["model"]), env={})
    assert model_costs(config, torch.bfloat16) == ModelCosts(**PEERS["costs"])


def test_the_aim_of_a_layer_has_a_launch_for_each_of_its_products(generator: ModuleType) -> None:
    """At 16 rows 0.88 of the copy rate: 8.8 µs of weights are 10, and a launch is 1.2."""
    line = {"model": "8B", "floor": 8.8, "microseconds": {"chosen": 14.0, "cuBLAS": 20.0}}
    lines = [
        {**line, "product": product, "rows": rows}
        for product in ("down + residual", "layer")
        for rows in (1, 2, 16, 64)
    ]
    results = generator.Results({"products": {"products": lines}}, {})
    found = sys.modules["product_tables"].products_table(results).splitlines()
    assert [row.split(" | ")[3] for row in found[2:]] == [
        "14.0 of 11.2 µs, 80 % (20.0)",
        "14.0 of 14.8 µs, 106 % (20.0)",
    ]


def test_without_results_the_page_says_so(generator: ModuleType, tmp_path: Path) -> None:
    """Only what was derived or cited is left."""
    tables = sys.modules["results_tables"]
    empty = tables.Results.read(tmp_path, BENCHMARKS / "peers.json")
    others = sys.modules["workload_tables"].WORKLOADS, sys.modules["product_tables"].PRODUCTS
    makes = tables.PERFORMANCE | others[0] | others[1]
    without = {name for name, make in makes.items() if make(empty) == tables.NOTHING}
    assert set(makes) - without == {"peers", "start"}


# -- plots ----------------------------------------------------------------------------------------

RECORDS: list[dict[str, Any]] = [
    {
        "benchmark": "throughput",
        "config": {"model": "demo"},
        "device": "cpu",
        "workload": f"{batch} x 8/8",
        "num_seqs": batch,
        "backend": "triton",
        "tokens_per_second": 10.0 * batch,
        "roofline": {"share": 0.5},
        "gpu_utilisation": None,
    }
    for batch in (4, 1)
]


def test_points_are_ordered_by_batch() -> None:
    assert series_of(RECORDS) == {
        "triton 8/8": [Point(1, 10.0, 0.5, None), Point(4, 40.0, 0.5, None)]
    }


def test_a_file_without_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of the files has a throughput by batch"):
        series_of([RECORDS[0] | {"workload": "nano", "num_seqs": 256}])


def test_a_rate_of_arrivals_is_no_batch() -> None:
    """A latency result has a rate too, of as many requests as came in, not of a batch."""
    with pytest.raises(ConfigError, match="none of the files has a throughput by batch"):
        series_of([RECORDS[0] | {"benchmark": "latency"}])


def test_models_and_devices_are_series_of_their_own() -> None:
    other = RECORDS[0] | {"config": {"model": "other"}, "tokens_per_second": 7.0}
    assert series_of([RECORDS[0], other]) == {
        "triton 8/8, demo, cpu": [Point(4, 40.0, 0.5, None)],
        "triton 8/8, other, cpu": [Point(4, 7.0, 0.5, None)],
    }


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_results_of_one_batch_the_faster_counts(order: int) -> None:
    slower = RECORDS[0] | {"tokens_per_second": 7.0}
    assert series_of([RECORDS[0], slower][::order]) == {"triton 8/8": [Point(4, 40.0, 0.5, None)]}


def test_a_plot_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    series = series_of(RECORDS)
    draw(series, tmp_path / "one.svg")
    draw(series, tmp_path / "two.svg")
    text = (tmp_path / "one.svg").read_text()
    assert "share of the roofline" in text
    assert text == (tmp_path / "two.svg").read_text()


def test_the_committed_plot_is_what_the_result_files_say(
    generator: ModuleType, tmp_path: Path
) -> None:
    """Drawn where there is something to draw, and not before."""
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    series = generator.by_batch()
    assert generator.PLOT.exists() == bool(series)
    if series:
        draw(series, tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_text() == generator.PLOT.read_text(), (
            "run: python docs/generate.py"
        )


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r'pip install "nanovllm-bench\[plot\]"'):
        draw(series_of(RECORDS), tmp_path / "none.svg")


def test_numbers_of_a_list_share_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    record = {"raw": [1.5, -2, 3e-07], "names": ["a", "b"], "empty": []}
    write_record(file, record)
    assert '"raw": [1.5, -2, 3e-07],' in file.read_text()
    assert json.loads(file.read_text()) == record
