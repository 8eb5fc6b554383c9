"""Shared experts in the stacks of the others, and as an MLP beside them: a mixture's whole layer.

    python plugins/kernels_triton/benchmarks/shared_experts.py [--models V2-Lite] \
        [--tokens 1 256] [--out shared_experts.json]

Norm, router, experts, shared experts and the sum with the residual, in bfloat16, with dependent
launch, inside CUDA graphs; each call has the weights of another layer. Both forms have the same
weights, and their results are compared before they are timed. The floor is the time to stream the
weights of the experts that were touched, or to multiply. Few and many tokens are also timed with
each kind of kernels for the stacks, whichever the rule takes. A minute on one H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from experts import BANDWIDTH, CALLS, DEVICE, DTYPE, LAYERS, MATMUL_RATE, measure
from torch import Tensor

from nanovllm_core.api import Routing
from nanovllm_core.layers import GatedMLP, LayerContext, RMSNorm, SingleRank, SparseMLP
from nanovllm_core.worker import init_dummy_weights
from nanovllm_kernels_triton import experts_choice
from nanovllm_kernels_triton.kernel_set import TritonKernels
from nanovllm_kit.numerics import relative_norm_error

FEW_TOKENS, MANY_TOKENS = 16, 512
"""To the one and from the other on, both kinds of kernels are timed."""
MAX_DIFFERENCE = 1e-2
"""Of what the layer adds to the residual; the one form rounds once more."""


@dataclass(frozen=True)
class Model:
    hidden: int
    intermediate: int
    num_experts: int
    num_shared: int
    routing: Routing

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * DTYPE.itemsize


MODELS = {
    "V2-Lite": Model(2048, 1408, 64, 2, Routing(top_k=6, exact_logits=True)),
    "odd": Model(1544, 424, 60, 3, Routing(top_k=4, renormalize=True)),
}


class Forms:
    """The same mixtures with shared experts in the stacks, and with an MLP for them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.kernels = TritonKernels(dependent_launch=True)
        self.kernels.allocate(DEVICE)
        context = LayerContext(DEVICE, DTYPE, SingleRank(), self.kernels)
        self.norm = RMSNorm(context, model.hidden, 1e-6)
        self.norm.weight.fill_(1.0)
        self.stacked = [self._stacked(context, seed) for seed in range(LAYERS)]
        self.beside = [self._beside(context, one) for one in self.stacked]

    def _stacked(self, context: LayerContext, seed: int) -> SparseMLP:
        shared_size = self.model.num_shared * self.model.intermediate
        mixture = self._mixture(context, shared_size)
        init_dummy_weights(mixture, seed)
        return mixture

    def _beside(self, context: LayerContext, stacked: SparseMLP) -> SparseMLP:
        """The same weights; those of shared experts as one MLP's, side by side."""
        mixture, first = self._mixture(context, None), self.model.num_experts
        mixture.gate.weight.copy_(stacked.gate.weight)
        mixture.experts.gate_up.weight.copy_(stacked.experts.gate_up.weight)
        mixture.experts.down.weight.copy_(stacked.experts.down.weight)
        width = self.model.num_shared * self.model.intermediate
        mixture.shared_experts = mlp = GatedMLP(context, self.model.hidden, width)
        gate_up = stacked.experts.gate_up.tensor[first:].unflatten(1, (2, -1))
        mlp.gate_up_proj.weight.copy_(gate_up.transpose(0, 1).reshape(2 * width, -1))
        down = stacked.experts.down.tensor[first:]
        mlp.down_proj.weight.copy_(down.transpose(0, 1).reshape(-1, width))
        return mixture

    def _mixture(self, context: LayerContext, shared_size: int | None) -> SparseMLP:
        one = self.model
        return SparseMLP(
            context, one.hidden, one.intermediate, one.num_experts, one.routing,
            shared_size=shared_size,
        )  # fmt: skip

    def calls(self, residual_TE: Tensor) -> dict[str, Callable[[int], Tensor]]:
        """By form: a layer's call. The residual grows, and the norm takes that back."""

        def stacked(call: int) -> Tensor:
            return self.stacked[call % LAYERS](residual_TE, self.norm)

        def beside(call: int) -> Tensor:
            return self.beside[call % LAYERS](residual_TE, self.norm)

        forms = {"stacked": stacked, "beside": beside}
        if len(residual_TE) >= MANY_TOKENS:
            forms["dense"] = with_limit("DENSE_SHARED_TOKENS", 0, stacked)
            forms["grouped"] = with_limit("DENSE_SHARED_TOKENS", 10**9, stacked)
        if len(residual_TE) <= FEW_TOKENS:
            forms |= {
                "few": with_limit("FEW_SHARE", 0.0, stacked),
                "many": with_limit("FEW_SHARE", 2.0, stacked),
            }
        return forms

    def difference(self, x_TE: Tensor) -> float:
        """Of what the two forms add to the same residual; AssertionError where it is large.

        The residual is small beside it, so that its rounding is too.
        """
        x_TE = x_TE / 64
        stacked, beside = (
            (one(x_TE.clone(), self.norm) - x_TE).float()
            for one in (self.stacked[0], self.beside[0])
        )
        error = relative_norm_error(stacked, beside)
        if not error <= MAX_DIFFERENCE:
            raise AssertionError(f"the two forms differ by {error:.1e}, over {MAX_DIFFERENCE:.0e}")
        return error

    def floor(self, x_TE: Tensor) -> float:
        """Microseconds, on average over the layers."""
        one, touched = self.model, 0.0
        for mixture in self.stacked:
            _, ids_TC = mixture.gate(self.norm(x_TE))
            touched += len(ids_TC.unique()) / LAYERS
        pairs = len(x_TE) * (one.routing.top_k + one.num_shared)
        operations = 2 * pairs * one.expert_bytes / DTYPE.itemsize
        return max(touched * one.expert_bytes / BANDWIDTH, operations / MATMUL_RATE) * 1e6


