"""The set keeps the contract of kernel sets: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import pytest
import torch

from nanovllm_kernels_triton.plugin import nanovllm_kernels
from nanovllm_kit import KernelSetConformance, PluginUnderTest, plugin_under_test

CUDA = torch.cuda.is_available()


class TestConformance(KernelSetConformance):
    # The interpreter computes bfloat16 wrongly.
    dtypes = (torch.float32, torch.float16, *([torch.bfloat16] if CUDA else []))

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(nanovllm_kernels()[0])

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cuda" if CUDA else "cpu")
