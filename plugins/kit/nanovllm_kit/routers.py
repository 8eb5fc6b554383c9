"""A router beside that of transformers, in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import Routing
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import LayerContext, Router, SingleRank

ERROR_FACTOR = 1.1
"""How much larger the error of our logits may be than that of transformers'."""
NUM_TOKENS = 400


class Recording(TorchKernels):
    """Keeps the logits that were routed last."""

    routed: Tensor

    def route(
        self, logits_TN: Tensor, routing: Routing, bias_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.routed = logits_TN
        return super().route(logits_TN, routing, bias_N)


@torch.inference_mode()
def check_router(reference: Any, routing: Routing, *, bias: bool = False) -> None:
    """Assert that a `Router` chooses the experts of a router of transformers.

    `reference` has a `weight`, with `bias` an `e_score_correction_bias`, both of which are filled
    here, and returns logits, weights and ids. The RMS error of our logits is at most `ERROR_FACTOR`
    times that of its own.
    """
    generator, kernels = torch.Generator().manual_seed(0), Recording()
    num_experts, hidden_size = reference.weight.shape
    context = LayerContext(torch.device("cpu"), torch.bfloat16, SingleRank(), kernels)
    router: Any = Router(context, hidden_size, num_experts, routing, bias=bias)
    router.weight.normal_(std=hidden_size**-0.5, generator=generator)
    reference.weight.data = router.weight.data
    if bias:
        router.e_score_correction_bias.normal_(std=0.1, generator=generator)
        reference.e_score_correction_bias = router.e_score_correction_bias.data
    x_TE = torch.randn(NUM_TOKENS, hidden_size, generator=generator).bfloat16()
    weights_TC, ids_TC = router(x_TE)
    their_logits_TN, their_weights_TC, their_ids_TC = reference(x_TE)
    exact_TN = x_TE.double() @ router.weight.double().t()
    ours, theirs = (
        float((logits_TN - exact_TN).square().mean().sqrt())
        for logits_TN in (kernels.routed, their_logits_TN)
    )
    assert ours <= ERROR_FACTOR * theirs, f"RMS error of logits {ours:.2e}, theirs {theirs:.2e}"
    # Rounded logits have ties, which torch.topk breaks in any order.
    chosen, theirs_chosen = (
        kernels.routed.gather(1, ids.long()).sort().values for ids in (ids_TC, their_ids_TC)
    )
    assert torch.equal(chosen, theirs_chosen), "other experts"
    weights_TC, their_weights_TC = (one.sort().values for one in (weights_TC, their_weights_TC))
    torch.testing.assert_close(weights_TC, their_weights_TC.float(), rtol=1e-2, atol=0.0)
