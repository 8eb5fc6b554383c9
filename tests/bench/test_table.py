"""The table of backends: names, what fits, who wins."""

from __future__ import annotations

from typing import Any

import pytest

from nanovllm_core.bench.table import TableCells, attention_named, judge
from nanovllm_core.errors import ConfigError


def cell(result: Any) -> dict[str, Any]:
    return {"result": result}


def test_the_winner_is_the_fastest_and_the_speed_up_is_over_the_next() -> None:
    row = {"a": cell(100.0), "b": cell(250.0), "c": cell("OOM")}
    assert judge(row) == {"winner": "b", "speed_up": 2.5}


def test_one_alone_wins_without_a_speed_up() -> None:
    assert judge({"a": cell(100.0), "b": cell("OOM")}) == {"winner": "a", "speed_up": None}


def test_where_all_ran_out_of_memory_nobody_wins() -> None:
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
