"""The core's own plugins of the smaller kinds pass the suites that everybody's must."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from nanovllm_kit import PluginUnderTest, installed_plugin
from nanovllm_kit.checkpoint import CheckpointConformance
from nanovllm_kit.engine_client import EngineClientConformance
from nanovllm_kit.executor import ExecutorConformance
from nanovllm_kit.kernels import KernelSetConformance
from nanovllm_kit.sampler import SamplerConformance

core_plugin = cache(installed_plugin)
"""Each look at what is installed reads the metadata of all of it; checks are a thousand."""


class TestLocal(CheckpointConformance):
    """Folders of this machine."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return core_plugin("checkpoint", "local")

    @pytest.fixture
    def existing(self, tmp_path: Path) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
        return str(tmp_path)


class TestGumbel(SamplerConformance):
    """The built-in sampler."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return core_plugin("sampler", "gumbel")


class TestTorchKernels(KernelSetConformance):
    """The reference itself."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return core_plugin("kernels", "torch")


class TestSingleProcess(ExecutorConformance):
    """The built-in executor."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return core_plugin("executor", "single")


class TestThread(EngineClientConformance):
    """The built-in engine client."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return core_plugin("engine_client", "thread")
