"""The sampling defaults of a checkpoint: what is read, what is refused, who may switch them off."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.config.sources import load_config, load_with_sources
from nanovllm_core.diagnostics.explain import Seam, explain
from nanovllm_core.errors import CheckpointError
from nanovllm_core.selection.generation_config import WITHOUT_EFFECT, read_sampling_defaults
from nanovllm_core.selection.startup import start

from .e2e.tiny import open_tiny, write_checkpoint, write_config

for plugin in ("model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

QWEN3 = {
    "bos_token_id": 1, "do_sample": True, "eos_token_id": [96], "pad_token_id": 2,
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
}  # fmt: skip


def write(folder: Path, content: object) -> Path:
    """generation_config.json."""
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("content", "defaults"),
    [
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"eos_token_id": 3}, {}),
        ({"temperature": 1, "min_p": 0.1, "repetition_penalty": 1.05, "top_k": None},
         {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 9}, {"temperature": 0.0, "top_k": 9}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True, "top_p": 0.8}, {"temperature": 1.0, "top_p": 0.8}),
        ({"max_new_tokens": 5, "max_length": 7, "presence_penalty": 1.0}, {}),
        (None, {}),
    ],
)  # fmt: skip
def test_defaults_are_read_as_transformers_means_them(
    tmp_path: Path, content: object, defaults: dict[str, float]
) -> None:
    """`do_sample: false` is greedy; what is null or absent is not stated."""
    if content is not None:
        write(tmp_path, content)
    assert read_sampling_defaults(tmp_path) == defaults


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": "0.6"}, "temperature is '0.6'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": 50.5}, "top_k is 50.5"),
        ({"top_p": 0}, "top_p is 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"do_sample": 1}, "do_sample is 1"),
        ("{", "not readable JSON"),
        ("[]", "must hold a JSON object"),
    ],
)
def test_a_malformed_value_names_the_file_before_anything_is_loaded(
    tmp_path: Path, content: object, message: str
) -> None:
    """And the setting that leaves the defaults out, where they are what is wrong."""
    folder = write(write_config(tmp_path), content)
    with pytest.raises(CheckpointError) as caught:
        start(load_config(str(folder), overrides={"device": "cpu"}))
    assert str(folder / "generation_config.json") in str(caught.value)
    assert message in str(caught.value)
    if isinstance(content, dict):
        assert "generation_config: none" in str(caught.value)
    plain = {"device": "cpu", "generation_config": "none"}
    assert start(load_config(str(folder), overrides=plain)).decisions.sampling_defaults == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 4), ("stop_strings", ["###"]), ("token_healing", True), ("dola_layers", "low")],
)
def test_a_setting_that_the_engine_has_not_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    """Neutral values, which transformers writes too, are not."""
    write(tmp_path, {**WITHOUT_EFFECT, name: value})
    with caplog.at_level(logging.WARNING):
        assert read_sampling_defaults(tmp_path) == {}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'generation_config.json'}: {name}={value!r} has no effect here"
    ]


def test_explain_says_which_defaults_hold_and_who_says_so(tmp_path: Path) -> None:
    folder = write(write_config(tmp_path), QWEN3)

    def seam(**overrides: Any) -> Seam:
        loaded = load_with_sources(str(folder), overrides={"device": "cpu", **overrides})
        return next(one for one in explain(loaded) if one.name == "sampling defaults")

    assert seam().chosen == "temperature=0.6, top_k=20, top_p=0.95"
    assert seam().why == "the checkpoint's generation_config.json"
    off = seam(generation_config="none")
    assert (off.chosen, off.why) == ("none", "generation_config, from the command line")
    write(folder, {"top_k": "x"})
    assert "top_k is 'x'" in seam().problem


def test_fields_that_a_request_does_not_state_come_from_the_checkpoint(tmp_path: Path) -> None:
    """Whoever adds it; a stated field counts, and one setting switches the defaults off."""
    folder = write(write_checkpoint(tmp_path), {"do_sample": False, "repetition_penalty": 1.7})
    prompts = [[5, 17, 3, 60], [8, 8, 8]]

    def tokens(llm: LLM, params: SamplingParams | None) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(prompts, params)]

    both = SamplingParams(temperature=0, repetition_penalty=1.7)
    neither = SamplingParams(temperature=1.0, repetition_penalty=1.0, seed=3)
    with open_tiny(folder, generation_config="none") as llm:
        assert llm.sampling_defaults == {}
        right, plain = tokens(llm, both), tokens(llm, neither)
        greedy = tokens(llm, SamplingParams(temperature=0))
        sampled = tokens(llm, SamplingParams(seed=3))
    assert right != greedy
    assert plain == sampled
    with open_tiny(folder) as llm:
        assert llm.sampling_defaults == {"temperature": 0.0, "repetition_penalty": 1.7}
        assert llm.get_default_sampling_params() == both
        assert tokens(llm, None) == tokens(llm, SamplingParams()) == tokens(llm, both) == right
        assert tokens(llm, SamplingParams(repetition_penalty=1.0)) == greedy
        assert tokens(llm, neither) == plain
        assert next(llm.stream(prompts[0])).new_token_ids == right[0][:1]
        llm.engine.add_request("own", prompts[1], SamplingParams())
        news = [output for _ in range(100) for output in llm.engine.step()]
        assert [one.new_token_ids for one in news if one.request_id == "own"] == right[1:]
