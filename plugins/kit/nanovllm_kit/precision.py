"""How a model rounds in low precision: its error beside that of transformers' own model.

    Precision(Reference, settings, Model, torch.bfloat16, "cuda", tmp_path).check(batch=8)

Both are compared with transformers in float32, on the same weights, which are exact in the low
precision. Where routers choose experts, rounding may choose others. A row with other experts than
the exact one has a large error, whoever computed it: such rows are counted, and are left out of the
errors. So a mixture may only be in the last layer, where no other row reads its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm_core.layers import Router, SparseMLP, finalize_layers
from nanovllm_kit.dense_attention import DenseRuntime
from nanovllm_kit.layers import layer_context, load_model

SLACK = 1.1
"""Ours may err so many times as much as theirs."""
MOVED_SLACK, MOVED = 1.25, 0.03
"""Of the share of rows that have other experts than the exact ones: a factor, and so much more."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Root mean square errors of logits, over rows for which both models chose the exact experts.

    `moved_ours` and `moved_theirs` are the shares of rows that have other experts than the exact
    ones.
    """

    ours: float
    theirs: float
    moved_ours: float = 0.0
    moved_theirs: float = 0.0


class Precision:
    """A transformers model in float32 and in `dtype`, and ours in `dtype`, on the same weights."""

    def __init__(
        self, reference: Any, settings: Mapping[str, Any], model_class: type[nn.Module],
        dtype: torch.dtype, device: torch.device | str, folder: Path,
    ) -> None:  # fmt: skip
        """`reference` is a class of transformers, `settings` what its configuration class takes."""
        torch.manual_seed(0)
        self.device = torch.device(device)
        config = reference.config_class(**settings)
        with self.device:
            self.low, self.exact = reference(config), reference(config)
        for model in (self.low, self.exact):
            model.set_experts_implementation("eager")
        nn.Module.to(self.low, dtype)
        self.low.save_pretrained(folder)
        self.exact.load_state_dict(self.low.state_dict())
        self.ours = load_model(model_class, folder, layer_context(self.device, dtype))
        finalize_layers(self.ours)
        self.vocab_size = config.vocab_size

    def check(self, batch: int, runtime: type[DenseRuntime] = DenseRuntime, **sizes: int) -> None:
        """AssertionError with the errors if ours rounds worse; `sizes` are those of `errors`."""
        errors = self.errors(batch, runtime, **sizes)
        assert 0 < errors.ours <= SLACK * errors.theirs, f"batch {batch}: {errors}"
        most = MOVED_SLACK * errors.moved_theirs + MOVED
        assert errors.moved_ours <= most, f"batch {batch}: {errors}"

    @torch.inference_mode()
    def errors(
        self,
        batch: int,
        runtime: type[DenseRuntime] = DenseRuntime,
        *,
        num_sequences: int = 4,
        length: int = 64,
    ) -> Errors:
        """Of random sequences; ours sees `batch` rows at a time, and attends by `runtime`."""
        generator = torch.Generator().manual_seed(1)
        squares, moved, rows = torch.zeros(2, dtype=torch.float64), torch.zeros(2), 0
        for _ in range(num_sequences):
            ids = torch.randint(0, self.vocab_size, (length,), generator=generator).to(self.device)
            exact, chosen = _watched(self.exact, partial(self._theirs, self.exact, ids))
            low = _watched(self.low, partial(self._theirs, self.low, ids))
            ours = _watched(self.ours, partial(self._ours, runtime, ids, batch))
            others = torch.stack([_differ(found, chosen, length) for _, found in (ours, low)])
            same = ~others.any(dim=0).to(self.device)
            moved += others.sum(dim=1)
            rows += int(same.sum())
            for i, (logits, _) in enumerate((ours, low)):
                difference = (logits.float() - exact)[same]
                squares[i] += difference.square().sum(dtype=torch.float64).cpu()
        rms = (squares / (rows * self.vocab_size)).sqrt().tolist()
        return Errors(*rms, *(moved / (num_sequences * length)).tolist())

    def _theirs(self, model: Any, ids: Tensor) -> Tensor:
        logits: Tensor = model(ids[None]).logits[0]
        return logits

    def _ours(self, runtime: type[DenseRuntime], ids: Tensor, batch: int) -> Tensor:
        model: Any = self.ours
        runtime(model, len(ids))
        positions = torch.arange(len(ids), dtype=torch.int32, device=self.device)
        parts = zip(torch.split(ids, batch), torch.split(positions, batch), strict=True)
        return torch.cat([model.compute_logits(model(*part)) for part in parts])


def _watched(model: nn.Module, compute: Callable[[], Tensor]) -> tuple[Tensor, list[list[int]]]:
    """The logits of a computation, and the experts of each row, if the model has a router."""
    found: list[Tensor] = []

    def note(router: nn.Module, _: object, output: Any) -> None:
        ids = next(x for x in output if not x.is_floating_point())
        of_router = router.routing.top_k if isinstance(router, Router) else ids.shape[-1]
        found.append(ids.reshape(-1, ids.shape[-1])[:, :of_router].sort().values)

    def ask(mixture: SparseMLP, inputs: Any) -> None:
        note(mixture.gate, None, mixture.gate(*inputs))

    # A kernel set may compute a whole mixture of ours without a call of its router.
    mixtures = [one for one in model.modules() if isinstance(one, SparseMLP)]
    asked = {mixture.gate for mixture in mixtures}
    routers = [one for one in model.modules() if "Router" in type(one).__name__]
    handles = [mixture.register_forward_pre_hook(ask) for mixture in mixtures]
    handles += [one.register_forward_hook(note) for one in routers if one not in asked]
    try:
        logits = compute()
    finally:
        for handle in handles:
            handle.remove()
    return logits, torch.cat(found).tolist() if found else []


def _differ(chosen: list[list[int]], exact: list[list[int]], rows: int) -> Tensor:
    """Whether each row has other experts than the exact ones; there is one router, or none."""
    if bool(chosen) != bool(exact):
        raise ValueError("one of two models has no router: look at the names of their classes")
    if not exact:
        return torch.zeros(rows, dtype=torch.bool)
    return torch.tensor([one != other for one, other in zip(chosen, exact, strict=True)])
