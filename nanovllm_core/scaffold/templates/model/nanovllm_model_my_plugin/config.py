"""The settings of a checkpoint, read from its config.json and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_core.api import ArchitectureError, RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the model needs of config.json, under the names used there."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read and check; ArchitectureError names the setting that is missing or unsupported."""
        _refuse_unsupported(config)
        hidden_size = _positive(config, "hidden_size")
        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ArchitectureError(
                f"config.json: num_attention_heads ({num_heads}) must be divisible by "
                f"num_key_value_heads ({num_kv_heads}); correct one of them"
            )
        head_dim = _positive(config, "head_dim", default=hidden_size // num_heads)
        return cls(
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_hidden_layers=_positive(config, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=RopeConfig.from_config(config, head_dim),
        )


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArchitectureError(
            f"config.json: {key} must be a positive integer, not {value!r}; correct it"
        )
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """What this model would compute wrongly is refused, never ignored."""
    for key, supported in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("sliding_window", None),
        ("quantization_config", None),
    ):
        value = config.get(key, supported)
        if value != supported:
            raise ArchitectureError(
                f"config.json: {key} {value!r} is not supported, only {supported!r}; use another "
                "checkpoint"
            )
