"""DeepSeek-V3's own files: weights in float8 with scales, and layers that predict further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nanovllm_core.api import ArchitectureError, WeightsError
from nanovllm_kit.model_settings import LLAMA_LIKE
from nanovllm_kit.reference_model import ReferenceCheckpoint, load_model
from nanovllm_model_deepseek.model import DeepseekV3ForCausalLM
from nanovllm_model_deepseek.plugin import DEEPSEEK_V3

BLOCK = (16, 24)
"""Divides hardly any size of the model."""
QUANTIZED = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }
}


@pytest.fixture
def reference(tmp_path: Path) -> ReferenceCheckpoint:
    settings = {**LLAMA_LIKE, **DEEPSEEK_V3.test_config}
    return ReferenceCheckpoint.save(tmp_path, transformers.DeepseekV3ForCausalLM, settings)


def in_float8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in float8, the scale of each block, and the matrix that these mean."""
    rows, columns = BLOCK
    stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    meant = torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i, part in enumerate(weight.split(rows)):
        for j, block in enumerate(part.split(columns, dim=1)):
            scales[i, j] = scale = block.abs().max() / 448
            here = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            stored[here] = (block / scale).to(torch.float8_e4m3fn)
            meant[here] = stored[here].float() * scale
    return stored, scales, meant


def quantize(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The checkpoint as DeepSeek publishes it, and the weights that it means."""
    published, meant = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "_proj" in name:
            stored, scales, meant[name] = in_float8(weight)
            published |= {name: stored, f"{name}_scale_inv": scales}
    return published, meant


def weights_of(reference: ReferenceCheckpoint, config: dict[str, Any]) -> dict[str, Tensor]:
    model = load_model(DeepseekV3ForCausalLM, reference.folder, config)
    return dict(model.named_parameters())


def test_float8_weights_are_multiplied_by_the_scales_of_their_blocks(
    reference: ReferenceCheckpoint,
) -> None:
    """In every matrix of attention, of MLPs and of experts, in one file or in several."""
    published, meant = quantize(reference.tensors())
    config = {**reference.config, **QUANTIZED}
    reference.rewrite(meant)
    expected = weights_of(reference, reference.config)
    reference.rewrite(published)
    reference.split(3)
    actual = weights_of(reference, config)
    assert expected.keys() == actual.keys()
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name


def test_a_scale_that_is_missing_or_of_another_shape_is_named(
    reference: ReferenceCheckpoint,
) -> None:
    """And float8 is refused where config.json does not speak of it."""
    published, _ = quantize(reference.tensors())
    config = {**reference.config, **QUANTIZED}
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    scales = published.pop(name)
    reference.rewrite(published)
    with pytest.raises(WeightsError, match=f"1 missing: {name}"):
        weights_of(reference, config)
    reference.rewrite(published | {name: scales[1:].contiguous()})
    with pytest.raises(WeightsError, match=f"wrong shape: {name}"):
        weights_of(reference, config)
    reference.rewrite(published | {name: scales})
    with pytest.raises(WeightsError, match="quantised checkpoints are not"):
        weights_of(reference, reference.config)


@pytest.mark.parametrize(
    "changes",
    [{"weight_block_size": None}, {"weight_block_size": [128]}, {"fmt": "e5m2"}],
    ids=str,
)
def test_other_kinds_of_float8_are_refused(
    reference: ReferenceCheckpoint, changes: dict[str, Any]
) -> None:
    """By `shape()`, before a file is opened."""
    quantization = {**QUANTIZED["quantization_config"], **changes}
    with pytest.raises(ArchitectureError, match="fp8"):
        DeepseekV3ForCausalLM.shape({**reference.config, "quantization_config": quantization})


def test_experts_of_no_number_that_the_checkpoint_holds_are_left_out(
    reference: ReferenceCheckpoint,
) -> None:
    """transformers saves the weights of 0 shared experts, without an element."""
    config = {**reference.config, "n_shared_experts": 0}
    kept = {name: x for name, x in reference.tensors().items() if "shared_experts" not in name}
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    reference.rewrite(kept | {name: torch.zeros(0, config["hidden_size"])})
    weights = weights_of(reference, config)
    assert not any("shared" in name for name in weights)
    reference.rewrite(kept | {name: torch.zeros(1, config["hidden_size"])})
    with pytest.raises(WeightsError, match=r"unexpected: .*shared_experts"):
        weights_of(reference, config)


def test_stacks_of_experts_are_loaded_as_transformers_saves_them(
    reference: ReferenceCheckpoint,
) -> None:
    """With save_original_format=False; shared experts, which lie behind the others, stay as is."""
    expected = weights_of(reference, reference.config)
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(reference.folder)
    model.save_pretrained(reference.folder, save_original_format=False)
    assert "model.layers.4.mlp.experts.gate_up_proj" in reference.tensors()
    actual = weights_of(reference, reference.config)
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_layers_behind_the_last_are_left_out(reference: ReferenceCheckpoint) -> None:
    """As many as num_nextn_predict_layers says; one more is an error, as any unknown weight."""
    expected = weights_of(reference, reference.config)
    last = reference.config["num_hidden_layers"]
    further = {f"model.layers.{last}.eh_proj.weight": torch.zeros(2, 2)}
    further |= {f"model.layers.{last}.shared_head.norm.weight": torch.zeros(2)}
    own = reference.tensors()
    reference.rewrite(own | further)
    for config in (reference.config, {**reference.config, "num_nextn_predict_layers": 2}):
        actual = weights_of(reference, config)
        assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
    with pytest.raises(WeightsError, match=rf"unexpected: model\.layers\.{last}\.eh_proj"):
        weights_of(reference, {**reference.config, "num_nextn_predict_layers": 0})
