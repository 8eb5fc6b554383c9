"""The example kernel set `float64` computes every product of a model: none is taken by another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.layers import TensorParallel
from nanovllm_kit.kernel_watch import KernelWatch
from nanovllm_kit.ranks import run_ranks
from nanovllm_kit.reference_model import ReferenceCheckpoint, load_model, run_model

transformers = pytest.importorskip("transformers")
kernels = pytest.importorskip("nanovllm_example_more_kinds.kernels")
qwen2 = pytest.importorskip("nanovllm_example_model_qwen2.model")

LAYERS = 2
PRODUCTS = ("mm", "addmm", "addmm_", "mv", "addmv", "matmul", "linear")
"""torch's products of a matrix; those of attention are of batches (bmm)."""


class Products(TorchDispatchMode):
    """Notes the dtypes of every product of this thread, whoever computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[set[torch.dtype]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__.split(".")[0] in PRODUCTS:
            self.dtypes.append({x.dtype for x in tree_leaves(args) if isinstance(x, Tensor)})
        return func(*args, **(kwargs or {}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> ReferenceCheckpoint:
    """Qwen2, which has biases on q, k and v."""
    settings = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return ReferenceCheckpoint.save(tmp_path, transformers.Qwen2ForCausalLM, settings)


@pytest.mark.parametrize("size", [1, 2])
def test_every_product_of_qwen2_is_one_of_the_set(
    checkpoint: ReferenceCheckpoint, size: int
) -> None:
    """Four a layer and the head's on each rank, in float64, and no weight is read elsewhere."""
    ids_T = torch.arange(1, 12)

    def on_rank(tp: TensorParallel) -> tuple[Tensor, Products, list[str]]:
        watch, products = KernelWatch(kernels.Float64Kernels()), Products()
        folder, config = checkpoint.folder, checkpoint.config
        model = load_model(qwen2.Qwen2ForCausalLM, folder, config, tp=tp, kernels=watch.kernels)
        with watch.over(model), products:
            logits = run_model(model, ids_T)
        return logits, products, watch.found

    for logits, products, found in run_ranks(size, on_rank):
        assert products.dtypes == [{torch.float64}] * (4 * LAYERS + 1)
        assert not found
        torch.testing.assert_close(logits, checkpoint.logits(ids_T), rtol=1e-3, atol=1e-3)


def test_every_product_of_an_engine_is_in_float64(
    checkpoint: ReferenceCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user runs it, in steps with prompts and decode steps, in whichever thread they run."""
    products = Products()

    def noted(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            with products:
                return method(*args)

        return run

    for name in ("forward", "compute_logits"):
        method = getattr(qwen2.Qwen2ForCausalLM, name)
        monkeypatch.setattr(qwen2.Qwen2ForCausalLM, name, noted(method))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    limits: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "num_kvcache_blocks": 4}
    folder = str(checkpoint.folder)
    with LLM(folder, device="cpu", dtype="float32", kernels="float64", **limits) as llm:
        products.dtypes.clear()
        llm.generate([[5, 17, 3], [60, 41, 8, 8]], params, use_tqdm=False)
    steps, rest = divmod(len(products.dtypes), 4 * LAYERS + 1)
    assert steps >= 6
    assert rest == 0
    assert all(dtypes == {torch.float64} for dtypes in products.dtypes)
