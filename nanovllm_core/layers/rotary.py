"""Rotary position embedding (arXiv:2104.09864): from a config.json to a table of cos and sin.

Supported kinds: default, linear, yarn (arXiv:2309.00071) and llama3. All have fixed frequencies: a
key stays right in the cache however long its sequence grows. `dynamic` and `longrope` change the
frequencies with the sequence's length, under keys already cached, and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm_core.errors import ArchitectureError, shown
from nanovllm_core.layers.settings import nested, positive_float, positive_int, true_or_false, wrong

_DEFAULT_THETA = 10_000.0
_REMEDY = "use another checkpoint, or another plugin for its architecture"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotation of heads, hashable: of the first `rotary_size` dimensions of each head.

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
        kind is called `type` or `rope_type`. Where both are there, `rope_scaling` counts.
        `max_position` is the longest context that the settings allow: linear and yarn stretch it
        beyond `max_position_embeddings`, to `factor` times `original_max_position_embeddings`, by
        default the same length. Raises ArchitectureError for kinds that are unknown or would be
        wrong here, and for numbers that are.
        """
        rope = _rope_settings(config)
        if kinds := sorted(key for key, value in rope.items() if isinstance(value, Mapping)):
            raise ArchitectureError(
                f"config.json: rope_parameters differ between layer types ({', '.join(kinds)}), "
                f"which is not supported: all layers must rotate alike; {_REMEDY}"
            )
        kind = rope.get("rope_type", rope.get("type")) or "default"
        if kind not in [*_FREQUENCIES]:  # it need not be hashable
            # Up to there dynamic frequencies are the default ones.
            dynamic = "state 'default' for sequences of at most max_position_embeddings"
            raise ArchitectureError(
                f"config.json: rope_type {shown(kind)} is not supported, only "
                f"{', '.join(_FREQUENCIES)}, and no kind whose rotation changes under cached keys; "
                f"{dynamic if kind == 'dynamic' else _REMEDY}"
            )
        if "mrope_section" in rope:
            raise ArchitectureError(
                f"config.json: mrope_section (multimodal rope) is not supported; {_REMEDY}"
            )
        plain = cls(
            theta=positive_float(rope, "rope_theta", _DEFAULT_THETA),
            rotary_size=_rotary_size(head_size, positive_float(rope, "partial_rotary_factor", 1.0)),
            max_position=positive_int(config, "max_position_embeddings"),
        )
        return plain if kind == "default" else _stretched(plain, kind, config, rope)


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping for all; `rope_scaling` replaces `rope_parameters`, as it does in transformers.

    A theta that this would drop for the default is refused: to use it would be to guess.
    """
    scaling, parameters = nested(config, "rope_scaling"), nested(config, "rope_parameters")
    shared = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = {**shared, **(scaling or parameters)}
    dropped = parameters.get("rope_theta") if scaling else None
    if rope["rope_theta"] is None and dropped not in (None, _DEFAULT_THETA):
        raise ArchitectureError(
            f"config.json: rope_scaling replaces rope_parameters, and has no rope_theta ("
            f"rope_parameters: {shown(dropped)}); add rope_theta to rope_scaling"
        )
    return rope


def _rotary_size(head_size: int, partial: float) -> int:
    size = int(head_size * partial)
    if size % 2 != 0 or not 0 < size <= head_size:
        product = f"the rotary size (head size {head_size} x partial_rotary_factor {partial})"
        raise wrong("config.json", product, f"even and between 2 and {head_size}", size)
    return size


def _stretched(
    plain: RopeConfig, kind: str, config: Mapping[str, Any], rope: Mapping[str, Any]
) -> RopeConfig:
    """The settings that linear, yarn and llama3 add to a plain rope."""
    where = f"config.json, {kind} rope"
    number = partial(positive_float, rope, where=where)
    key = "original_max_position_embeddings"
    lengths = {key: config.get(key) or rope.get(key)}
    original = positive_int(lengths, key, plain.max_position, where=where)
    # A yarn config without a factor means the ratio of the two lengths.
    factor = number("factor", plain.max_position / original if kind == "yarn" else None)
    scaled = replace(plain, kind=kind, factor=factor, original_max_position=original)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low > high:
            raise wrong(where, "low_freq_factor", f"at most high_freq_factor ({high})", low)
        return replace(scaled, low_freq_factor=low, high_freq_factor=high)
    scaled = replace(scaled, max_position=max(plain.max_position, int(original * factor)))
    return _with_yarn(scaled, rope, number) if kind == "yarn" else scaled


def _with_yarn(
    scaled: RopeConfig, rope: Mapping[str, Any], number: Callable[..., float]
) -> RopeConfig:
    if scaled.theta <= 1:
        raise wrong("config.json, yarn rope", "rope_theta", "above 1", scaled.theta)

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if scaled.factor <= 1 else 0.1 * weight * math.log(scaled.factor) + 1.0

    usual = mscale()
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        usual = mscale(number("mscale")) / mscale(number("mscale_all_dim"))
    # The key of YaRN's own code, which transformers ignores.
    usual *= number("attn_factor", 1.0)
    return replace(
        scaled,
        attention_factor=number("attention_factor", usual),
        # For a bound of the ramp 0 means the usual value, as in transformers.
        beta_fast=number("beta_fast") if rope.get("beta_fast") else scaled.beta_fast,
        beta_slow=number("beta_slow") if rope.get("beta_slow") else scaled.beta_slow,
        truncate=true_or_false(rope, "truncate", default=True),
    )


def _default_frequencies(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.rotary_size, 2, dtype=torch.float32) / rope.rotary_size
    return 1.0 / rope.theta**exponents


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


_FREQUENCIES: dict[str, Callable[[RopeConfig], Tensor]] = {
    "default": _default_frequencies,
    "linear": lambda rope: _default_frequencies(rope) / rope.factor,
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
