"""Executors of small random models on the GPU, driven by hand-written plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_core.config.sources import load_config
from nanovllm_core.interfaces.plan import Admission, PrefillChunk, RowSampling, StepPlan, WorkerInfo
from nanovllm_core.selection.startup import start
from nanovllm_core.worker.executor import SingleProcessExecutor
from nanovllm_core.worker.runner import ModelRunner
from tests.e2e.alternating import NAME as ALTERNATING, install_alternating

WIDTHS = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a GPU."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def write_config(folder: Path, width: str, **changes: Any) -> Path:
    """A Qwen3 config.json of a real model's width."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **WIDTHS[width],
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Machine:
    """A started executor and what its worker holds."""

    def __init__(self, executor: SingleProcessExecutor, info: WorkerInfo) -> None:
        assert executor._worker is not None
        assert executor._worker._runner is not None
        self.executor = executor
        self.info = info
        self.runner: ModelRunner = executor._worker._runner

    def prefill(self, prompts: list[list[int]], computed: int, **sampling: Any) -> None:
        """Put prompt i on row i, its blocks from the highest down; compute `computed` positions."""
        num_blocks, size = self.info.num_blocks, self.info.block_size
        blocks = iter(range(num_blocks - 1, -1, -1))
        admissions = tuple(
            Admission(
                row=row,
                token_ids=np.array(ids, dtype=np.int32),
                num_prompt_tokens=computed,
                num_computed=0,
                block_ids=np.array(
                    [
                        [next(blocks) for _ in range(-(-len(ids) // size) + 1)]
                        for _ in self.info.cache_windows
                    ],
                    np.int32,
                ),
                max_length=self.info.max_model_len,
                sampling=RowSampling(seed=row, **sampling),
            )
            for row, ids in enumerate(prompts)
        )
        chunks = tuple(PrefillChunk(row, 0, computed, samples=True) for row in range(len(prompts)))
        # A new epoch without decoding rows: `activate` may have set some behind the runner's back.
        plan = StepPlan(
            epoch=self.runner._epoch + 1,
            decode_rows=np.zeros(0, np.int32),
            admissions=admissions,
            prefill=chunks,
        )
        self.executor.submit(plan)
        self.executor.collect()

    def activate(self, num_rows: int) -> None:
        """Make rows 0 to `num_rows` - 1 the decoding ones, without a step or an epoch."""
        self.runner._set_active(np.arange(num_rows, dtype=np.int32))
        self.runner._send_updates()


SEVERAL_GROUPS: dict[str, Any] = {"architectures": [ALTERNATING], "windows": [64, None, 100]}
"""What makes of a model's config.json one of four cache groups."""


@pytest.fixture
def machine(tmp_path: Path, install: Callable[..., None]) -> Iterator[Callable[..., Machine]]:
    """Starts executors; `machine("0.6B", num_hidden_layers=2)(attention="triton")`."""
    started: list[SingleProcessExecutor] = []
    install_alternating(install)

    def make(width: str = "0.6B", model: dict[str, Any] | None = None, **overrides: Any) -> Machine:
        write_config(tmp_path, width, **(model or {}))
        fixed = {"load_format": "dummy", "device": "cuda", "cache.num_blocks": 2048}
        config = load_config(str(tmp_path), overrides={**fixed, **overrides})
        startup = start(config)
        executor = startup.executor
        assert isinstance(executor, SingleProcessExecutor)
        started.append(executor)
        return Machine(executor, executor.start(startup.setup))

    yield make
    for executor in started:
        executor.close()
    torch.cuda.empty_cache()
