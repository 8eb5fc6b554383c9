"""Beside transformers: the same requests, each in its own way, and every token counted."""

from __future__ import annotations

import json

import pytest
import torch

from nanovllm_bench import compare
from nanovllm_bench.compare import compare_with_transformers
from nanovllm_bench.workloads import Workload, fixed_workload
from nanovllm_core.config.sources import load_config
from nanovllm_core.errors import ConfigError

for plugin in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

SMALL = {"device": "cpu", "attention": "sdpa", "max_model_len": 64, "max_num_seqs": 4}
WORKLOAD = Workload("4 ragged 2-8", [[1, 2], [3, 4, 5], [6] * 8, [7] * 5], [3, 2, 4, 8])


def test_both_answer_the_same_requests() -> None:
    config = load_config("demo", overrides=SMALL, env={})
    record = compare_with_transformers(config, WORKLOAD, runs=2)
    assert record == json.loads(json.dumps(record)), "it can be written as it is"
    assert record["output_tokens"] == 17
    assert set(record["speed_up"]) == {"batch", "single"}
    for one in (record["ours"], *record["transformers"].values()):
        assert len(one["raw_ttft_ms"]) == 4
        assert len(one["seconds"]) == 2, "the best of as many runs on every side"
        assert all(ms > 0 for ms in one["raw_ttft_ms"])
        assert one["tokens_per_second"] == pytest.approx(17 / min(one["seconds"]), rel=1e-2)
    single = record["transformers"]["single"]["raw_ttft_ms"]
    assert single == sorted(single), "a request waits for those before it"
    batch = record["transformers"]["batch"]["raw_ttft_ms"]
    assert len(set(batch)) == 1, "in a padded batch all first tokens come at once"


def test_an_unknown_way_to_run_transformers_is_refused() -> None:
    config = load_config("demo", overrides=SMALL, env={})
    with pytest.raises(ConfigError, match=r"as batch or single, not as \['stream'\]"):
        compare_with_transformers(config, WORKLOAD, modes=["stream"])


def test_a_peak_is_of_its_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran before in the process, as the other way to run transformers, is forgotten."""
    peak = [7 * 2**30]
    monkeypatch.setattr(compare, "reset_peak_memory", lambda _place: peak.__setitem__(0, 0))
    monkeypatch.setattr(compare, "peak_memory_bytes", lambda _place: peak[0])

    def run() -> list[float]:
        peak[0] = max(peak[0], 2**30)
        return [0.1]

    result = compare._measure(run, fixed_workload(1, 4, 4), torch.device("cpu"), runs=2)
    assert result["peak_memory_gib"] == 1.0
