"""The embedded checkpoint is small, honest about its held-out items, and right."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from nanovllm_checkpoint_demo import plugin
from nanovllm_core.api import CheckpointNotFoundError, NoOptions

TRAINING = Path(__file__).parents[1] / "training"
TASKS = ("addition", "copy", "reverse", "sort", "question", "story")


@cache
def training_module(name: str) -> ModuleType:
    """Load one of the training scripts, which are no package and no part of the wheel."""
    spec = importlib.util.spec_from_file_location(name, TRAINING / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # The scripts import one another by name; dataclasses look here.
    spec.loader.exec_module(module)
    return module


@cache
def eval_items() -> list[dict[str, Any]]:
    """Read eval.jsonl."""
    text = (plugin.FOLDER / "eval.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def tokenizer() -> Any:
    """Load the tokenizer as transformers does; its stubs are untyped."""
    return PreTrainedTokenizerFast.from_pretrained(plugin.FOLDER)


def read_json(name: str) -> dict[str, Any]:
    """Read one of the checkpoint's configs."""
    content: dict[str, Any] = json.loads((plugin.FOLDER / name).read_text(encoding="utf-8"))
    return content


def test_plugin_offers_one_checkpoint_named_like_its_entry_point() -> None:
    """The spec's impl names the function that finds the folder."""
    (spec,) = plugin.nanovllm_checkpoints()
    assert (spec.name, spec.impl) == ("demo", "nanovllm_checkpoint_demo.plugin:locate")
    assert (plugin.locate(NoOptions(), "") / "config.json").is_file()


def test_reference_is_refused() -> None:
    """`demo:something` is an error, since there is one checkpoint only."""
    with pytest.raises(CheckpointNotFoundError, match="demo:large"):
        plugin.locate(NoOptions(), "large")


def test_plugin_module_imports_no_torch() -> None:
    """Listing plugins stays cheap: the spec module pulls in neither torch nor transformers."""
    code = (
        "import sys, nanovllm_checkpoint_demo.plugin;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r};"
    assert subprocess.run([sys.executable, "-c", path + code], check=False).returncode == 0


def test_checkpoint_has_at_most_8_megabytes() -> None:
    """The whole folder, tokenizer and held-out items included, fits 8,000,000 bytes."""
    assert sum(file.stat().st_size for file in plugin.FOLDER.iterdir()) <= 8_000_000


def test_config_states_the_shapes_the_engine_relies_on() -> None:
    """Head size 64, at least two KV heads, grouped queries, tied embeddings, one rope base."""
    config = read_json("config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] == 64
    assert 2 <= config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] == 2048
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == len(tokenizer()) == 768
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]


def test_generation_config_lists_both_ends_of_sequence() -> None:
    """A reply ends with <|im_end|>, a plain text with <|endoftext|>."""
    ends = read_json("generation_config.json")["eos_token_id"]
    assert tokenizer().convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


def test_weights_are_bf16_and_have_no_output_matrix() -> None:
    """The embeddings are tied, so the file holds no lm_head."""
    with safe_open(plugin.FOLDER / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    assert dtypes == {"BF16"}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain words, 12 + 345?",
        "  spaces \n\n\ttabs \r\n",
        "emoji 😀👩‍👩‍👧‍👦 🇨🇭",
        "你好，世界。こんにちは 한국어",  # noqa: RUF001 - Chinese punctuation is meant
        "é e\u0301 ß Ω עברית العربية",
        "\x00\x01\x7f\ufffd\u2028",
    ],
)
def test_tokenizer_round_trips(text: str) -> None:
    """Decoding the ids of any UTF-8 text gives the text back."""
    assert tokenizer().decode(tokenizer().encode(text)) == text


def test_tokenizer_round_trips_random_characters() -> None:
    """The vocabulary holds every byte, so no character is unknown."""
    rng = random.Random(0)
    for _ in range(200):
        code_points = (rng.randrange(1, 0x30000) for _ in range(rng.randrange(40)))
        text = "".join(chr(c) for c in code_points if not 0xD800 <= c <= 0xDFFF)
        assert tokenizer().decode(tokenizer().encode(text)) == text


