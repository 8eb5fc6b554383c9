"""What docs/write/model.md shows besides its first plugin is right, as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nanovllm_core.interfaces.specs import ModelSpec, NoOptions
from nanovllm_core.testing import ModelConformance, PluginUnderTest
from nanovllm_core.testing.layers import layer_context
from nanovllm_core.worker.weights import load_weights

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
        spec = ModelSpec(name="Phi3ForCausalLM", impl=impl, summary="Phi-3", contract=1)
        return PluginUnderTest(spec, NoOptions(), "nanovllm_core.builtins")


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
