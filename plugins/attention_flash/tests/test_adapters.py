"""Each adapter calls its provider by the provider's real signature, with the right arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_attention_flash.backend import FlashAttention
from nanovllm_attention_flash.plugin import FlashOptions
from nanovllm_core.api import AttentionConfig, DecodeMetadata, PrefillMetadata, UnsupportedError

Q_DECODE = torch.randn(3, 4, 64)
Q_PREFILL = torch.randn(7, 4, 64)
K, V = torch.randn(8, 256, 2, 64), torch.randn(8, 256, 2, 64)
TABLE = torch.tensor([[3, 1], [2, 0], [0, 0]], dtype=torch.int32)
DECODE = DecodeMetadata(TABLE, torch.tensor([300, 5, 0], dtype=torch.int32), max_seq_len=512)
PREFILL = PrefillMetadata(
    TABLE[:2],
    torch.tensor([260, 3], dtype=torch.int32),
    torch.tensor([0, 4, 7], dtype=torch.int32),
    max_query_len=4,
    max_seq_len=260,
)


def backend(provider: str, window: int | None = None, cap: float | None = None) -> FlashAttention:
    config = AttentionConfig(
        device=torch.device("cpu"), dtype=torch.bfloat16, num_heads=4, num_kv_heads=2,
        head_size=64, scale=0.125, block_size=256, max_num_seqs=4, max_model_len=512,
        max_num_batched_tokens=1000, sliding_window=window, soft_cap=cap,
    )  # fmt: skip
    made = FlashAttention(FlashOptions.model_validate({"provider": provider}), config)
    made.allocate()
    return made


def run_decode(provider: str) -> Tensor:
    out = torch.zeros_like(Q_DECODE)
    made = backend(provider)
    made.plan_decode(DECODE)
    made.run_decode(Q_DECODE, K, V, DECODE, out)
    return out


def run_prefill(provider: str) -> Tensor:
    out = torch.zeros_like(Q_PREFILL)
    made = backend(provider)
    made.plan_prefill(PREFILL)
    made.run_prefill(Q_PREFILL, K, V, PREFILL, out)
    return out


def assert_call(recorder: Any, expected: dict[str, Any]) -> None:
    """The one call has exactly these arguments, tensors equal in values and dtype."""
    (call,) = recorder.calls
    assert call.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(call[name], value, rtol=0, atol=0)
        else:
            assert call[name] == value, name


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_fa4_decode(fake_providers: dict[str, Any]) -> None:
    """One query per row without cu_seqlens, and one key for the padded row."""
    assert torch.equal(run_decode("auto"), Q_DECODE + 1)
    assert_call(
        fake_providers["fa4"],
        {
            "q": Q_DECODE[:, None], "k": K, "v": V, "max_seqlen_q": 1, "max_seqlen_k": 512,
            "seqused_k": ints(300, 5, 1), "page_table": TABLE, "softmax_scale": 0.125,
            "causal": False,
        },
    )  # fmt: skip


def test_fa4_prefill(fake_providers: dict[str, Any]) -> None:
    """Packed queries; the query bound is the configured one, so that one kernel serves all."""
    assert torch.equal(run_prefill("fa4"), Q_PREFILL + 1)
    assert_call(
        fake_providers["fa4"],
        {
            "q": Q_PREFILL, "k": K, "v": V, "cu_seqlens_q": ints(0, 4, 7), "max_seqlen_q": 1000,
            "max_seqlen_k": 260, "seqused_k": ints(260, 3), "page_table": TABLE[:2],
            "softmax_scale": 0.125, "causal": True,
        },
    )  # fmt: skip


def test_fa3_decode(fake_providers: dict[str, Any]) -> None:
    """Through flash_attn_with_kvcache, whose blocks are named page_table."""
    assert torch.equal(run_decode("fa3"), Q_DECODE + 1)
    assert_call(
        fake_providers["fa3"],
        {
            "q": Q_DECODE[:, None], "k_cache": K, "v_cache": V, "cache_seqlens": ints(300, 5, 0),
            "page_table": TABLE, "softmax_scale": 0.125, "causal": True,
        },
    )  # fmt: skip


def test_fa3_prefill(fake_providers: dict[str, Any]) -> None:
    """Through the same function with packed queries."""
    assert torch.equal(run_prefill("fa3"), Q_PREFILL + 1)
    assert_call(
        fake_providers["fa3"],
        {
            "q": Q_PREFILL, "k_cache": K, "v_cache": V, "cache_seqlens": ints(260, 3),
            "page_table": TABLE[:2], "cu_seqlens_q": ints(0, 4, 7), "max_seqlen_q": 4,
            "softmax_scale": 0.125, "causal": True,
        },
    )  # fmt: skip


def test_fa2_decode(fake_providers: dict[str, Any]) -> None:
    """Blocks are named block_table."""
    assert torch.equal(run_decode("fa2"), Q_DECODE + 1)
    assert_call(
        fake_providers["fa2_kvcache"],
        {
            "q": Q_DECODE[:, None], "k_cache": K, "v_cache": V, "cache_seqlens": ints(300, 5, 0),
            "block_table": TABLE, "softmax_scale": 0.125, "causal": True,
        },
    )  # fmt: skip


def test_fa2_prefill(fake_providers: dict[str, Any]) -> None:
    """Key lengths are passed as running sums."""
    assert torch.equal(run_prefill("fa2"), Q_PREFILL + 1)
    assert_call(
        fake_providers["fa2_varlen"],
        {
            "q": Q_PREFILL, "k": K, "v": V, "cu_seqlens_q": ints(0, 4, 7),
            "cu_seqlens_k": ints(0, 260, 263), "max_seqlen_q": 4, "max_seqlen_k": 260,
            "softmax_scale": 0.125, "causal": True, "block_table": TABLE[:2],
        },
    )  # fmt: skip


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_torch(fake_providers: dict[str, Any], phase: str) -> None:
    """The signature is the installed torch's own; splits are off, the mask is causal."""
    if "torch" not in fake_providers:
        pytest.skip("this torch's varlen_attn has no block_table")
    decode = phase == "decode"
    q = Q_DECODE if decode else Q_PREFILL
    assert torch.equal(run_decode("torch") if decode else run_prefill("torch"), q + 1)
    assert_call(
        fake_providers["torch"],
        {
            "query": q, "key": K, "value": V,
            "cu_seq_q": ints(0, 1, 2, 3) if decode else ints(0, 4, 7), "cu_seq_k": None,
            "max_q": 1 if decode else 4, "max_k": 512 if decode else 260, "scale": 0.125,
            "window_size": (-1, 0), "enable_gqa": True,
            "seqused_k": ints(300, 5, 0) if decode else ints(260, 3),
            "block_table": TABLE if decode else TABLE[:2], "num_splits": 1,
        },
    )  # fmt: skip


