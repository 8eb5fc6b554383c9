"""The settings of a Qwen3 checkpoint, read from config.json and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_core.api import ArchitectureError, RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """What the model needs of config.json, under the names used there."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    rope: RopeConfig

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Read and check; ArchitectureError names the setting that is missing or unsupported."""
        _refuse_unsupported(config)
        hidden_size = _positive(config, "hidden_size")
        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", default=num_heads)
        head_dim = _positive(config, "head_dim", default=hidden_size // num_heads)
        if num_heads % num_kv_heads != 0:
            raise ArchitectureError(
                f"num_attention_heads ({num_heads}) must be divisible by num_key_value_heads "
                f"({num_kv_heads}); check the checkpoint's config.json"
            )
        return cls(
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_hidden_layers=_positive(config, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(config.get("attention_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=RopeConfig.from_config(config, head_dim),
        )


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArchitectureError(
            f"config.json: {key} must be a positive integer, not {value!r}; "
            "check the checkpoint's config.json"
        )
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ArchitectureError(f"hidden_act {activation!r} is not supported: Qwen3 uses 'silu'")
    if config.get("use_sliding_window"):
        raise ArchitectureError(
            "use_sliding_window: true is not supported; set it to false in config.json to attend "
            "to the whole context"
        )
    windowed = set(config.get("layer_types") or ()) - {"full_attention"}
    if windowed:
        raise ArchitectureError(
            f"layer_types {sorted(windowed)} are not supported, only 'full_attention'"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ArchitectureError(
            f"the checkpoint is quantised ({method}), which is not supported; "
            "use the one in bfloat16 or float16"
        )
