"""Rotation tables equal transformers' for every supported kind; the others are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.layers import RopeConfig, build_cos_sin_cache
from nanovllm_core.testing.numerics import assert_close_report

HEAD_SIZE = 64
SIZES: dict[str, Any] = {"max_position_embeddings": 256, "head_dim": HEAD_SIZE}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn with its own attention factor": {**YARN, "attention_factor": 0.7},
    "yarn with mscale": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn with its own ramp": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn without the original length": {"rope_type": "yarn", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3 with other bounds": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
}


def assert_equals_transformers(config: dict[str, Any], reference_config: Qwen3Config) -> None:
    rope = RopeConfig.from_config(config, HEAD_SIZE)
    table = build_cos_sin_cache(rope, torch.device("cpu"))
    positions = torch.arange(rope.max_position)
    cos, sin = Qwen3RotaryEmbedding(reference_config)(torch.zeros(1), positions[None])
    half = HEAD_SIZE // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    assert table.dtype == torch.float32
    # Frequencies may differ in the last bit, which a position of some hundred multiplies.
    assert_close_report(table, expected, rel_norm=1e-5, max_abs=1e-4)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_those_of_transformers(kind: str, theta: float) -> None:
    """With the dict that transformers 5 writes to config.json (bug 6 of the peers)."""
    reference = Qwen3Config(**SIZES, rope_parameters={**KINDS[kind], "rope_theta": theta})
    assert_equals_transformers(reference.to_dict(), reference)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_older_configs_are_read_as_transformers_reads_them(kind: str, key: str) -> None:
    """`rope_scaling` beside `rope_theta`, its kind under either name."""
    scaling = {**KINDS[kind], key: kind}
    if key == "type":
        del scaling["rope_type"]
    config = {**SIZES, "rope_theta": 500_000.0, "rope_scaling": scaling}
    reference = Qwen3Config(**SIZES, rope_parameters={**KINDS[kind], "rope_theta": 500_000.0})
    assert_equals_transformers(config, reference)


def test_scaling_is_not_ignored() -> None:
    """Each kind gives another table: none falls back to the default one."""
    tables = [
        build_cos_sin_cache(
            RopeConfig.from_config({**SIZES, "rope_parameters": settings}, HEAD_SIZE),
            torch.device("cpu"),
        )[:256]
        for settings in KINDS.values()
    ]
    for i, table in enumerate(tables):
        assert not any(torch.allclose(table, other) for other in tables[:i])


def test_a_rope_config_is_hashable() -> None:
    """So that tables can be shared by key (bug 6 of the peers)."""
    configs = [
        RopeConfig.from_config({**SIZES, "rope_parameters": dict(YARN)}, HEAD_SIZE)
        for _ in range(2)
    ]
    assert len(set(configs)) == 1


def test_yarn_stretches_the_longest_context() -> None:
    """To the original length times the factor, where that is more than the config's own limit."""
    plain = RopeConfig.from_config({**SIZES, "rope_parameters": None}, HEAD_SIZE)
    assert plain.max_position == 256
    longer = {**YARN, "factor": 8.0}
    stretched = RopeConfig.from_config({**SIZES, "rope_parameters": longer}, HEAD_SIZE)
    assert stretched.max_position == 512
    assert math.isclose(stretched.attention_factor, 0.1 * math.log(8.0) + 1.0)


def test_a_config_without_rope_settings_rotates_by_the_default() -> None:
    """Theta is 10,000."""
    assert RopeConfig.from_config(SIZES, HEAD_SIZE).theta == 10_000.0


def test_part_of_a_head_can_rotate() -> None:
    """The table is as wide as the part that rotates."""
    rope = RopeConfig.from_config({**SIZES, "partial_rotary_factor": 0.25}, HEAD_SIZE)
    assert build_cos_sin_cache(rope, torch.device("cpu")).shape == (256, HEAD_SIZE // 4)


REFUSED: dict[str, dict[str, Any]] = {
    "'dynamic'.*already cached.*supported are default": {"rope_type": "dynamic", "factor": 2.0},
    "'longrope'.*already cached": {"rope_type": "longrope"},
    "'spiral'.*unknown": {"type": "spiral"},
    "differ between layer types": {"full_attention": {"rope_type": "default"}},
    "mrope_section": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    "linear rope has no 'factor'": {"rope_type": "linear"},
    "llama3 rope has no 'high_freq_factor'": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    },
    "even and between": {"rope_type": "default", "partial_rotary_factor": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_wrong_is_refused_with_a_reason(message: str) -> None:
    """No kind is silently treated as another."""
    with pytest.raises(ArchitectureError, match=message):
        RopeConfig.from_config({**SIZES, "rope_parameters": REFUSED[message]}, HEAD_SIZE)


def test_a_config_without_a_maximum_position_is_refused() -> None:
    """The table's length comes from it."""
    with pytest.raises(ArchitectureError, match="max_position_embeddings"):
        RopeConfig.from_config({}, HEAD_SIZE)
