"""Rotation tables equal transformers' for every supported kind; the others are refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.layers import RopeConfig, build_cos_sin_cache
from nanovllm_kit.numerics import assert_close_report

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


def test_of_two_rope_settings_the_scaling_counts() -> None:
    """A card's yarn, added to a config.json that transformers 5 wrote."""
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "rope_scaling": {**YARN, "rope_theta": 50.0},
    }
    reference = Qwen3Config(**SIZES, **both)
    assert reference.rope_parameters["rope_type"] == "yarn"
    assert_equals_transformers({**SIZES, **both}, reference)


def test_with_two_rope_settings_theta_stands_beside_them() -> None:
    """As in transformers, which takes none of `rope_parameters`."""
    both = {
        "rope_theta": 500.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "rope_scaling": {**YARN},  # transformers writes into it
    }
    assert RopeConfig.from_config({**SIZES, **both}, HEAD_SIZE).theta == 500.0
    assert_equals_transformers({**SIZES, **both}, Qwen3Config(**SIZES, **both))


def test_a_theta_that_the_scaling_would_drop_is_refused() -> None:
    """Transformers falls back to 10,000, with which the model writes nonsense."""
    config = {**SIZES, "rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN}
    with pytest.raises(ArchitectureError, match=r"1000000.0.*add rope_theta to rope_scaling"):
        RopeConfig.from_config(config, HEAD_SIZE)


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


def test_linear_and_yarn_stretch_the_longest_context() -> None:
    """To the original length times the factor, where that is more than the config's own limit.

    Vicuna states the length before the stretching and no original one, DeepSeek-Coder that behind.
    """

    def longest(**rope: Any) -> int:
        return RopeConfig.from_config({**SIZES, "rope_parameters": rope}, HEAD_SIZE).max_position

    assert longest() == 256
    for kind in ("linear", "yarn"):
        assert longest(rope_type=kind, factor=4.0) == 1024
        assert longest(rope_type=kind, factor=0.5) == 256
        for factor, expected in ((4.0, 256), (8.0, 512)):
            original = {"original_max_position_embeddings": 64}
            assert longest(rope_type=kind, factor=factor, **original) == expected
    assert longest(**LLAMA3) == 256
    longer = {**YARN, "factor": 8.0}
    stretched = RopeConfig.from_config({**SIZES, "rope_parameters": longer}, HEAD_SIZE)
    assert math.isclose(stretched.attention_factor, 0.1 * math.log(8.0) + 1.0)


@pytest.mark.parametrize(("stated", "expected"), [({}, 1.0), ({"attention_factor": 0.7}, 0.7)])
def test_the_attn_factor_of_yarns_own_code_counts(
    stated: dict[str, float], expected: float
) -> None:
    """DeepSeek-R1-0528-Qwen3-8B undoes the usual factor with it; transformers ignores the key."""
    rope = {**YARN, "attn_factor": 0.8782488562869419, **stated}
    config = RopeConfig.from_config({**SIZES, "rope_scaling": rope}, HEAD_SIZE)
    assert config.attention_factor == pytest.approx(expected, abs=1e-12)


def test_within_its_length_dynamic_rope_is_the_default_one() -> None:
    """So that the remedy which its refusal names gives the right numbers."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**SIZES, rope_parameters=dynamic))
    cos, _ = theirs(torch.zeros(1), torch.arange(256)[None])
    rope = RopeConfig.from_config({**SIZES, "rope_theta": 500.0}, HEAD_SIZE)
    table = build_cos_sin_cache(rope, torch.device("cpu"))
    torch.testing.assert_close(table[:, : HEAD_SIZE // 2], cos[0, :, : HEAD_SIZE // 2])


def test_a_config_without_rope_settings_rotates_by_the_default() -> None:
    """Theta is 10,000."""
    assert RopeConfig.from_config(SIZES, HEAD_SIZE).theta == 10_000.0


def test_part_of_a_head_can_rotate() -> None:
    """The table is as wide as the part that rotates."""
    rope = RopeConfig.from_config({**SIZES, "partial_rotary_factor": 0.25}, HEAD_SIZE)
    assert build_cos_sin_cache(rope, torch.device("cpu")).shape == (256, HEAD_SIZE // 4)


REFUSED: dict[str, dict[str, Any]] = {
    "'dynamic'.*only default.*cached keys; state 'default'": {
        "rope_type": "dynamic", "factor": 2.0,
    },
    "'longrope'.*cached keys; use another": {"rope_type": "longrope"},
    "rope_type 'spiral' is not supported": {"type": "spiral"},
    "differ between layer types": {"full_attention": {"rope_type": "default"}},
    "mrope_section": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    "linear rope: factor must be a positive number, not None": {"rope_type": "linear"},
    "llama3 rope: high_freq_factor must be a positive number, not None": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    },
    r"low_freq_factor must be at most high_freq_factor \(1.0\), not 4.0": {
        **LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
    },
    "yarn rope: rope_theta must be above 1, not 1.0": {**YARN, "rope_theta": 1},
    "original_max_position_embeddings must be a positive integer, not -64": {
        **YARN, "original_max_position_embeddings": -64,
    },
    "even and between": {"rope_type": "default", "partial_rotary_factor": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_wrong_is_refused_with_a_reason(message: str) -> None:
    """No kind is silently treated as another."""
    with pytest.raises(ArchitectureError, match=message) as caught:
        RopeConfig.from_config({**SIZES, "rope_parameters": REFUSED[message]}, HEAD_SIZE)
    assert str(caught.value).startswith("config.json"), "the file"
    assert re.search("; (use|check|state) ", str(caught.value)), "what to do"


@pytest.mark.parametrize("length", [None, 0, -1, True, 2.7, "256"])
def test_a_config_without_a_maximum_position_is_refused(length: Any) -> None:
    """The table's length comes from it."""
    with pytest.raises(ArchitectureError, match="max_position_embeddings must be a positive int"):
        RopeConfig.from_config({"max_position_embeddings": length}, HEAD_SIZE)


@pytest.mark.parametrize("value", [0, -2.0, math.nan, math.inf, True, "4"])
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "linear"}, "factor"),
        (YARN, "factor"),
        (YARN, "attention_factor"),
        (LLAMA3, "low_freq_factor"),
    ],
)
def test_a_number_that_would_give_nonsense_is_refused(
    settings: dict[str, Any], key: str, value: Any
) -> None:
    """Not a number, infinite, 0 or negative: the tables would hold no angles."""
    config = {**SIZES, "rope_parameters": {**settings, key: value}}
    with pytest.raises(ArchitectureError, match=f"{key} must be a positive number, not {value!r}"):
        RopeConfig.from_config(config, HEAD_SIZE)
