"""The suite of executors, over two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from transformers import Qwen3ForCausalLM

from nanovllm_core.api import WorkerSetup
from nanovllm_executor_parallel.plugin import PARALLEL
from nanovllm_kit import ExecutorConformance, PluginUnderTest, plugin_under_test
from nanovllm_kit.model_settings import LLAMA_LIKE
from nanovllm_kit.reference_model import WEIGHTS, ReferenceCheckpoint

pytest.importorskip("nanovllm_model_qwen3", reason="needs the plugin model_qwen3")


@pytest.mark.slow  # two processes for each check; test_tokens.py has the way of every plan
class TestTwoRanks(ExecutorConformance):
    """With weights from a file: random ones would be others on each rank.

    The suite's model with windows has the same parameters, in four layers.
    """

    changes: ClassVar = {"tensor_parallel_size": 2, "load_format": "auto"}

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(PARALLEL)

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        settings = {**LLAMA_LIKE, "num_hidden_layers": 4}
        return ReferenceCheckpoint.save(tmp_path, Qwen3ForCausalLM, settings).folder

    def test_a_start_that_fails_is_an_error_of_the_project(
        self, plugin: PluginUnderTest, setup: WorkerSetup
    ) -> None:
        (Path(setup.checkpoint) / WEIGHTS).unlink()
        super().test_a_start_that_fails_is_an_error_of_the_project(plugin, setup)
