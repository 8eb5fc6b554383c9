"""Attention alone: every contender is near float64, and what does not fit says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm_bench import attention as bench
from nanovllm_bench.attention_cases import AttentionSetup
from nanovllm_bench.launches import Launch, count_launches, read_launches
from nanovllm_core.errors import UnsupportedError
from nanovllm_core.interfaces.attention import Phase

pytest.importorskip("nanovllm_attention_sdpa", reason="needs the plugin attention_sdpa")

HALF = """
from nanovllm_core.api import AttentionCapabilities, AttentionSpec, KVLayout, hookimpl

def check(requirements, options):
    recorded = requirements.cuda_graphs and requirements.phase == "prefill"
    return ["was not captured with prompts"] if recorded else []

@hookimpl
def nanovllm_attention():
    return [AttentionSpec(
        name="half", impl="x:X", contract=2, check=check,
        capabilities=AttentionCapabilities(
            devices=frozenset({"cuda"}), dtypes=frozenset({"float32"}), gqa=True,
            cuda_graphs="full",
        ),
        kv_layouts=lambda requirements, options: [KVLayout("NPKD", 16)],
        rank=lambda requirements: 0,
    )]
"""


def setup(phase: Phase, batch: int = 2) -> AttentionSetup:
    return AttentionSetup(
        phase=phase,
        device=torch.device("cpu"),
        dtype=torch.float32,
        batch=batch,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
    )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_backends_and_the_naive_one_agree_with_float64(phase: Phase) -> None:
    """At a length that fills no block, too."""
    result = bench.measure_attention(
        setup(phase), ["sdpa", "sdpa.math", "naive"], (1, 16, 37), repeats=1
    )
    json.dumps(result)
    assert result["ran"]["sdpa.math"].endswith("kernel math")
    for row in result["rows"]:
        assert row["winner"] in row["backends"]
        for name, cell in row["backends"].items():
            assert cell["relative_error"] < 1e-6, (row["length"], name)
            assert cell["ms"] > 0
            assert (cell["grid"], cell["launches"], cell["peak_mib"]) == (None, None, None)


def test_rates_are_of_the_bytes_and_operations_that_attention_needs() -> None:
    decode, prefill = setup("decode", 3), setup("prefill", 3)
    assert decode.kv_bytes(10) == 3 * 10 * 2 * 2 * 16 * 4
    assert decode.flops(10) == 3 * 10 * 4 * 4 * 16
    assert prefill.flops(10) == 3 * 50 * 4 * 4 * 16


def test_scores_that_do_not_fit_are_a_cell_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "available_memory_bytes", lambda: 200_000)
    result = bench.measure_attention(setup("prefill"), ["sdpa", "naive"], [64], repeats=1)
    [row] = result["rows"]
    assert row["backends"]["naive"]["ms"] == "OOM"
    assert "GiB" in row["backends"]["naive"]["reason"]
    assert row["winner"] == "sdpa"


def test_keys_that_do_not_fit_are_a_cell_too() -> None:
    result = bench.measure_attention(setup("decode"), ["sdpa"], [2**31 - 1], repeats=1)
    assert "keys and values need" in result["rows"][0]["backends"]["sdpa"]["reason"]


def test_a_backend_that_cannot_serve_is_refused_with_its_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"'sdpa\.cudnn' cannot serve decode here"):
        bench.contenders(setup("decode"), ["sdpa.cudnn"])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_the_engine_would_capture_is_captured(
    phase: Phase, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    """By the plugin's answer for these options; its capabilities alone may promise too much."""
    install("half", {"nanovllm.attention": {"half": "half_spec"}}, {"half_spec": HALF})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    gpu = replace(setup(phase), device=torch.device("cuda", 0))
    captured = {one.name: one.captured for one in bench.contenders(gpu, ["sdpa", "half", "naive"])}
    decodes = phase == "decode"
    assert captured == {"sdpa": decodes, "half": decodes, "naive": decodes}
    on_cpu = bench.contenders(setup(phase), ["sdpa", "naive"])
    assert [one.captured for one in on_cpu] == [False, False]


def test_by_default_all_that_can_serve_take_part() -> None:
    able = bench.able_backends(setup("decode"))
    assert "sdpa" in able
    assert able[-1] == "naive"


def test_launches_are_the_kernels_of_a_trace_in_order(tmp_path: Path) -> None:
    kernel = {"cat": "kernel", "args": {"grid": [4, 2, 1]}, "dur": 3.5}
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0},
        {**kernel, "name": "second", "ts": 20},
        {**kernel, "name": "first", "ts": 10},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    assert read_launches(file) == [
        Launch("first", (4, 2, 1), 3.5),
        Launch("second", (4, 2, 1), 3.5),
    ]


def test_a_cpu_launches_nothing() -> None:
    assert count_launches(lambda: None, torch.device("cpu")) is None
