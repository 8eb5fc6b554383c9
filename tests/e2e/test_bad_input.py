"""What cannot work is refused at the start, by a typed error with value, limit and remedy."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.cli import main as cli
from nanovllm_core.errors import (
    ArchitectureError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DeviceError,
    ExecutorError,
    NanoVLLMError,
    OutOfMemoryError,
    PluginNotFoundError,
    RequestTooLongError,
    UnsupportedError,
    WeightsError,
)

from .tiny import open_tiny, random_weights, write_checkpoint, write_config

Weights = dict[str, Tensor]


def changed_weights(change: Callable[[Weights], object]) -> Callable[[Path], Path]:
    """Writes a checkpoint whose weights went through `change`."""

    def write(folder: Path) -> Path:
        weights = random_weights()
        change(weights)
        save_file(weights, write_config(folder) / "model.safetensors")
        return folder

    return write


def truncated(folder: Path) -> Path:
    file = write_checkpoint(folder) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return folder


def broken_json(folder: Path) -> Path:
    (write_checkpoint(folder) / "config.json").write_text("{")
    return folder


def changed_config(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: write_checkpoint(folder, **changes)


NORM = "model.norm.weight"
GENERATE = ["generate", "hi", "--model", "demo"]

BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], type[NanoVLLMError], str]] = {
    "unknown architecture": (
        changed_config(architectures=["GptForCausalLM"]),
        ArchitectureError,
        r"no installed plugin runs .*'GptForCausalLM'; install one .* installed: .*Qwen3",
    ),
    "no architecture": (
        changed_config(architectures=None),
        ArchitectureError,
        r'architectures=None names no architecture; expected a list such as \["Qwen3ForCausalLM"\]',
    ),
    "heads that do not divide": (
        changed_config(num_key_value_heads=3),
        ArchitectureError,
        r"num_attention_heads \(4\) must be divisible by num_key_value_heads \(3\)",
    ),
    "rotation that would change under cached keys": (
        changed_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ArchitectureError,
        r"'dynamic' is not supported, only default, linear, yarn, llama3",
    ),
    "a setting of another type": (
        changed_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": "x"}),
        ArchitectureError,
        r"config\.json, linear rope: factor must be a positive number, not 'x'; check",
    ),
    "settings that are no mapping": (
        changed_config(rope_parameters="linear"),
        ArchitectureError,
        r"config\.json: rope_parameters must be a mapping of settings, not 'linear'; check the",
    ),
    "a setting that no code expects": (
        changed_config(rms_norm_eps=10**400),
        ArchitectureError,
        r"config\.json cannot be read by model 'Qwen3ForCausalLM' \(nanovllm-.*; correct",
    ),
    "config.json that is not JSON": (
        broken_json,
        CheckpointNotFoundError,
        r"config\.json is not readable JSON: Expecting property name",
    ),
    "no weights": (
        write_config,
        WeightsError,
        r"holds no \*\.safetensors; download the weights, .* or choose load_format: dummy",
    ),
    "a missing weight": (
        changed_weights(lambda weights: weights.pop(NORM)),
        WeightsError,
        r"1 missing: model\.norm\.weight\. Check that config\.json belongs",
    ),
    "an unexpected weight": (
        changed_weights(lambda weights: weights.update({"model.extra": torch.zeros(3)})),
        WeightsError,
        r"1 unexpected: model\.extra \(in model\.safetensors\)\. Check",
    ),
    "a weight of another shape": (
        changed_weights(lambda weights: weights.update({NORM: torch.zeros(3)})),
        WeightsError,
        r"1 of the wrong shape: .*: \[3\], the model's config\.json wants \[48\]\)\. Check",
    ),
    "a weight of a dtype that is no number format": (
        changed_weights(lambda weights: weights.update({NORM: torch.zeros(48).int()})),
        WeightsError,
        r"1 of a dtype that is not supported .*: I32\)\. Check",
    ),
    "a weight that is not a number": (
        changed_weights(lambda weights: weights[NORM][7].fill_(float("nan"))),
        WeightsError,
        r"1 of the \d+ weights .* NaN or infinite in torch\.float32: model\.norm\.weight; download",
    ),
    "a weight that is infinite": (
        changed_weights(lambda weights: weights[NORM][7:9].copy_(torch.tensor([1.0, -1.0]) / 0)),
        WeightsError,
        r"1 of the \d+ weights .* NaN or infinite in torch\.float32: model\.norm\.weight; download",
    ),
    "truncated weights": (
        truncated,
        WeightsError,
        r"model\.safetensors \(\d+ bytes\) is truncated or damaged .*; download it again",
    ),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_refused(case: str, tmp_path: Path) -> None:
    """By what is wrong with it, and with what to do."""
    write, error, message = BAD_CHECKPOINTS[case]
    with pytest.raises(error, match=message):
        open_tiny(write(tmp_path))


BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[NanoVLLMError], str]] = {
    "a dtype that does not exist": (
        {"dtype": "float64"},
        ConfigError,
        "dtype: 'float64' must be 'auto', 'float32', 'float16' or 'bfloat16'",
    ),
    "a device that does not exist": (
        {"device": "tpu"},
        ConfigError,
        r"device: 'tpu' must be auto, cpu, cuda or cuda:N",
    ),
    "too little memory for one sequence": (
        {"cache": {"num_blocks": 19}},
        OutOfMemoryError,
        r"holds 19 blocks of 16 tokens \(a sequence of 304 tokens\), but "
        r"limits\.max_model_len=320 needs 20; set limits\.max_model_len to at most 304",
    ),
    "a length beyond the model's": (
        {"max_model_len": 513},
        ConfigError,
        r"limits\.max_model_len: 513 is beyond the 512 positions .*; use at most 512",
    ),
    "a length that holds no output": (
        {"max_model_len": 1},
        ConfigError,
        r"limits\.max_model_len: 1 .*at least 2",
    ),
    "a budget below the number of sequences": (
        {"max_num_batched_tokens": 4},
        ConfigError,
        r"max_num_batched_tokens \(4\) must be at least max_num_seqs \(8\).*raise the first or",
    ),
    "two GPUs without an executor for them": (
        {"tensor_parallel_size": 2, "executor": "single"},
        ExecutorError,
        "tensor_parallel_size: 2, but the executor 'single' runs at most 1; set",
    ),
    "an unknown scheduler": (
        {"scheduler": "fcsf"},
        PluginNotFoundError,
        r"no scheduler 'fcsf' is installed; did you mean fcfs\?",
    ),
    "an unknown executor": ({"executor": "ray"}, PluginNotFoundError, "installed: .*single"),
    "an unknown attention backend": (
        {"attention": "sdap"},
        PluginNotFoundError,
        r"no attention 'sdap' is installed; did you mean sdpa\?",
    ),
    "an attention backend that cannot serve": (
        {"attention": {"backend": "sdpa", "options": {"kernel": "cudnn"}}},
        UnsupportedError,
        r"'sdpa' .* cannot serve prefill .*: kernel 'cudnn' exists only on cuda, .*; use kernel:",
    ),
    "a block size that does not exist": (
        {"cache": {"block_size": 24}},
        ConfigError,
        r"cache\.block_size: 24 must be one of 16, 32, 64, 128, 256",
    ),
    "graph sizes that do not end at the maximum": (
        {"cuda_graphs": {"sizes": (1, 4)}},
        ConfigError,
        r"sizes \[1, 4\] must increase and end with limits\.max_num_seqs \(8\)",
    ),
    "an unknown key": (
        {"max_num_sequences": 3},
        ConfigError,
        r"max_num_sequences: unknown key \(value 3\); did you mean limits\.max_num_seqs\?",
    ),
    "a tokenizer that is not there": (
        {"tokenizer": "no-such-folder"},
        CheckpointError,
        "'no-such-folder' is not a folder; set `tokenizer` to a folder with a tokenizer.json",
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_refused_before_weights_are_read(case: str, tmp_path: Path) -> None:
    """The checkpoint here has no weights, so whoever looks for them first gives another error."""
    changes, error, message = BAD_SETTINGS[case]
    with pytest.raises(error, match=message):
        open_tiny(write_config(tmp_path), **changes)


def test_a_model_larger_than_the_memory_names_the_bytes_and_what_helps(tmp_path: Path) -> None:
    """Torch has another error for it on a CPU, in the midst of the plugin's code."""
    folder = write_config(tmp_path, vocab_size=10**12)
    with pytest.raises(OutOfMemoryError, match=r"cpu for the model: .* \d+ bytes.*; .*smaller"):
        open_tiny(folder, load_format="dummy")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_an_error_not_a_slow_cpu(device: str, tiny: Path) -> None:
    with pytest.raises(DeviceError, match=rf"device: '{device}', but torch .*; use device: cpu"):
        open_tiny(tiny, device=device)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no-such-model", r"is no folder and no checkpoint plugin; give a path, a hub id"),
        ("./no/such/folder", r"the folder './no/such/folder' does not exist; give the folder"),
    ],
)
def test_a_model_that_is_nowhere_is_named(model: str, message: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=message):
        open_tiny(model)


