"""What the suite does not know of: the published settings, old files, and tokens of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import ArchitectureError
from nanovllm_example_model_llama.model import LlamaForCausalLM, MistralForCausalLM
from nanovllm_kit.model_weights import assert_same_logits
from nanovllm_kit.reference_model import ReferenceCheckpoint, load_model, run_model

LLAMA_3_1_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
MISTRAL_7B: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
PROMPTS = [[(7 * i + start) % 131 for i in range(start)] for start in (1, 9, 16, 40, 65)]


def test_the_shape_of_llama_3_1_8b() -> None:
    """As its config.json says, in the form of transformers 4."""
    shape = LlamaForCausalLM.shape(LLAMA_3_1_8B)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (32, 32, 8)
    assert (shape.head_size, shape.max_position, shape.tied_embeddings) == (128, 131072, False)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 4096),
        ({"sliding_window": None}, None),  # Mistral 7B v0.2 and later
        ({"max_position_embeddings": 4096}, None),
        ({"layer_types": ["full_attention"] * 32}, None),
        ({"layer_types": ["sliding_attention"] * 32}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 2.0}}, 4096),
    ],
)
def test_mistral_has_the_window_of_its_settings(
    changes: dict[str, Any], window: int | None
) -> None:
    """None also where the longest context fits in the window."""
    assert MistralForCausalLM.read_config({**MISTRAL_7B, **changes}).sliding_window == window


def test_a_mistral_configuration_that_says_nothing_has_the_window_of_transformers() -> None:
    config = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    expected = transformers.MistralConfig(**config).sliding_window
    assert MistralForCausalLM.read_config(config).sliding_window == expected == 4096


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_mistral_with_layer_types_has_the_logits_of_ministral(kind: str, tmp_path: Path) -> None:
    """Which is the model that transformers makes of it."""
    settings = {**SMALL, "sliding_window": 12, "layer_types": [kind] * 2}
    reference = ReferenceCheckpoint.save(tmp_path, transformers.MinistralForCausalLM, settings)
    ids = torch.tensor(PROMPTS[3])
    logits = run_model(load_model(MistralForCausalLM, tmp_path, reference.config), ids)
    assert_same_logits(logits, reference.logits(ids))


def test_a_mistral_configuration_without_kv_heads_has_those_of_transformers() -> None:
    config = {key: value for key, value in MISTRAL_7B.items() if key != "num_key_value_heads"}
    expected = transformers.MistralConfig(**config).num_key_value_heads
    assert MistralForCausalLM.shape(config).num_kv_heads == expected == 8


@pytest.mark.parametrize("model", [LlamaForCausalLM, MistralForCausalLM])
@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["chunked_attention"] * 32},
        {"layer_types": ["sliding_attention"] * 32, "sliding_window": None},
    ],
    ids=["an unknown kind", "a window without a length"],
)
def test_layers_that_no_model_here_has_are_refused(model: Any, changes: dict[str, Any]) -> None:
    """They were computed as full attention."""
    with pytest.raises(ArchitectureError, match=r"layer_types .* only 'full_attention'"):
        model.read_config({**MISTRAL_7B, **changes})


def test_llama_has_no_window_and_mistral_no_biases() -> None:
    """As in transformers, which reads neither."""
    assert (
        LlamaForCausalLM.read_config({**LLAMA_3_1_8B, "sliding_window": 16}).sliding_window is None
    )
    config = MistralForCausalLM.read_config(
        {**MISTRAL_7B, "attention_bias": True, "mlp_bias": True}
    )
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)


def test_saved_rotary_frequencies_are_left_out(tmp_path: Path) -> None:
    """Llama 1 and 2 were saved with them; they follow from the settings."""
    reference = ReferenceCheckpoint.save(tmp_path, transformers.LlamaForCausalLM, SMALL)
    ids = torch.tensor(PROMPTS[3])
    plain = run_model(load_model(LlamaForCausalLM, tmp_path, reference.config), ids)
    saved = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(2)}
    reference.rewrite(reference.tensors() | saved)
    again = run_model(load_model(LlamaForCausalLM, tmp_path, reference.config), ids)
    assert torch.equal(plain, again)


@pytest.mark.parametrize(
    ("reference_class", "settings"),
    [
        (transformers.LlamaForCausalLM, {}),
        (transformers.LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
        (transformers.MistralForCausalLM, {"sliding_window": None}),
        (transformers.MistralForCausalLM, {"sliding_window": 12}),
    ],
    ids=["Llama", "Llama with biases", "Mistral", "Mistral with a window"],
)
def test_an_engine_writes_the_tokens_of_transformers(
    reference_class: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Greedy, prompts of different lengths in one batch, prefill in chunks, blocks of 16."""
    reference = ReferenceCheckpoint.save(tmp_path, reference_class, {**SMALL, **settings})
    with LLM(
        str(tmp_path),
        device="cpu",
        dtype="float32",
        attention="sdpa",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        num_kvcache_blocks=64,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    reference.model.generation_config.eos_token_id = None
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        everything = torch.ones_like(prompt)  # without a mask, ids like the padding's are hidden
        written = reference.model.generate(
            prompt, attention_mask=everything, do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert output.token_ids == written[0, prompt.shape[1] :].tolist()
