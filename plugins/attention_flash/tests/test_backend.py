"""The flash backend's own part: buffers at fixed addresses, plans before runs, clear refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from nanovllm_attention_flash import providers
from nanovllm_attention_flash.backend import FlashAttention
from nanovllm_attention_flash.plugin import FlashOptions
from nanovllm_core.api import (
    AttentionConfig,
    DecodeMetadata,
    InconsistentStateError,
    UnsupportedError,
)

CONFIG = AttentionConfig(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    scale=0.125,
    block_size=128,
    max_num_seqs=4,
    max_model_len=512,
    max_num_batched_tokens=1000,
)


def rows(*seq_lens: int) -> DecodeMetadata:
    table = torch.zeros(len(seq_lens), 4, dtype=torch.int32)
    return DecodeMetadata(table, torch.tensor(seq_lens, dtype=torch.int32), max_seq_len=512)


def made(provider: str = "auto") -> FlashAttention:
    backend = FlashAttention(FlashOptions.model_validate({"provider": provider}), CONFIG)
    backend.allocate()
    return backend


def test_captured_tensors_stay_where_they_are(fake_providers: dict[str, Any]) -> None:
    """A replay reads the addresses of the capture; plans write into them."""
    backend = made()
    before = {name: t.data_ptr() for name, t in backend.captured_tensors().items()}
    q = torch.zeros(2, 4, 64)
    for metadata in (rows(7, 0), rows(0, 9)):
        backend.plan_decode(metadata)
        backend.run_decode(q, q, q, metadata, q)
        seen = fake_providers["fa4"].calls[-1]["seqused_k"]
        assert seen.data_ptr() == before["key_lens_from_1"]
    assert {name: t.data_ptr() for name, t in backend.captured_tensors().items()} == before


def test_run_without_its_plan_is_an_error(fake_providers: dict[str, Any]) -> None:
    """A plan made for another batch is not silently used."""
    backend, q = made(), torch.zeros(2, 4, 64)
    with pytest.raises(InconsistentStateError, match="plan_decode did not see"):
        backend.run_decode(q, q, q, rows(1, 2), q)
    backend.plan_decode(rows(1, 2))
    with pytest.raises(InconsistentStateError, match="plan_decode did not see"):
        backend.run_decode(q, q, q, rows(1, 2), q)


def test_rows_and_query_lengths_beyond_the_plan_are_refused(
    fake_providers: dict[str, Any],
) -> None:
    """Each with its value and the limit or the remedy."""
    backend = made()
    with pytest.raises(InconsistentStateError, match="5 decode rows, the backend was made for 4"):
        backend.plan_decode(rows(1, 1, 1, 1, 1))
    with pytest.raises(UnsupportedError, match="query_len is 2; send longer queries as prefill"):
        backend.plan_decode(replace(rows(1), query_len=2))


@pytest.mark.parametrize("provider", ["fa2", "torch"])
def test_blocks_that_a_provider_cannot_read_are_refused(
    fake_providers: dict[str, Any], provider: str
) -> None:
    """256 tokens or a multiple of it, named with the setting."""
    with pytest.raises(UnsupportedError, match=r"multiple of 256.*set cache.block_size: 256"):
        made(provider)


def test_a_missing_provider_names_every_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing installed: the error says what to install, and what else there is."""

    def absent(name: str) -> str:
        raise providers.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(providers.metadata, "version", absent)
    with pytest.raises(UnsupportedError) as error:
        made()
    message = str(error.value)
    assert "flash-attn-4 is not installed" in message
    assert "pip install 'nanovllm-attention-flash[fa4]'" in message
    for other in ("provider: fa3", "provider: fa2", "provider: torch", "torch>=2.12"):
        assert other in message


def test_a_provider_that_cannot_be_imported_says_why(
    fake_providers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed but broken: the import's own error, and the install that mends it."""
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    with pytest.raises(UnsupportedError, match=r"flash-attn-4 9.8.7 cannot be imported.*\[fa4\]"):
        made("fa4")


def test_describe_names_package_version_and_verification(fake_providers: dict[str, Any]) -> None:
    """Benchmarks print what ran, and whether a GPU has run it before."""
    assert made().describe() == "fa4: flash-attn-4 9.8.7"
    assert made("fa3").describe() == "fa3: flash-attn-3 9.8.7, unverified on hardware"
