"""Windows, their sums, and what becomes of a sink that is wrong: through the plugin manager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import NanoVLLMError, StepRecord
from nanovllm_example_metrics_sink.interface import Metrics
from nanovllm_example_metrics_sink.observer import summarise
from nanovllm_example_metrics_sink.plugin import MetricsOptions

SMALL: dict[str, Any] = {
    "device": "cpu",
    "attention": "sdpa",
    "max_num_seqs": 2,
    "max_model_len": 128,
    "num_kvcache_blocks": 32,
}


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "seconds": 0.5,
        "num_decode_rows": 3,
        "num_prefill_tokens": 10,
        "num_output_tokens": 4,
        "num_finished": 1,
        "num_preempted": 2,
        "num_running": 5,
        "num_waiting": 6,
        "num_in_flight": 1,
        "num_free_blocks": 7,
        "num_blocks": 8,
    }
    return StepRecord(**{**values, **changes})


def test_a_window_sums_what_was_done_and_keeps_how_it_ended() -> None:
    window = [record(4), record(5, seconds=0.25, num_running=9, num_waiting=0, num_free_blocks=1)]
    assert summarise(window) == Metrics(
        last_step=5,
        steps=2,
        seconds=0.75,
        decoded_rows=6,
        prefill_tokens=20,
        output_tokens=8,
        finished=2,
        preempted=4,
        running=9,
        waiting=0,
        free_blocks=1,
        num_blocks=8,
    )


def observers(**options: Any) -> list[dict[str, Any]]:
    return [{"name": "metrics", "options": options}]


def sink(path: Path) -> dict[str, Any]:
    return {"name": "jsonl", "options": {"path": str(path)}}


def test_an_engine_writes_its_windows_to_every_sink(tmp_path: Path) -> None:
    """The lines add up to what it generated; the last, shorter window comes at the close."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    chosen = observers(every=4, sinks=[sink(file) for file in files])
    with LLM("demo", observers=chosen, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        outputs = llm.generate(["The fox", "A key", "The forest"], params, use_tqdm=False)
    texts = {file.read_text() for file in files}
    assert len(texts) == 1
    lines = [json.loads(line) for line in texts.pop().splitlines()]
    assert sum(line["output_tokens"] for line in lines) == 30
    assert sum(line["finished"] for line in lines) == 3
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    assert sum(line["prefill_tokens"] for line in lines) == prompts
    assert [line["steps"] for line in lines[:-1]] == [4] * (len(lines) - 1)
    assert 1 <= lines[-1]["steps"] <= 4
    assert lines[-1]["last_step"] == sum(line["steps"] for line in lines)
    assert all(line["seconds"] > 0 for line in lines)


def test_every_request_is_a_line_where_requests_are_asked_for(tmp_path: Path) -> None:
    """With its labels and counts, between the windows; the times are in order."""
    file = tmp_path / "a.jsonl"
    chosen = observers(every=4, requests=True, sinks=[sink(file)])
    with LLM("demo", observers=chosen, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        labels = [{"tenant": "acme"}, None, {"tenant": "é"}]
        llm.generate(["The fox", "A key", "The forest"], params, use_tqdm=False, labels=labels)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    requests = {line["request_id"]: line for line in lines if "request_id" in line}
    assert [requests[str(number)]["labels"] for number in range(3)] == [
        {"tenant": "acme"},
        {},
        {"tenant": "é"},
    ]
    assert {line["num_output_tokens"] for line in requests.values()} == {10}
    for line in requests.values():
        times = [value for name, value in line.items() if name.endswith("_time")]
        assert times == sorted(times)
        assert len(set(times)) == 4
    windows = [line for line in lines if "last_step" in line]
    assert len(requests) + len(windows) == len(lines)
    assert sum(window["finished"] for window in windows) == 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "jsnol"}, "jsnol.*jsonl"),
        ({"name": "jsonl", "options": {"pth": "x"}}, r"sinks\.1\.options\.pth.*path"),
        ({"name": "jsonl", "options": {"path": "/no/such/folder/m"}}, "cannot be opened"),
    ],
)
def test_a_sink_that_is_wrong_stops_the_start(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """By name, with what would be right; the sinks made before it are closed."""
    chosen = observers(sinks=[sink(tmp_path / "a.jsonl"), wrong])
    with pytest.raises(NanoVLLMError, match=said):
        LLM("demo", observers=chosen, **SMALL)


@pytest.mark.parametrize("options", [{"sinks": []}, {"every": 0}, {"sink": []}])
def test_options_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MetricsOptions.model_validate(options)
