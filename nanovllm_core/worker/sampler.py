"""The built-in sampler: greedy and temperature by the Gumbel-max trick, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.interfaces.sampler import Sampler, SamplerContext
from nanovllm_core.kernels.sampling_reference import sample_tokens


class GumbelSampler(Sampler):
    """One pass over the logits on CUDA, the torch reference elsewhere; both give the same ids.

    `kernels.sampling_reference` is the definition.
    """

    def __init__(self, options: BaseModel, context: SamplerContext) -> None:
        super().__init__(options, context)
        self._workspace = None
        if context.device.type == "cuda":
            from nanovllm_core.kernels import sampling_triton

            self._workspace = sampling_triton.SamplingWorkspace(context.max_entries, context.device)
            self._launch = partial(sampling_triton.sample_tokens, workspace=self._workspace)

    def sample(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        arguments = (logits_BV, rows_B, temperature_R, seed_R, output_index_B, out_B)
        if self._workspace is not None:
            self._launch(*arguments, skip_flag=skip)
        elif not skip.item():  # on a CPU the host waits for nothing
            sample_tokens(*arguments)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        if self._workspace is None:
            return {}
        return {"scores": self._workspace.scores, "ids": self._workspace.ids}
