"""A decode backend that prepares q, k and v itself gets them packed, for its tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nanovllm_core.interfaces.attention import DecodeMetadata
from nanovllm_core.interfaces.plan import PrefillChunk, StepPlan
from nanovllm_core.kernels import TorchKernels
from nanovllm_kit.plans import decode_plan

from ..e2e.alternating import NAME as ALTERNATING, install_alternating
from ..e2e.tiny import Reference, write_checkpoint
from ..latent import install_latent, write_latent
from .test_runner import PROMPTS, Started, admission

for plugin in ("model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")
from nanovllm_attention_sdpa.backend import SdpaAttention  # noqa: E402 - only where it is

STEPS = 5


@pytest.mark.parametrize("prompt_sizes", [(), (8, 32, 64)], ids=["exact", "padded"])
def test_decode_tokens_are_prepared_by_the_backend_and_prompts_by_the_kernel_set(
    prompt_sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decode steps and beside prompts; the tokens are those of the reference model."""
    by_backend: list[int] = []
    by_kernel_set: list[int] = []
    prepare = TorchKernels.prepare_qkv

    def prepare_qkv(self: TorchKernels, qkv_TX: Tensor, *arguments: Any) -> Tensor:
        by_kernel_set.append(len(qkv_TX))
        return prepare(self, qkv_TX, *arguments)

    def run_decode_from_qkv(self: SdpaAttention, qkv_BX: Tensor, *others: Any) -> None:
        *arguments, metadata, out_BHD = others
        assert isinstance(metadata, DecodeMetadata)
        by_backend.append(len(qkv_BX))
        q_BHD = prepare(TorchKernels(), qkv_BX, *arguments)
        self.run_decode(q_BHD, *arguments[-2:], metadata, out_BHD)

    folder = write_checkpoint(tmp_path)
    monkeypatch.setattr(TorchKernels, "prepare_qkv", prepare_qkv)
    monkeypatch.setattr(SdpaAttention, "prepares_decode", lambda self, prep, rows: True)
    monkeypatch.setattr(SdpaAttention, "run_decode_from_qkv", run_decode_from_qkv)
    started = Started(folder, prompt_sizes=prompt_sizes)
    by_kernel_set.clear()

    first, later = PROMPTS[0], PROMPTS[1]
    whole = PrefillChunk(5, 0, len(first), samples=True)
    tokens: dict[int, list[int]] = {5: [], 2: []}

    def run(plan: StepPlan, *rows: int) -> None:
        for row, token in zip(rows, started.run(plan).token_ids, strict=True):
            tokens[row].append(int(token))

    run(StepPlan(admissions=(admission(5, first, 2),), prefill=(whole,)), 5)
    chunk = PrefillChunk(2, 0, len(later), samples=True)
    run(decode_plan((5,), admissions=(admission(2, later, 4),), prefill=(chunk,)), 5, 2)
    by_kernel_set.clear()
    for _ in range(STEPS):
        run(decode_plan((5, 2), epoch=2), 5, 2)
    assert by_backend
    assert not by_kernel_set
    reference = Reference.of(folder)
    assert tokens == {5: reference.tokens(first, STEPS + 2), 2: reference.tokens(later, STEPS + 1)}
    started.executor.close()


def announced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that the kernel set is told of."""
    calls: list[int] = []

    def announce(_: TorchKernels, max_rows: int) -> None:
        calls.append(max_rows)

    monkeypatch.setattr(TorchKernels, "announce_prepared_decode", announce, raising=False)
    return calls


@pytest.mark.parametrize(
    ("prepared", "told"),
    [((), 0), ((1, 2, 3), 3), ((1, 2, 5), 2), ((2, 3), 0), (range(1, 100), 8)],
    ids=["none", "three", "not three", "not one", "all"],
)
def test_a_kernel_set_is_told_of_how_many_rows_attention_prepares_q_k_and_v(
    prepared: Sequence[int], told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of so many and of all fewer, of the rows that a step may have. Once."""
    calls = announced(monkeypatch)
    monkeypatch.setattr(SdpaAttention, "prepares_decode", lambda self, prep, rows: rows in prepared)
    Started(write_checkpoint(tmp_path)).executor.close()
    assert calls == [told]


@pytest.mark.parametrize("windows", [(8, None), (None, 8)], ids=str)
def test_a_row_counts_as_prepared_where_the_backend_of_every_layer_prepares_it(
    windows: tuple[int | None, ...],
    tmp_path: Path,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here those of one group of layers prepare more rows than those of the other."""
    install_alternating(install)
    folder = write_checkpoint(tmp_path, architectures=[ALTERNATING], windows=windows)

    def prepares_decode(self: SdpaAttention, prep: object, rows: int) -> bool:
        return rows <= (3 if self.config.sliding_window else 5)

    calls = announced(monkeypatch)
    monkeypatch.setattr(SdpaAttention, "prepares_decode", prepares_decode)
    Started(folder).executor.close()
    assert calls == [3]


def test_latent_attention_prepares_no_row(
    tmp_path: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queries and rows are the kernel set's, whatever a backend says."""
    install_latent(install)
    folder, _ = write_latent(tmp_path / "tiny")
    calls = announced(monkeypatch)
    monkeypatch.setattr(SdpaAttention, "prepares_decode", lambda self, prep, rows: True)
    Started(folder).executor.close()
    assert calls == [0]