def run_both(made: FlashAttention) -> None:
    made.plan_decode(DECODE)
    made.run_decode(Q_DECODE, K, V, DECODE, torch.zeros_like(Q_DECODE))
    made.plan_prefill(PREFILL)
    made.run_prefill(Q_PREFILL, K, V, PREFILL, torch.zeros_like(Q_PREFILL))


@pytest.mark.parametrize(
    ("provider", "recorders"), [("fa2", ("fa2_kvcache", "fa2_varlen")), ("fa3", ("fa3",))]
)
def test_windows_and_soft_caps_reach_the_providers_that_have_them(
    fake_providers: dict[str, Any], provider: str, recorders: tuple[str, ...]
) -> None:
    """A window of 100 keys is flash-attn's (99, 0), in decode and in prefill."""
    run_both(backend(provider, window=100, cap=30.0))
    calls = [call for name in recorders for call in fake_providers[name].calls]
    assert len(calls) == 2
    for call in calls:
        assert (call["window_size"], call["softcap"], call["causal"]) == ((99, 0), 30.0, True)


def test_a_window_reaches_torch(fake_providers: dict[str, Any]) -> None:
    """torch's causal mask is a window too."""
    if "torch" not in fake_providers:
        pytest.skip("this torch's varlen_attn has no block_table")
    run_both(backend("torch", window=100))
    windows = [call["window_size"] for call in fake_providers["torch"].calls]
    assert windows == [(99, 0), (99, 0)]


@pytest.mark.parametrize(
    ("provider", "rules"),
    [("fa4", {"window": 100}), ("fa4", {"cap": 30.0}), ("torch", {"cap": 30.0})],
)
def test_a_provider_without_them_is_never_made(
    fake_providers: dict[str, Any], provider: str, rules: dict[str, Any]
) -> None:
    """To leave them out would be another model."""
    with pytest.raises(UnsupportedError, match=f"provider {provider} is not given a .*triton"):
        backend(provider, **rules)
