"""One call into torch's attention, with the kernel that was asked for or an error naming it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_attention_sdpa.plugin import Kernel
from nanovllm_core.api import UnsupportedError

NO_KERNEL = ("No available kernel", "No viable backend")
"""How torch's message begins when no enabled kernel takes the inputs."""


class SdpaKernel:
    """Attention by one of torch's kernels, or by torch's choice among several.

    None of them has a soft cap: with one, attention is written out here in plain tensor operations.
    """

    def __init__(self, kernel: Kernel, device: torch.device, soft_cap: float | None = None) -> None:
        self.name = kernel
        self.device = device
        self.soft_cap = soft_cap
        self._backends = _backends(kernel, device)

    def writes_scores(self, head_size: int) -> bool:
        """Whether scores and copies of K and V go through memory, as torch's math kernel does."""
        fused = head_size % 8 == 0 and head_size <= 256
        plain = self.name == "math" or self.soft_cap is not None
        return plain or (self.device.type == "cuda" and not fused)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        """Attention with an additive mask. q [B, H, Q, D]; k, v [B, H, L, D]; bias [.., Q, L]."""
        if self.soft_cap is not None:
            return _capped_attention(q, k, v, bias, scale, self.soft_cap)
        return self._run(q, k, v, bias, scale)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the last Q positions to the keys up to each, without a mask in memory."""
        if q.shape[-2] == k.shape[-2]:
            return self._run(q, k, v, None, scale, is_causal=True)
        # Importing this imports torch's compiler, which takes longer than all else of a start.
        from torch.nn.attention.bias import causal_lower_right

        return self._run(q, k, v, causal_lower_right(q.shape[-2], k.shape[-2]), scale)

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        scale: float,
        is_causal: bool = False,
    ) -> Tensor:
        try:
            with self._selected():
                return scaled_dot_product_attention(
                    q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale
                )
        except RuntimeError as error:
            if not str(error).startswith(NO_KERNEL):
                raise
            raise UnsupportedError(
                f"torch {torch.__version__} has no sdpa kernel {self.name!r} for q {tuple(q.shape)}"
                f", k {tuple(k.shape)}, {q.dtype} on {q.device}; use attention option kernel: auto",
                [str(error)],
            ) from error

    def _selected(self) -> AbstractContextManager[None]:
        if self._backends is None:
            return nullcontext()
        return cast(AbstractContextManager[None], sdpa_kernel(self._backends))


def causal_bias(first: int, stop: int, keys: int, window: int | None, like: Tensor) -> Tensor:
    """The additive mask [stop - first, keys] of the queries at positions `first` to `stop`."""
    bias = like.new_full((stop - first, keys), float("-inf"))
    if window is None:
        return bias.triu_(first + 1)
    return bias.tril(first - window).add_(bias.triu_(first + 1))


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, cap: float
) -> Tensor:
    """Softmax of cap * tanh(scores / cap) in float32; a fully hidden query gives NaN, as SDPA."""
    scores = q.float() @ k.float().transpose(-1, -2)
    scores.mul_(scale / cap).tanh_().mul_(cap).add_(bias)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _backends(kernel: Kernel, device: torch.device) -> list[SDPBackend] | None:
    """The kernels that torch may use; None leaves its choice alone."""
    if kernel == "auto" and device.type == "cpu":
        return None
    choices: dict[Kernel, list[SDPBackend]] = {
        # cuDNN builds a plan for every new shape, and prefill's shapes are all new.
        "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
        "math": [SDPBackend.MATH],
        "efficient": [SDPBackend.EFFICIENT_ATTENTION],
        "flash": [SDPBackend.FLASH_ATTENTION],
        "cudnn": [SDPBackend.CUDNN_ATTENTION],
    }
    return choices[kernel]
