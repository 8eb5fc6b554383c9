"""What docs/write/model.md shows besides its first plugin is right, as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nanovllm_core.api import QKPrep
from nanovllm_core.interfaces.specs import ModelSpec, NoOptions
from nanovllm_core.worker.weights import load_weights
from nanovllm_kit import ModelConformance, PluginUnderTest
from nanovllm_kit.layers import layer_context

from .gpt_neox import InterleavedQKVLinear
from .test_docs_code import files

PAGE = Path(__file__).parents[1] / "docs/write/model.md"


def shown(file: str, name: str) -> Any:
    """A class of one of the page's files."""
    namespace: dict[str, Any] = {"__name__": file}
    exec(compile(files(PAGE)[file], str(PAGE), "exec"), namespace)
    return namespace[name]


Phi3ForCausalLM = shown("my_model/phi3.py", "Phi3ForCausalLM")


class TestPhi3(ModelConformance):
    """The page's Phi-3, whose checkpoints hold q, k and v in one tensor, against transformers."""

    variants = {"a window": {"sliding_window": 5}, "tied": {"tie_word_embeddings": True}}  # noqa: RUF012

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        impl = f"{__name__}:Phi3ForCausalLM"
        spec = ModelSpec(name="Phi3ForCausalLM", impl=impl, summary="Phi-3", contract=2)
        return PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")


class Normed(nn.Module):
    """A model of nothing but the page's norm."""

    packed_modules: dict[str, Any] = {}  # noqa: RUF012
    ignored_weights = ()

    def __init__(self) -> None:
        super().__init__()
        self.norm = shown("my_model/layers.py", "LayerNorm")(layer_context(), 8, 1e-2)


def test_the_page_s_layer_norm_is_loaded_and_computes_what_torch_does(tmp_path: Path) -> None:
    """With every weight from the checkpoint, the bias too."""
    theirs = nn.LayerNorm(8, eps=1e-2)
    tensors = {"norm.weight": torch.randn(8), "norm.bias": torch.randn(8)}
    theirs.load_state_dict({name.removeprefix("norm."): t for name, t in tensors.items()})
    save_file(tensors, tmp_path / "model.safetensors")
    model = Normed()
    with torch.inference_mode():
        load_weights(model, tmp_path, tied=False)
        x = torch.randn(3, 8)
        assert torch.equal(model.norm(x), theirs(x))


def test_the_page_s_interleaved_layer_is_that_of_a_whole_model() -> None:
    """GPT-NeoX passes the suite with it; annotations and its switch for biases aside."""
    layer = shown("my_model/interleaved.py", "InterleavedQKVLinear")(layer_context(), 8, 2, 4)
    theirs = InterleavedQKVLinear(layer_context(), 8, 2, 4, True)
    weight, bias = torch.randn(24, 8), torch.randn(24)
    x = torch.randn(3, 8)
    with torch.inference_mode():
        for one in (layer, theirs):
            one.weight.weight_loader(one.weight, weight, None)
            one.bias.weight_loader(one.bias, bias, None)
        assert torch.equal(layer(x), theirs(x))
        q, k, v = layer(x).unflatten(1, (3, 2, 4)).unbind(1)
        expected = (x @ weight.T + bias).unflatten(1, (2, 3, 4))
    for part, actual in enumerate((q, k, v)):
        torch.testing.assert_close(actual, expected[:, :, part])


def test_a_table_of_ones_beside_zeros_turns_nothing() -> None:
    """So a model whose norm follows its rotation can do both itself."""
    table = torch.cat([torch.ones(9, 4), torch.zeros(9, 4)], dim=1)
    prep = QKPrep(num_heads=2, num_kv_heads=1, head_size=8, cos_sin_cache=table)
    qkv, caches = torch.randn(5, 32), torch.zeros(2, 1, 16, 1, 8)
    positions, slots = torch.arange(5).int() + 3, torch.arange(5)
    q = layer_context().kernels.prepare_qkv(qkv, prep, positions, slots, *caches)
    assert torch.equal(q.flatten(1), qkv[:, :16])
    assert torch.equal(caches[0, 0, :5, 0], qkv[:, 16:24])
