"""What the suite does not know of: published settings, windows, and the tokens of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import ArchitectureError
from nanovllm_example_model_qwen2.model import Qwen2ForCausalLM
from nanovllm_kit.reference_model import ReferenceCheckpoint

QWEN2_5_0_5B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
}
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PROMPTS = [[(7 * i + start) % 131 for i in range(start)] for start in (1, 9, 16, 40, 65)]


def test_the_shape_of_qwen2_5_0_5b() -> None:
    """As its config.json says."""
    shape = Qwen2ForCausalLM.shape(QWEN2_5_0_5B)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (24, 14, 2)
    assert (shape.head_size, shape.max_position, shape.tied_embeddings) == (64, 32768, True)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 100}, None),  # max_window_layers is 28, and there are 24
        ({"sliding_window": 100, "max_window_layers": 0}, 100),
        ({"sliding_window": 32768, "max_window_layers": 0}, None),  # the whole context
        ({"sliding_window": 100, "layer_types": ["sliding_attention"] * 24}, 100),
        ({"sliding_window": 100, "layer_types": ["full_attention"] * 24}, None),
    ],
)
def test_one_window_for_all_layers_or_none(changes: dict[str, Any], window: int | None) -> None:
    """As transformers distributes it over the layers."""
    base = {key: value for key, value in QWEN2_5_0_5B.items() if "window" not in key}
    config = {**base, "use_sliding_window": True, **changes}
    assert Qwen2ForCausalLM.read_config(config).sliding_window == window
    theirs = transformers.Qwen2Config(**config)
    assert len(set(theirs.layer_types)) == 1
    slides = "sliding_attention" in theirs.layer_types and theirs.sliding_window < 32768
    assert slides is (window is not None)


def test_a_configuration_without_kv_heads_has_those_of_transformers() -> None:
    """32, whatever the number of heads; null means one for each."""
    config = {k: v for k, v in QWEN2_5_0_5B.items() if k != "num_key_value_heads"}
    for changes in ({"num_attention_heads": 64}, {"num_key_value_heads": None}):
        theirs = transformers.Qwen2Config(**{**config, **changes})
        ours = Qwen2ForCausalLM.shape({**config, **changes})
        assert ours.num_kv_heads == theirs.num_key_value_heads


def test_layers_that_slide_without_a_window_are_refused() -> None:
    """layer_types and use_sliding_window contradict each other."""
    config = {**QWEN2_5_0_5B, "layer_types": ["sliding_attention"] * 24}
    with pytest.raises(ArchitectureError, match="sliding_window None"):
        Qwen2ForCausalLM.read_config(config)


def test_a_switch_of_windows_that_is_a_text_is_refused() -> None:
    """The text "false" would count as true, and hide all but the last tokens."""
    config = {**QWEN2_5_0_5B, "use_sliding_window": "false", "max_window_layers": 0}
    with pytest.raises(ArchitectureError, match="use_sliding_window must be true or false, not"):
        Qwen2ForCausalLM.read_config(config)


def test_layers_of_an_unknown_kind_are_refused_beside_a_window_that_hides_nothing() -> None:
    """Such a window makes only full and sliding layers alike."""
    config = {**QWEN2_5_0_5B, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 24}
    with pytest.raises(ArchitectureError, match="chunked_attention"):
        Qwen2ForCausalLM.read_config(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0},
    ],
    ids=["tied", "a window"],
)
def test_an_engine_writes_the_tokens_of_transformers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Greedy, prompts of different lengths in one batch, prefill in chunks, blocks of 16."""
    reference_class = transformers.Qwen2ForCausalLM
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
