"""EngineConfig: forms, limits and descriptions."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, ValidationError

from nanovllm_core.config.choices import AttentionChoice, AttentionSettings
from nanovllm_core.config.settings import PROMPT_SIZES, EngineConfig, bucket_sizes
from nanovllm_core.config.sources import load_config


@given(st.integers(1, 2000))
def test_bucket_sizes_increase_in_steps_of_at_most_8_and_end_at_the_maximum(maximum: int) -> None:
    """Bug 5: a maximum that is no multiple of the step has a bucket of its own. 192 has none."""
    sizes = bucket_sizes(maximum)
    assert sizes[-1] == maximum
    steps = zip((0, *sizes), sizes, strict=False)
    assert all(0 < high - low <= (16 if low == 184 else 8) for low, high in steps)
    assert (192 in sizes) == (maximum == 192)
    assert set(sizes[:-1]) <= {1, 2, 4, *range(8, maximum, 8)}


def test_bucket_sizes_begin_with_1_2_4() -> None:
    assert bucket_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(1) == (1,)


def test_graph_sizes_are_the_given_ones_or_the_buckets() -> None:
    assert EngineConfig(model="m", limits={"max_num_seqs": 3}).graph_sizes == (1, 2, 3)
    given_sizes = EngineConfig(
        model="m", limits={"max_num_seqs": 6}, cuda_graphs={"sizes": [2, 6]}
    ).graph_sizes
    assert given_sizes == (2, 6)


def test_prompt_graph_sizes_are_the_given_ones_or_those_that_a_step_can_have() -> None:
    """Left out, none is beyond the token budget; an empty list means none."""

    def sizes(budget: int, given: list[int] | None = None) -> tuple[int, ...]:
        graphs: dict[str, Any] = {"prompt_sizes": given}
        limits: dict[str, Any] = {"max_num_batched_tokens": budget}
        return EngineConfig(model="m", limits=limits, cuda_graphs=graphs).prompt_graph_sizes

    assert sizes(16384) == PROMPT_SIZES
    assert sizes(1000) == (128, 256, 512, 768)
    assert sizes(1000, [64, 900]) == (64, 900)
    assert sizes(1000, []) == ()


def pair(prefill: AttentionChoice, decode: AttentionChoice) -> AttentionSettings:
    return AttentionSettings(prefill=prefill, decode=decode)


AUTO = AttentionChoice()
TRITON = AttentionChoice(backend="triton")
FLASH = AttentionChoice(backend="flash", options={"a": 1})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (None, pair(AUTO, AUTO)),
        ("auto", pair(AUTO, AUTO)),
        ("triton", pair(TRITON, TRITON)),
        ({"backend": "flash", "options": {"a": 1}}, pair(FLASH, FLASH)),
        ({"prefill": {"backend": "flash", "options": {"a": 1}}, "decode": "triton"},
         pair(FLASH, TRITON)),
        ({"decode": "triton"}, pair(AUTO, TRITON)),
    ],
)  # fmt: skip
def test_attention_takes_a_name_a_choice_or_a_pair(
    written: object, meant: AttentionSettings
) -> None:
    assert EngineConfig(model="m", attention=written).attention == meant


def test_a_scheduler_or_an_executor_takes_a_name_or_a_mapping() -> None:
    config = EngineConfig(model="m", scheduler="sjf", executor={"name": "ray", "options": {"n": 2}})
    assert (config.scheduler.name, config.scheduler.options) == ("sjf", {})
    assert (config.executor.name, config.executor.options) == ("ray", {"n": 2})


def test_a_section_that_is_there_but_empty_means_the_defaults() -> None:
    config = EngineConfig(model="m", cache=None, scheduler=None, plugins=None)
    assert config == EngineConfig(model="m")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention": {"backend": "a", "decode": "b"}}, "either backend and options"),
        ({"attention": {"options": {"a": 1}}}, "need a named plugin"),
        ({"cache": {"block_size": 24}}, "must be one of 16, 32, 64, 128, 256"),
        ({"cache": {"block_size": 512}}, "must be one of"),
        ({"cache": {"block_size": True}}, "integer"),
        ({"cache": {"num_blocks": 0}}, "greater than or equal to 1"),
        ({"cache": {"gpu_memory_utilization": 0.0}}, "greater than 0"),
        ({"cache": {"gpu_memory_utilization": 1.1}}, "less than or equal to 1"),
        ({"cache": {"gpu_memory_utilization": float("nan")}}, "less than or equal to 1"),
        ({"limits": {"max_num_seqs": 8, "max_num_batched_tokens": 7}}, r"\(7\).*\(8\)"),
        ({"limits": {"max_num_seqs": "8"}}, "integer"),
        ({"generation_config": "vllm"}, "'checkpoint' or 'none'"),
        ({"chat_template_kwargs": {"messages": 1}}, "'messages' is set by the engine itself"),
        ({"chat_template_kwargs": {"a-b": 1}}, "'a-b' cannot name a variable"),
        ({"limits": {"max_model_len": 1}}, "must be a whole number of at least 2, or fit"),
        ({"limits": {"max_model_len": "fits"}}, "must be a whole number of at least 2, or fit"),
        ({"limits": {"max_model_len": 2.5}}, "must be a whole number of at least 2, or fit"),
        (
            {"cuda_graphs": {"sizes": [2, 1]}},
            "cuda_graphs.sizes\n.* must be positive and increasing",
        ),
        (
            {"cuda_graphs": {"prompt_sizes": [0, 1]}},
            "cuda_graphs.prompt_sizes\n.* must be positive",
        ),
        (
            {"cuda_graphs": {"prompt_sizes": [64, 16385]}},
            r"prompt_sizes \[64, 16385\] must not go beyond .*max_num_batched_tokens \(16384\)",
        ),
        (
            {"cuda_graphs": {"sizes": []}},
            r"sizes \[\] must increase and end with limits.max_num_seqs",
        ),
        (
            {"cuda_graphs": {"sizes": [1, 2]}},
            r"sizes \[1, 2\] must increase and end with limits.max_num_seqs \(256\)",
        ),
        ({"device": "gpu"}, "must be auto, cpu, cuda or cuda:N"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"steps_ahead": 9}, "less than or equal to 8"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"plugins": {"options": {"x": {}}}}, "'x' is not in enable"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EngineConfig(model="m", **fields)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:13"])
def test_devices_are_named_as_torch_names_them(device: str) -> None:
    assert EngineConfig(model="m", device=device).device == device


def test_a_path_is_a_folder_and_no_plugin_s_name() -> None:
    """Text may be either. An absolute path is taken as it is."""
    config = load_config(Path("demo"), overrides={"tokenizer": Path("/tmp/words")})
    assert (config.model, config.tokenizer) == (os.path.join(".", "demo"), "/tmp/words")
    assert load_config("demo").model == "demo"


def test_options_of_an_enabled_extension_are_kept() -> None:
    config = EngineConfig(model="m", plugins={"enable": ["x"], "options": {"x": {"level": 2}}})
    assert config.plugins.options == {"x": {"level": 2}}


def test_a_configuration_is_frozen_and_crosses_process_borders() -> None:
    config = EngineConfig(model="m", attention="triton", cuda_graphs={"sizes": [1, 256]})
    with pytest.raises(ValidationError, match="frozen"):
        config.model = "other"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    found = {model}
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= sections(field.annotation)
    return found


def test_every_field_is_described_in_a_sentence() -> None:
    for section in sections(EngineConfig):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            assert field.description[0].isupper() or field.description[0] == "`", name
            assert field.description.endswith("."), f"{section.__name__}.{name}"
