"""The example plugins from outside: only public imports, wheels, YAML, text, their suites."""

from __future__ import annotations

import ast
import json
import os
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..environments import make_environment
from ..test_packaging import ROOT, run

FOLDERS = sorted(file.parent for file in ROOT.glob("examples/plugins/*/pyproject.toml"))
PROJECTS = {
    folder: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS
}
by_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def test_the_examples_are_these() -> None:
    assert [folder.name for folder in FOLDERS] == [
        "constraint_choices",
        "executor_process",
        "logits_banned_words",
        "metrics_sink",
        "model_gemma",
        "model_llama",
        "model_qwen2",
        "more_kinds",
        "routes_admin",
        "scheduler_fair_share",
        "scheduler_priority",
    ]


def imported(file: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever it stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield str(node.module)


@by_folder
def test_an_example_is_a_complete_distribution(folder: Path) -> None:
    """As a third party would publish it: one stem, a licence, types, a page, a suite."""
    project = PROJECTS[folder]
    package = folder / f"nanovllm_example_{folder.name}"
    assert project["name"] == f"nanovllm-example-{folder.name.replace('_', '-')}"
    assert (package / "__init__.py").exists()
    assert (package / "py.typed").exists()
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / "tests" / "test_conformance.py").exists()
    assert "nanovllm-core>=0.1,<0.2" in project["dependencies"]
    page = (folder / "README.md").read_text()
    for part in (project["name"], "pip install -e", "```yaml", "The code, in the order to read it"):
        assert part in page
    for group, names in project["entry-points"].items():
        assert group.startswith("nanovllm.")
        assert set(names.values()) == {f"{package.name}.plugin"}


@by_folder
def test_an_example_imports_of_nanovllm_only_what_is_public(folder: Path) -> None:
    """Its code imports the public doors; its tests also the names of a program, LLM and such."""
    doors = {f"nanovllm_core.{door}" for door in ("api", "kernels", "layers", "worker")}
    for file in folder.rglob("*.py"):
        allowed = doors | ({"nanovllm_core"} if "tests" in file.parts else set())
        for module in imported(file):
            if module.split(".")[0] == "nanovllm_core":
                assert module in allowed, f"{file} imports {module}"


def test_an_executor_of_another_process_is_as_short_as_is_said() -> None:
    """docs/write/executor.md says 165 lines; the engine's side has under 120 of them."""
    package = ROOT / "examples/plugins/executor_process/nanovllm_example_executor_process"
    engine, worker = (
        len((package / name).read_text().splitlines()) for name in ("executor.py", "process.py")
    )
    assert engine < 120
    assert engine + worker <= 165


def test_nothing_in_the_core_or_its_plugins_names_an_example() -> None:
    """Tests may, and what writes them: a new model is compared with transformers' Llama."""
    names = ["nanovllm_example", "nanovllm-example", "LlamaForCausalLM", "Qwen2ForCausalLM"]
    names += ["Gemma2ForCausalLM", "Gemma3ForCausalLM"]
    for folder in ("nanovllm_core", "plugins"):
        for file in (ROOT / folder).rglob("*.py"):
            if not {"tests", "kit"} & set(file.parts):
                text = file.read_text()
                assert not [name for name in names if name in text], file


# ------------------------------------------------------------------------------ wheels

GENERATE = """
import json, sys
from nanovllm_core import LLM, SamplingParams
with LLM(config_file=sys.argv[1]) as llm:
    prompts = ["Write a story about a fox named Mia.", "What is 27 + 15?"] * 2
    if sys.argv[2] == "chat":
        prompts = [
            llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
            for text in prompts
        ]
    asks = {"logits_processors": {"banned_words": {}}} if sys.argv[2] == "chat" else {}
    params = [
        SamplingParams(temperature=0, max_tokens=24, priority=i, **(asks if i < 2 else {}))
        for i in range(4)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print(json.dumps({
        "scheduler": llm.config.scheduler.name,
        "texts": [output.text for output in outputs],
        "prompts": [output.prompt_token_ids for output in outputs],
        "ids": [output.token_ids for output in outputs],
    }))
"""

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Gemma3ForCausalLM": {"head_dim": 16, "sliding_window": 16, "sliding_window_pattern": 2},
}
"""An architecture of each distribution -> what is special in its tiny checkpoint."""