def test_every_digit_is_a_token() -> None:
    """Numbers are never merged, so that sums line up."""
    assert tokenizer().tokenize("90210") == list("90210")


def test_chat_template_renders_chatml() -> None:
    """Roles, contents and the opening of the reply are rendered exactly."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
    rendered = tokenizer().apply_chat_template(messages, tokenize=False)
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
    )
    assert rendered == expected
    prompt = tokenizer().apply_chat_template(
        messages[:2], tokenize=False, add_generation_prompt=True
    )
    assert prompt == expected.removesuffix("Hello!<|im_end|>\n")


def test_eval_has_200_different_items_of_each_task() -> None:
    """The six tasks are asked equally often and no question twice."""
    assert Counter(item["task"] for item in eval_items()) == dict.fromkeys(TASKS, 200)
    contents = [item["messages"][0]["content"] for item in eval_items()]
    assert len(set(contents)) == len(contents)


def test_eval_prompts_vary_from_short_to_over_100_tokens() -> None:
    """Prompts of several lengths exercise blocks and chunks."""
    lengths = [len(tokenizer().encode(item["messages"][0]["content"])) for item in eval_items()]
    assert min(lengths) < 10
    assert sum(length > 100 for length in lengths) >= 10


def test_eval_is_what_the_corpus_holds_out() -> None:
    """The committed items are regenerated exactly, and the rule holds out each of them."""
    made = training_module("corpus").held_out_items(2026, 200)
    assert all(item.held_out for item in made)
    assert [(item.task, item.prompt, item.answer) for item in made] == [
        (item["task"], item["messages"][0]["content"], item["answer"]) for item in eval_items()
    ]


def test_training_never_meets_a_held_out_item() -> None:
    """No training item is held out by the rule, nor asks or answers what the eval does."""
    corpus = training_module("corpus")
    rng = random.Random(1)
    asked = {item["messages"][0]["content"] for item in eval_items()}
    stories = {item["answer"] for item in eval_items() if item["task"] == "story"}
    for _ in range(5_000):
        item = corpus.train_item(rng)
        assert not item.held_out
        assert item.prompt not in asked
        prompt, reply = corpus.train_turn(rng)
        assert prompt not in asked
        assert reply not in stories


def test_commuted_sums_and_shuffled_lists_share_a_split() -> None:
    """Keys are canonical: the order in which a sum or a sort is asked cannot leak it."""
    corpus = training_module("corpus")
    rng = random.Random(2)
    for _ in range(200):
        low, high = corpus.addition(rng).key.removeprefix("addition:").split("+")
        assert int(low) <= int(high)
        item = corpus.sort(rng)
        assert item.key == f"sort:{item.answer}"


def test_committed_tokenizer_is_the_one_the_seed_gives() -> None:
    """Building the tokenizer again gives the committed vocabulary and merges."""
    training_module("corpus")
    built = training_module("build_tokenizer").build(seed=0)
    committed = read_json("tokenizer.json")
    assert json.loads(built.to_str())["model"] == committed["model"]


def test_transformers_loads_it_and_answers() -> None:
    """Ten held-out items of each task are answered exactly by transformers' Qwen3 in fp32."""
    model: Any = Qwen3ForCausalLM.from_pretrained(plugin.FOLDER, dtype="float32")
    tok = tokenizer()
    tok.padding_side = "left"
    wrong = []
    for task in TASKS:
        items = [item for item in eval_items() if item["task"] == task][:10]
        prompts = [
            tok.apply_chat_template(item["messages"], tokenize=False, add_generation_prompt=True)
            for item in items
        ]
        batch = tok(prompts, return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        out = model.generate(**batch, do_sample=False, max_new_tokens=128)
        replies = tok.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        wrong += [
            (item["answer"], reply)
            for item, reply in zip(items, replies, strict=True)
            if reply.strip() != item["answer"]
        ]
    assert wrong == []
