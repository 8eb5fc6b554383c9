"""Rotary position embedding (arXiv:2104.09864): from a config.json to a table of cos and sin.

Supported kinds: default, linear, yarn (arXiv:2309.00071) and llama3. All have fixed frequencies: a
key stays right in the cache however long its sequence grows. `dynamic` and `longrope` change the
frequencies with the sequence's length, under keys already cached, and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm_core.errors import ArchitectureError

_DEFAULT_THETA = 10_000.0
_REFUSED = {
    "dynamic": "its base grows with the sequence, under keys that are already cached",
    "longrope": "its factors change with the sequence's length, under keys already cached",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How heads rotate, hashable. `rotary_size`: the first dimensions of a head that do.

    `factor` and `original_max_position` describe the stretching that linear, yarn and llama3 do;
    `attention_factor` multiplies cos and sin.
    """

    kind: str = "default"
    theta: float = _DEFAULT_THETA
    rotary_size: int
    max_position: int
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_size: int) -> RopeConfig:
        """Read config.json, in transformers' forms before and since version 5.

        Since 5 all is in `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`, whose
        kind is called `type` or `rope_type`. `max_position` is the longest context that the
        settings allow: yarn stretches it beyond `max_position_embeddings`. Raises
        ArchitectureError for kinds that are unknown or would be wrong here.
        """
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ArchitectureError(
                f"rope_parameters differ between layer types ({', '.join(sorted(rope))}), "
                "which is not supported: all layers must rotate alike"
            )
        kind = rope.get("rope_type", rope.get("type")) or "default"
        if kind not in _FREQUENCIES:
            reason = _REFUSED.get(kind, "it is unknown here")
            raise ArchitectureError(
                f"rope type {kind!r} is not supported: {reason}; "
                f"supported are {', '.join(_FREQUENCIES)}"
            )
        if "mrope_section" in rope:
            raise ArchitectureError("mrope_section (multimodal rope) is not supported")
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
        theta = rope.get("rope_theta", config.get("rope_theta"))
        plain = cls(
            theta=float(_DEFAULT_THETA if theta is None else theta),
            rotary_size=_rotary_size(head_size, partial),
            max_position=int(_require(config, "max_position_embeddings", "config.json")),
        )
        return plain if kind == "default" else _stretched(plain, kind, config, rope)


def _require(settings: Mapping[str, Any], key: str, where: str) -> Any:
    if settings.get(key) is None:
        raise ArchitectureError(f"{where} has no {key!r}; add it to the checkpoint's config.json")
    return settings[key]


def _rotary_size(head_size: int, partial: float) -> int:
    size = int(head_size * partial)
    if size % 2 != 0 or not 0 < size <= head_size:
        raise ArchitectureError(
            f"the rotary size ({size} = head size {head_size} x partial_rotary_factor {partial}) "
            f"must be even and between 2 and {head_size}"
        )
    return size


def _stretched(
    plain: RopeConfig, kind: str, config: Mapping[str, Any], rope: Mapping[str, Any]
) -> RopeConfig:
    """The settings that linear, yarn and llama3 add to a plain rope."""
    key = "original_max_position_embeddings"
    original = int(config.get(key) or rope.get(key) or plain.max_position)
    # A yarn config without a factor means the ratio of the two lengths.
    ratio = plain.max_position / original if kind == "yarn" else None
    factor = float(rope.get("factor") or ratio or _require(rope, "factor", f"{kind} rope"))
    scaled = replace(plain, kind=kind, factor=factor, original_max_position=original)
    if kind == "yarn":
        return replace(
            scaled,
            attention_factor=_yarn_attention_factor(rope, factor),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            max_position=max(plain.max_position, int(original * factor)),
        )
    if kind == "llama3":
        return replace(
            scaled,
            low_freq_factor=float(_require(rope, "low_freq_factor", "llama3 rope")),
            high_freq_factor=float(_require(rope, "high_freq_factor", "llama3 rope")),
        )
    return scaled


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    of, over = rope.get("mscale"), rope.get("mscale_all_dim")
    return mscale(of) / mscale(over) if of and over else mscale()


def _default_frequencies(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.rotary_size, 2, dtype=torch.float32) / rope.rotary_size
    return 1.0 / rope.theta**exponents


def _linear_frequencies(rope: RopeConfig) -> Tensor:
    return _default_frequencies(rope) / rope.factor


def _yarn_frequencies(rope: RopeConfig) -> Tensor:
    """Fast dimensions keep their frequency, slow ones are stretched, with a ramp between.

    A dimension's place on the ramp follows from how often it turns within the original context.
    """

    def dimension_that_turns(times: float) -> float:
        per_turn = rope.original_max_position / (times * 2 * math.pi)
        return rope.rotary_size * math.log(per_turn) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_size - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; no division by zero
    dims = torch.arange(rope.rotary_size // 2, dtype=torch.float32)
    stretched = ((dims - low) / (high - low)).clamp(0, 1)
    fast = _default_frequencies(rope)
    return fast / rope.factor * stretched + fast * (1 - stretched)


def _llama3_frequencies(rope: RopeConfig) -> Tensor:
    """Short wavelengths stay, long ones are stretched, a smooth blend between the two bounds."""
    fast = _default_frequencies(rope)
    turns = rope.original_max_position * fast / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * fast / rope.factor + blend * fast


_FREQUENCIES = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "yarn": _yarn_frequencies,
    "llama3": _llama3_frequencies,
}


def build_cos_sin_cache(rope: RopeConfig, device: torch.device) -> Tensor:
    """The table [max_position, rotary_size] float32: cos of every frequency, then sin.

    Computed on the CPU, so that every device and rank holds the same numbers.
    """
    with torch.device("cpu"):
        positions = torch.arange(rope.max_position, dtype=torch.float32)
        angles = torch.outer(positions, _FREQUENCIES[rope.kind](rope))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return table.to(device)
