"""The tiny checkpoints of examples/: transformers loads them, and the engine writes its tokens."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import FetchingKernels
from nanovllm_core.cli.main import make_app
from nanovllm_core.kernels import TorchKernels
from nanovllm_kit.reference_model import load_model, run_model

for plugin in ("checkpoint_demo", "attention_sdpa", "model_qwen3_moe"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/tiny_checkpoints.py"
PLUGINS = {"moe": "nanovllm_model_qwen3_moe", "mla": "nanovllm_model_deepseek"}
PROMPTS = ["Once upon a time there was", "Reverse: 7 42 19 3", "A story of a fox. " * 12]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with each of them."""
    write = runpy.run_path(str(SCRIPT))["write"]
    folders = {name: tmp_path_factory.mktemp(name) for name in PLUGINS}
    for name, folder in folders.items():
        write(name, folder)
    return folders


class ToldSet(TorchKernels, FetchingKernels):
    """Notes the stacks that it is told of, with the weight behind each, and those that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, Tensor] = {}
        self.run: list[int] = []

    def announce_weight(self, gate_up_N2FE: Tensor, weight_XE: Tensor) -> None:
        self.told[gate_up_N2FE.data_ptr()] = weight_XE

    def experts(
        self, x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor, *others: Any
    ) -> Tensor:
        self.run.append(gate_up_N2FE.data_ptr())
        return super().experts(x_TE, weights_TC, ids_TC, gate_up_N2FE, *others)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_loaded_model_runs_the_stacks_that_were_announced(
    name: str, written: dict[str, Path]
) -> None:
    """Sets know them by their addresses, and are told before the weights are loaded."""
    kernels, folder = ToldSet(), written[name]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    module = importlib.import_module(f"{PLUGINS[name]}.model")
    model = load_model(getattr(module, config["architectures"][0]), folder, config, kernels=kernels)
    run_model(model, torch.arange(3))
    assert kernels.run
    assert [*kernels.told] == kernels.run[:-1], "behind the last layer comes no other"
    assert all(weight.isfinite().all() for weight in kernels.told.values()), "they were loaded"


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy_tokens(folder: Path) -> list[list[int]]:
    """What transformers writes behind each prompt, without a cache."""
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        start = len(ids)
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[start:])
    return answers


def write_greedily(folder: Path, **settings: Any) -> list[list[int]]:
    """What the engine writes, twice: the second time behind prefixes that are in the cache."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    limits = {"max_model_len": 256, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    with LLM(
        str(folder), dtype="float32", device="cpu", attention="sdpa", limits=limits, **settings
    ) as llm:
        first, second = (llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2))
    assert second[-1].num_cached_tokens, "the longest prompt fills a block"
    assert [one.token_ids for one in second] == [one.token_ids for one in first]
    return [output.token_ids for output in first]


@pytest.mark.parametrize("name", PLUGINS)
def test_a_tiny_checkpoint_is_small_and_always_the_same(
    name: str, written: dict[str, Path], tmp_path: Path
) -> None:
    """Every file of it, so that results of two machines can be compared."""
    runpy.run_path(str(SCRIPT))["write"](name, tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert files == {file.name: file.read_bytes() for file in written[name].iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert sum(map(len, files.values())) < 700_000


@pytest.mark.parametrize("name", PLUGINS)
def test_transformers_finds_every_weight_of_a_tiny_checkpoint(
    name: str, written: dict[str, Path]
) -> None:
    """None is missing, unknown or of another shape, and the tokens of answers differ."""
    _, info = AutoModelForCausalLM.from_pretrained(written[name], output_loading_info=True)
    assert not any(info.values()), info
    answers = greedy_tokens(written[name])
    assert len({token for answer in answers for token in answer}) > NEW_TOKENS


@pytest.mark.parametrize("name", PLUGINS)
def test_the_engine_writes_what_transformers_writes_from_a_tiny_checkpoint(
    name: str, written: dict[str, Path]
) -> None:
    """With prompts in chunks, and again with their prefixes in the cache."""
    pytest.importorskip(PLUGINS[name], reason="needs the model's plugin")
    assert write_greedily(written[name]) == greedy_tokens(written[name])


@pytest.mark.parametrize("name", PLUGINS)
def test_the_commands_that_the_script_names_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its first lines have them, with a folder in the place of FOLDER."""
    monkeypatch.setenv("NANOVLLM_DEVICE", "cpu")
    monkeypatch.setenv("NANOVLLM_ATTENTION__BACKEND", "sdpa")
    monkeypatch.setenv("NANOVLLM_CACHE__NUM_BLOCKS", "64")
    text = runpy.run_path(str(SCRIPT))["__doc__"].replace("FOLDER", str(tmp_path))
    commands = [shlex.split(line, comments=True) for line in re.findall(r"(?m)^ {4}(\w+ .*)", text)]
    [script] = [words[1:] for words in commands if words[0] == "python" and words[2] == name]
    [generate] = [words[1:] for words in commands if words[0] == "nanovllm"]
    monkeypatch.setattr("sys.argv", script)
    runpy.run_path(str(ROOT / script[0]), run_name="__main__")
    [architecture] = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert f": {architecture}, " in capsys.readouterr().out
    if importlib.util.find_spec(PLUGINS[name]):
        result = CliRunner().invoke(make_app(), [*generate, "--max-tokens", "4"])
        assert result.exit_code == 0, result.output
        assert result.output.startswith("Once upon a time")