def test_unreadable_yaml_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: demo\nlimits: [unclosed\n")
    with pytest.raises(ConfigError, match=rf"{re.escape(str(file))}, line 3.*not valid YAML"):
        LLM(config_file=str(file))


def test_a_request_that_the_cache_can_never_hold_is_refused_when_it_is_added(tiny: Path) -> None:
    """The cache holds the longest sequence, so what does not fit is beyond the length."""
    with open_tiny(tiny, max_model_len=48, cache={"num_blocks": 3}) as llm:
        with pytest.raises(RequestTooLongError, match="40 prompt tokens and max_tokens=9 make 49"):
            llm.generate([[1] * 40], SamplingParams(max_tokens=9))
        assert len(llm.generate([[1] * 40], SamplingParams(max_tokens=8))[0].token_ids) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "--model", "no-such-model"], "is no folder and no checkpoint plugin"),
        (["generate", "hi", "--model", "demo", "--scheduler", "fcsf"], "did you mean fcfs?"),
        (
            ["generate", "hi", "--model", "demo", "--set", "cache.block_size=24"],
            "must be one of 16",
        ),
        (
            [*GENERATE, "--set", "executor=single", "--set", "tensor_parallel_size=2"],
            "at most 1",
        ),
        (["generate", "hi"], "model: missing"),
        (["generate", "", "--model", "demo", "--device", "cpu"], "prompt is empty"),
        (["bench", "throughput", "--attention", "sdap", "--model", "demo"], "did you mean sdpa?"),
        (["eval", "--model", "demo", "--set", "limits.max_model_len=9999"], "use at most 2048"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_ends_with_one_message_and_status_1(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback: `sys.exit` with a text prints it and makes the status 1."""
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")
    monkeypatch.setattr(sys, "argv", ["nanovllm", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert str(caught.value.code).startswith("error: ")
    assert message in str(caught.value.code)