TESTED = [
    ("model", "LlamaForCausalLM", "--only", "logits or setting"),
    ("scheduler", "priority", "--option", "patience=16", "--only", "length or labels or aborted"),
    ("logits_processor", "banned_words"),
    ("constraint", "choices", "--argument", "texts=[yes, no]"),
    ("observer", "metrics"),
    ("metrics_sink", "jsonl"),
    ("kind", "metrics_sink"),
    ("executor", "timed", "--option", f"path={os.devnull}", "--only", "order or offers"),
    ("sampler", "inverse_cdf"),
    ("kernels", "float64", "--only", "products or norm"),
    ("extension", "steps"),
    ("route", "admin", "--option", f"key_sha256='{'0' * 64}'"),
    ("kind", "route"),
]
"""A plugin of every kind, with what its suite is given. Of long suites some checks run here, all
in `examples/plugins`."""


def save_tiny(folder: Path, architecture: str) -> Any:
    """A random checkpoint with the demo's tokenizer; the transformers model that it was made of."""
    import torch
    import transformers

    from nanovllm_checkpoint_demo.plugin import FOLDER

    torch.manual_seed(0)
    demo = FOLDER
    model_class = getattr(transformers, architecture)
    settings = {
        "vocab_size": json.loads((demo / "config.json").read_text())["vocab_size"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        **MODELS[architecture],
    }
    model = model_class(model_class.config_class(**settings)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    return model


def expected_ids(model: Any, prompt: list[int]) -> list[int]:
    """transformers' 24 greedy ids after a prompt."""
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
        )
    answer: list[int] = written[0, len(prompt) :].tolist()
    return answer


def install(folder: Path, wheels: Iterable[Path]) -> Path:
    """A fresh environment with the core, its plugins and the examples, from wheels alone."""
    python = make_environment(folder / "env")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", *wheels)
    return python.parent


def generate(bin_: Path, file: Path, how: str) -> Any:
    printed = run(bin_ / "python", "-c", GENERATE, file, how)
    return json.loads(printed.strip().splitlines()[-1])


def write(file: Path, **settings: Any) -> Path:
    limits = {"max_num_seqs": 2, "max_model_len": 128}
    common = {"device": "cpu", "attention": "sdpa", "limits": limits, "cache": {"num_blocks": 64}}
    file.write_text(yaml.safe_dump(common | settings))
    return file


def check_parts(bin_: Path, folder: Path) -> None:
    """Executor, scheduler, logits processor, observer and sink at once, on the embedded model."""
    metrics = folder / "metrics.jsonl"
    sink = {"name": "jsonl", "options": {"path": str(metrics)}}
    file = write(
        folder / "parts.yaml",
        model="demo",
        executor="process",
        scheduler={"name": "priority", "options": {"patience": 50}},
        logits_processors=[{"name": "banned_words", "options": {"words": ["fox"]}}],
        observers=[{"name": "metrics", "options": {"every": 5, "sinks": [sink]}}],
    )
    said = generate(bin_, file, "chat")
    assert said["scheduler"] == "priority"
    kept, _, story, sum_ = said["texts"]
    assert "fox" not in kept
    assert "fox" in story
    assert sum_ == "42"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert sum(line["finished"] for line in lines) == 4
    assert sum(line["output_tokens"] for line in lines) == sum(map(len, said["ids"]))


def check_model(bin_: Path, folder: Path, architecture: str) -> None:
    """A checkpoint's architecture chooses the plugin, and it writes what transformers writes."""
    model = save_tiny(folder / architecture, architecture)
    checkpoint = str(folder / architecture)
    file = write(folder / "model.yaml", model=checkpoint, dtype="float32")
    said = generate(bin_, file, "plain")
    assert all(said["texts"])
    for prompt, ids in zip(said["prompts"], said["ids"], strict=True):
        assert ids == expected_ids(model, prompt), architecture


@pytest.mark.slow
@pytest.mark.long
def test_examples_from_wheels_are_chosen_in_yaml_generate_and_keep_their_contracts(
    tmp_path: Path, wheels: dict[str, Path]
) -> None:
    """As a stranger would use them; the declared kind's plugins are tested by its own suite."""
    bin_ = install(tmp_path, wheels.values())
    check_parts(bin_, tmp_path)
    for architecture in MODELS:
        check_model(bin_, tmp_path, architecture)
    for kind, name, *more in TESTED:
        printed = run(bin_ / "nanovllm", "plugins", "test", name, "--kind", kind, *more)
        assert f"{name} keeps the contract of {kind} plugins here" in printed
        assert "FAILED" not in printed
