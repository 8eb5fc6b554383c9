"""The captured sampler: greedy and temperature, on any device, behind one call."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Sampler(Protocol):
    """Chooses one id per batch entry; see `kernels.sampling_reference.sample_tokens`."""

    def __call__(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        """Write ids to `out_B`; nothing where the device flag `skip` [1] is 1."""


class TorchSampler:
    """The torch reference; reads the flag on the host, which costs nothing on a CPU."""

    def __call__(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        from nanovllm_core.kernels.sampling_reference import sample_tokens

        if not skip.item():
            sample_tokens(logits_BV, rows_B, temperature_R, seed_R, output_index_B, out_B)


class TritonSampler:
    """One pass over the logits, with a workspace made once so that it can be captured."""

    def __init__(self, device: torch.device, max_batch: int) -> None:
        from nanovllm_core.kernels.sampling_triton import SamplingWorkspace

        self._workspace = SamplingWorkspace(max_batch, device)

    def __call__(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        from nanovllm_core.kernels.sampling_triton import sample_tokens

        sample_tokens(
            logits_BV,
            rows_B,
            temperature_R,
            seed_R,
            output_index_B,
            out_B,
            workspace=self._workspace,
            skip_flag=skip,
        )


def make_sampler(device: torch.device, max_batch: int) -> Sampler:
    """Triton on CUDA, torch elsewhere."""
    return TritonSampler(device, max_batch) if device.type == "cuda" else TorchSampler()