def with_limit(name: str, limit: float, call: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """The call with another number in the rule."""

    def limited(index: int) -> Tensor:
        ruled = getattr(experts_choice, name)
        setattr(experts_choice, name, limit)
        experts_choice.choose_experts.cache_clear()
        try:
            return call(index)
        finally:
            setattr(experts_choice, name, ruled)
            experts_choice.choose_experts.cache_clear()

    return limited


def launches(call: Callable[[int], object]) -> int:
    """The kernels of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(0)
        torch.cuda.synchronize()
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem")
        for event in profile.events()
    )


def measure_tokens(name: str, forms: Forms, tokens: int) -> dict[str, Any]:
    x_TE = torch.randn(tokens, forms.model.hidden, device=DEVICE).to(DTYPE)
    floor, difference = forms.floor(x_TE), forms.difference(x_TE)
    calls = forms.calls(x_TE)
    kernels = {form: launches(call) for form, call in calls.items()}
    # In turns, because a GPU's clock drifts.
    times = {form: min(measure(call) for _ in range(2)) for form, call in calls.items()}
    print(
        f"{name:8} {tokens:6} tokens  floor {floor:7.1f}  "
        + "  ".join(
            f"{form} {time:7.1f} ({floor / time:.0%}, {kernels[form]} kernels)"
            for form, time in times.items()
        )
        + f"  stacked / beside {times['stacked'] / times['beside']:.3f}  differ {difference:.1e}",
        flush=True,
    )
    return {
        "model": name, "tokens": tokens, "floor": floor, "kernels": kernels,
        "microseconds": times, "difference": difference,
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--tokens", type=int, nargs="+",
        default=[1, 2, 4, 6, 8, 10, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384],
    )  # fmt: skip
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lines = []
    for name in arguments.models:
        forms = Forms(MODELS[name])
        with forms.kernels.compile_ahead():
            for tokens in arguments.tokens:
                x_TE = torch.zeros(tokens, forms.model.hidden, device=DEVICE, dtype=DTYPE)
                for call in forms.calls(x_TE).values():
                    call(0)
        lines += [measure_tokens(name, forms, tokens) for tokens in arguments.tokens]
        del forms
        torch.cuda.empty_cache()
    if arguments.out is not None:
        record = {"gpu": torch.cuda.get_device_name(), "calls": CALLS, "shared_experts": lines}
        arguments.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
