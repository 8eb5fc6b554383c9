"""Before any test imports Triton: without a GPU, kernels are interpreted."""

from __future__ import annotations

from nanovllm_core.testing.interpreter import interpret_triton_without_cuda

interpret_triton_without_cuda()
