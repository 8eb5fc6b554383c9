"""Small random checkpoints made by transformers, and a model plugin run on them without an engine.

`nanovllm_kit.model` compares the two; an author may use these for checks of their own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import LayerContext, SingleRank, TensorParallel, finalize_layers
from nanovllm_core.worker import INDEX_NAME, load_weights
from nanovllm_kit.dense_attention import DenseRuntime, SparseRuntime
from nanovllm_kit.numerics import relative_norm_error

CPU = torch.device("cpu")
TORCH = TorchKernels()
WEIGHTS = "model.safetensors"
_NUDGES, _NUDGE = 8, 1e-5
"""Runs of `is_settled`, and by how much of an embedding each differs."""


@dataclass(frozen=True, slots=True)
class ReferenceCheckpoint:
    """A transformers model in float32 on the CPU, and the folder that it was saved to."""

    model: Any
    folder: Path
    config: dict[str, Any]
    """What the folder's config.json says."""

    @classmethod
    def save(
        cls,
        folder: Path,
        model_class: Any,
        settings: Mapping[str, Any],
        *,
        seed: int = 0,
        std: float = 0.2,
    ) -> ReferenceCheckpoint:
        """A model with random weights so large that nothing cancels and no token is a near tie.

        `model_class` is a class of transformers such as `Qwen3ForCausalLM`; `settings` are what its
        configuration class takes. `std` is the standard deviation of the matrices. Norm weights and
        biases are around 1, so that none is neutral; so are buffers that a checkpoint holds. Norm
        weights that the class begins at 0, since it adds 1, are around 0.
        """
        torch.manual_seed(seed)
        # A copy: a configuration class may write into what it is given.
        config = model_class.config_class(**copy.deepcopy(dict(settings)))
        model = model_class(config).float().eval()
        # transformers before 5.21 gave models with soft caps to kernels that ignore them.
        model.set_attn_implementation("eager")
        # Mixtures are computed in float64 too. Models that have none keep the setting.
        model.set_experts_implementation("eager")
        with torch.no_grad():
            stored = model.state_dict().keys()
            buffers = [named for named in model.named_buffers() if named[0] in stored]
            for name, tensor in (*model.named_parameters(), *buffers):
                mean, spread = (1.0, 0.2) if tensor.dim() == 1 else (0.0, std)
                if tensor.dim() == 1 and "norm" in name and not tensor.any():
                    mean = 0.0
                tensor.normal_(mean, spread)
        model.save_pretrained(folder)
        return cls(model, folder, json.loads((folder / "config.json").read_text("utf-8")))

    @torch.no_grad()
    def scale(self, *, embedding: float = 1.0, head: float = 1.0) -> None:
        """Multiply the vocabulary's matrices, in the model and in the folder; a tied one by both.

        The logits' size follows the head. The residual begins with the embedding.
        """
        self.model.get_input_embeddings().weight.mul_(embedding)
        self.model.get_output_embeddings().weight.mul_(head)
        self.model.save_pretrained(self.folder)

    @torch.inference_mode()
    def logits(self, ids_T: Tensor, positions_T: Tensor | None = None) -> Tensor:
        """transformers' logits [T, vocab_size] of one sequence, whole unless positions are given.

        These increase; each token sees those before it.
        """
        where = {} if positions_T is None else {"position_ids": positions_T.long()[None]}
        # Without a mask transformers takes a jump in the positions for another sequence.
        logits: Tensor = self.model(
            ids_T[None], attention_mask=torch.ones_like(ids_T[None]), **where
        ).logits[0]
        return logits

    @torch.inference_mode()
    def rounding(self, ids_T: Tensor) -> float:
        """The relative norm error of these float32 logits beside those of float64.

        What another order of the sums may change, at these weights.
        """
        exact = copy.deepcopy(self.model).double()(ids_T[None]).logits[0]
        return relative_norm_error(self.logits(ids_T), exact)

    @torch.inference_mode()
    def is_settled(self, ids_T: Tensor, limit: float) -> bool:
        """Whether embeddings that differ by some roundings give logits within this norm error.

        Not so where two experts of a token score so alike that rounding chooses between them.
        """
        logits, generator = self.logits(ids_T), torch.Generator().manual_seed(0)
        for _ in range(_NUDGES):
            nudged = copy.deepcopy(self.model)
            weight = nudged.get_input_embeddings().weight
            weight.mul_(1 + _NUDGE * torch.randn(weight.shape, generator=generator))
            if relative_norm_error(nudged(ids_T[None]).logits[0], logits) > limit:
                return False
        return True

    def tensors(self) -> dict[str, Tensor]:
        """The weights as they lie in the folder, by their names in the checkpoint."""
        return load_file(self.folder / WEIGHTS)

    def rewrite(self, tensors: Mapping[str, Tensor]) -> None:
        """Put other weights into the folder, in one file."""
        save_file(dict(tensors), self.folder / WEIGHTS)

    def split(self, num_files: int) -> None:
        """Spread the weights over several files with an index, as large checkpoints are."""
        tensors = self.tensors()
        (self.folder / WEIGHTS).unlink()
        weight_map = {
            name: f"model-{i % num_files + 1:05}-of-{num_files:05}.safetensors"
            for i, name in enumerate(sorted(tensors))
        }
        for file in set(weight_map.values()):
            part = {name: tensors[name] for name, home in weight_map.items() if home == file}
            save_file(part, self.folder / file)
        index = {"metadata": {}, "weight_map": weight_map}
        (self.folder / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")


def build_model(
    model_class: Any,
    config: Mapping[str, Any],
    *,
    tp: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
    kernels: KernelSet = TORCH,
) -> Any:
    """A plugin's model on the CPU, whole or one rank of it, every weight NaN until it is loaded."""
    context = LayerContext(CPU, dtype, tp or SingleRank(), kernels)
    with torch.inference_mode():
        model = model_class(NoOptions(), config, context)
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def load_model(
    model_class: Any,
    folder: Path,
    config: Mapping[str, Any],
    *,
    tp: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
    kernels: KernelSet = TORCH,
) -> Any:
    """A plugin's model with a folder's weights, as the worker loads it."""
    model = build_model(model_class, config, tp=tp, dtype=dtype, kernels=kernels)
    with torch.inference_mode():
        load_weights(model, folder, tied=model_class.shape(config).tied_embeddings)
        finalize_layers(model)
    return model


@torch.inference_mode()
def run_model(model: Any, ids_T: Tensor, chunks: Sequence[int] | None = None) -> Tensor:
    """The logits [T, vocab_size] of one sequence, computed in one pass or in chunks."""
    DenseRuntime(model, len(ids_T))
    lengths = list(chunks or [len(ids_T)])
    positions_T = torch.arange(len(ids_T), dtype=torch.int32)
    parts = zip(ids_T.split(lengths), positions_T.split(lengths), strict=True)
    logits: Tensor = model.compute_logits(torch.cat([model(*part) for part in parts]))
    return logits


@torch.inference_mode()
def run_sparse(
    model: Any, ids_T: Tensor, positions_T: Tensor, chunks: Sequence[int] | None = None
) -> Tensor:
    """The logits [T, vocab_size] of a sequence of which only these increasing positions exist."""
    SparseRuntime(model, positions_T)
    lengths = list(chunks or [len(ids_T)])
    parts = zip(ids_T.split(lengths), positions_T.split(lengths), strict=True)
    logits: Tensor = model.compute_logits(torch.cat([model(*part) for part in parts]))
    return logits


@torch.inference_mode()
def run_ragged(model: nn.Module, prompts: Sequence[Tensor], chunk: int) -> list[Tensor]:
    """The logits of several prompts that share every pass, with `chunk` tokens of each at a time.

    Prompt i begins at pass i and goes on until it is done, so that passes mix beginnings, middles
    and single last tokens.
    """
    runtime = DenseRuntime(model, max(len(prompt) for prompt in prompts), len(prompts))
    done = [0] * len(prompts)
    hidden: list[list[Tensor]] = [[] for _ in prompts]
    turn = 0
    while any(start < len(prompt) for start, prompt in zip(done, prompts, strict=True)):
        batch = [
            (i, min(chunk, len(prompt) - done[i]))
            for i, prompt in enumerate(prompts)
            if i <= turn and done[i] < len(prompt)
        ]
        runtime.set_batch(batch)
        ids = torch.cat([prompts[i][done[i] : done[i] + count] for i, count in batch])
        positions = torch.cat([torch.arange(done[i], done[i] + count) for i, count in batch])
        parts = model(ids, positions.int()).split([count for _, count in batch])
        for (i, count), part in zip(batch, parts, strict=True):
            hidden[i].append(part)
            done[i] += count
        turn += 1
    lm: Any = model
    return [lm.compute_logits(torch.cat(parts)) for parts in hidden]
