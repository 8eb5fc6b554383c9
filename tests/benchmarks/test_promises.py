"""`benchmarks/promises.py`: what one host is to reach, on a CPU with limits of its own."""

from __future__ import annotations

import json
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

from nanovllm_core import LLM, SamplingParams

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "promises.py"


def test_every_promise_is_measured_and_a_missed_one_ends_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workloads by one engine, of which one cannot be as fast as is asked."""
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = runpy.run_path(str(SCRIPT))
    settings = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4}
    least = {"6 x 20/9": 0.001, "1 x 20/5": 1e12}
    part = script["Part"]("demo", least, runs=2, settings=settings)
    monkeypatch.setitem(script["MEASURES"], "demo", partial(script["measure"], part))
    out = tmp_path / "promises.json"
    monkeypatch.setattr(sys, "argv", ["promises.py", "--parts", "demo", "--out", str(out)])
    with pytest.raises(SystemExit, match=r"not kept: demo, 1 x 20/5$"):
        script["main"]()
    printed = capsys.readouterr().out
    assert printed.count("at least") == 2
    assert printed.count("MISSED") == 1
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["demo, 6 x 20/9", "demo, 1 x 20/5"]
    assert all(row["value"] > 0 for row in rows)


def test_a_start_from_files_counts_warm_starts_and_the_bytes_that_were_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 16.4 GB that are not written here, by starts that are not made."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    measure = runpy.run_path(str(SCRIPT))["measure_start_from_files"]
    starts = [
        {"triton_cache": "empty", "ready": 1.0, "model": 0.1},
        {"triton_cache": "warm", "ready": 9.1, "model": 4.0},
        {"triton_cache": "warm", "ready": 8.9, "model": 2.0},
    ]
    monkeypatch.setattr("checkpoints.write_checkpoint", lambda _config, _folder: 16_400_000_000)
    monkeypatch.setitem(measure.__globals__, "results_of", lambda *_command: {"starts": starts})
    seconds, rate = measure()
    assert (seconds.value, seconds.is_kept) == (8.9, True)
    assert (rate.value, rate.is_kept) == (8.2, True)


def test_a_checkpoint_of_random_weights_is_one_that_the_engine_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its configuration's shapes, in as many files as were asked for, none of them empty."""
    pytest.importorskip("nanovllm_model_qwen3", reason="needs the plugin model_qwen3")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    write_checkpoint = runpy.run_path(str(SCRIPT.parent / "checkpoints.py"))["write_checkpoint"]
    num_bytes = write_checkpoint(SCRIPT.parent / "configs" / "qwen3-6x512", tmp_path, num_files=3)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 3
    assert sum(sizes) == num_bytes
    assert min(sizes) > num_bytes / 6
    with LLM(str(tmp_path), device="cpu", max_model_len=64) as llm:
        plain = SamplingParams(max_tokens=3, ignore_eos=True)
        assert len(llm.generate([[1, 2, 3]], plain, use_tqdm=False)[0].token_ids) == 3


def test_every_workload_and_kind_that_is_promised_is_one_that_can_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By their names, which other programs know."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    workload_of = runpy.run_path(str(SCRIPT.parent / "parallel.py"))["workload_of"]
    kinds = runpy.run_path(str(SCRIPT.parent / "asking.py"))["KINDS"]
    for part in runpy.run_path(str(SCRIPT))["PARTS"].values():
        assert all(workload_of(name, 1).num_output_tokens > 0 for name in part.least)
        assert {*(part.asking or ())} <= {*kinds}


def test_a_time_is_kept_below_its_limit_and_a_rate_above() -> None:
    """At the limit both are."""
    row = runpy.run_path(str(SCRIPT))["Row"]
    assert row("start", "s", 5.0, 5.0, is_time=True).is_kept
    assert not row("start", "s", 5.1, 5.0, is_time=True).is_kept
    assert row("nano", "tok/s", 5.0, 5.0).is_kept
    assert not row("nano", "tok/s", 4.9, 5.0).is_kept
