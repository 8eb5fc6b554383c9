"""The table of backends: names, what fits, who wins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm_bench import table as bench_table
from nanovllm_bench.table import TableCells, attention_named, judge, measure_table
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import ConfigError


def cell(result: Any) -> dict[str, Any]:
    return {"result": result}


def test_the_winner_is_the_fastest_and_the_speed_up_is_over_the_next() -> None:
    row = {"a": cell(100.0), "b": cell(250.0), "c": cell("OOM")}
    assert judge(row) == {"winner": "b", "speed_up": 2.5}


def test_one_alone_wins_without_a_speed_up() -> None:
    assert judge({"a": cell(100.0), "b": cell("OOM")}) == {"winner": "a", "speed_up": None}


def test_where_all_ran_out_of_memory_none_wins() -> None:
    assert judge({"a": cell("OOM"), "b": cell("> 60 s")}) == {"winner": None, "speed_up": None}


def test_lengths_that_do_not_fit_are_refused_with_the_length_that_would() -> None:
    cells = TableCells(["sdpa"], [1], [512, 2048])
    cells.check(4096)
    with pytest.raises(ConfigError, match=r"length 2048 needs 4096.*is 4000.*--max-model-len 4096"):
        cells.check(4000)


def test_an_option_is_given_by_its_value() -> None:
    pytest.importorskip("nanovllm_attention_sdpa", reason="needs the plugin attention_sdpa")
    math = {"backend": "sdpa", "options": {"kernel": "math"}}
    assert attention_named("sdpa") == "sdpa"
    assert attention_named("sdpa.math") == math
    assert attention_named("triton+sdpa.math") == {"prefill": "triton", "decode": math}


def test_a_value_that_no_option_takes_is_refused_with_those_that_exist() -> None:
    pytest.importorskip("nanovllm_attention_sdpa", reason="needs the plugin attention_sdpa")
    with pytest.raises(ConfigError, match=r"'sdpa\.maths': 0 options.*sdpa\.math,"):
        attention_named("sdpa.maths")


class _Engine:
    """An engine whose cells take as many seconds as they have tokens of a request."""

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _measured(monkeypatch: pytest.MonkeyPatch, cells: TableCells) -> tuple[list[Any], list[Any]]:
    """(cells that were tried, records after each), where lengths above 512 take too long."""
    tried, records = [], []

    def measure_cell(_llm: Any, _gauge: Any, batch: int, length: int, _cells: Any) -> Any:
        tried.append((batch, length))
        return {"result": "> 60 s"} if length > 512 else {"result": 10.0 * batch}

    monkeypatch.setattr(bench_table, "_open", lambda *_: _Engine())
    monkeypatch.setattr(bench_table.Gauge, "of", lambda _llm: None)
    monkeypatch.setattr(bench_table, "describe_engine", lambda _llm: {})
    monkeypatch.setattr(bench_table, "measure_cell", measure_cell)
    measure_table(
        lambda choice: EngineConfig(model="demo", attention=choice),
        cells,
        lambda _text, record: records.append(record),
    )
    return tried, records


def test_the_rates_of_the_device_are_measured_behind_all_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the kernels of the measurement would make those of the later cells begin later."""
    seen: list[str] = []

    def measure_cell(*_: Any) -> Any:
        seen.append("run")
        return {"result": 10.0, "seconds": [2.0, 1.0]}

    def roofline(_workload: Any, _most: int, seconds: float) -> str:
        seen.append("rates")
        return f"of {seconds} s"

    monkeypatch.setattr(bench_table, "_open", lambda *_: _Engine())
    monkeypatch.setattr(bench_table.Gauge, "of", lambda _llm: SimpleNamespace(roofline=roofline))
    monkeypatch.setattr(bench_table, "describe_engine", lambda _llm: {})
    monkeypatch.setattr(bench_table, "measure_cell", measure_cell)
    record = measure_table(
        lambda choice: EngineConfig(model="demo", attention=choice),
        TableCells(["sdpa", "sdpa.math"], [1], [16, 32]),
    )
    assert seen == ["run"] * 4 + ["rates"] * 4
    shares = [one["roofline"] for cell in record["cells"] for one in cell["backends"].values()]
    assert shares == ["of 1.0 s"] * 4


def test_what_is_larger_than_a_cell_left_out_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a longer one nor a larger batch of the same length."""
    tried, records = _measured(monkeypatch, TableCells(["sdpa"], [1, 4], [512, 1024, 2048]))
    assert tried == [(1, 512), (1, 1024), (4, 512)]
    last = {(c["batch"], c["length"]): c["backends"]["sdpa"] for c in records[-1]["cells"]}
    assert last[1, 1024]["result"] == "> 60 s"


def test_an_interrupted_table_keeps_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each cell there is a whole record of those so far."""
    _, records = _measured(monkeypatch, TableCells(["sdpa"], [1, 2], [512]))
    assert [sum(bool(c["backends"]) for c in record["cells"]) for record in records] == [1, 2]
    assert records[0]["cells"][0]["winner"] == "sdpa"
