"""Layers of equal shapes form groups; every group has as many slots, and few stay empty."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.interfaces.cache_groups import SequenceNeed, make_groups
from nanovllm_core.interfaces.model import AttentionShape, LatentHeads, ModelShape


def attention(window: int | None = None) -> AttentionShape:
    return AttentionShape(num_heads=4, num_kv_heads=2, head_size=16, sliding_window=window)


def shape(*layers: AttentionShape) -> ModelShape:
    return ModelShape(
        num_layers=len(layers),
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        vocab_size=100,
        max_position=128,
        attention_layers=layers,
    )


def slots(local: int, whole: int) -> list[int]:
    """The layers of each group of a model with so many layers of a window, and of none."""
    groups = make_groups(shape(*[attention(8)] * local, *[attention()] * whole))
    return [len(group.layers) for group in groups]


def test_layers_that_are_all_alike_are_one_group() -> None:
    """Stated layer by layer or by the model's own numbers: a slot for each layer."""
    [group] = make_groups(shape(*[attention(8)] * 26))
    assert group.layers == tuple(range(26))
    assert group.sliding_window == 8


def test_groups_of_known_models() -> None:
    """Gemma 2 2B; Gemma 3 1B, 4B, 12B and 27B; one odd layer among many."""
    assert slots(13, 13) == [13, 13]
    assert slots(22, 4) == [4, 4, 4, 4, 4, 2, 4]
    assert slots(29, 5) == [5, 5, 5, 5, 5, 4, 5]
    assert slots(40, 8) == [8, 8, 8, 8, 8, 8]
    assert slots(52, 10) == [10, 10, 10, 10, 10, 2, 10]
    assert slots(31, 1) == [5, 5, 5, 5, 5, 5, 1, 1]


@settings(deadline=None)
@given(st.lists(st.sampled_from([None, 8, 16, 1024]), min_size=1, max_size=80))
def test_every_layer_has_one_slot_of_a_group_of_its_shape(windows: list[int | None]) -> None:
    """A group without a window leaves as few slots empty as eight groups allow."""
    groups = make_groups(shape(*map(attention, windows)))
    assert len(groups) <= 8
    assert sorted(layer for group in groups for layer in group.layers) == [*range(len(windows))]
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {group.sliding_window}
        assert list(group.layers) == sorted(group.layers)
    most = max(len(group.layers) for group in groups)
    whole = sum(group.sliding_window is None for group in groups)
    counts = Counter(windows)
    for other in range(1, max(counts.values()) + 1):
        if sum(-(-count // other) for count in counts.values()) <= 8:
            assert most * whole <= other * -(-counts[None] // other)


@settings(deadline=None)
@given(st.data())
def test_the_peak_holds_every_chunk_with_its_window(data: st.DataObject) -> None:
    """Wherever chunks are cut, no group holds more blocks than its part of the peak."""
    block_size, length = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 80))
    max_chunk, window = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40))
    peak = SequenceNeed((None, window), block_size, max_chunk).blocks(length)
    whole = -(-length // block_size)
    start = 0
    while start < length:
        stop = min(length, start + data.draw(st.integers(1, max_chunk)))
        first = max(0, start - window + 1) // block_size
        assert whole + (-(-stop // block_size) - first) <= peak
        start = stop


def test_layers_that_are_not_all_stated_are_refused() -> None:
    """With both numbers."""
    with pytest.raises(ArchitectureError, match=r"states 1 attention_layers and num_layers=2"):
        ModelShape(
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_size=16,
            vocab_size=100,
            max_position=128,
            attention_layers=(attention(),),
        )


def test_a_rank_has_its_share_of_the_heads() -> None:
    """Fewer KV heads than ranks are replicated; what is kept of a token follows."""
    one = attention()
    assert one.elements_per_token == 2 * 2 * 16
    assert one.on_rank(4).num_kv_heads == 1
    assert one.on_rank(4).num_heads == 1
    assert one.on_rank(1) == one


def test_a_latent_row_is_kept_once_and_whole_on_every_rank() -> None:
    """Values are a part of it; only the heads of q are shared out."""
    heads = LatentHeads(latent_size=512, key_size=192, value_size=128)
    one = AttentionShape(num_heads=16, num_kv_heads=1, head_size=576, latent=heads)
    assert one.elements_per_token == 576
    assert one.on_rank(4) == replace(one, num_heads=4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2"),
        ({"head_size": 511}, "head_size=511"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"soft_cap": 30.0}, "soft_cap=30.0"),
    ],
)
def test_a_latent_layer_with_what_its_prompts_would_leave_out_is_refused(
    wrong: dict[str, float], words: str
) -> None:
    """Packed calls know no window and no cap, and all heads share one row."""
    heads = LatentHeads(latent_size=512, key_size=192, value_size=128)
    right: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 1, "head_size": 576}
    AttentionShape(**right, latent=heads)
    with pytest.raises(ArchitectureError, match=words):
        AttentionShape(**(right | wrong), latent=heads)
