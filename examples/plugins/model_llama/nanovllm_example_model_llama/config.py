"""The settings of a Llama or Mistral checkpoint, read from config.json and checked.

The two differ in three settings: only Llama may have biases, only Mistral a sliding window. What
config.json leaves out has the value that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_core.api import ArchitectureError, RopeConfig

_MISTRAL_WINDOW = 4096
"""What a Mistral config.json without `sliding_window` means; null means no window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What the models need of config.json, under the names used there."""

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
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None

    @classmethod
    def of_llama(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read and check; ArchitectureError names the setting that is missing or unsupported."""
        return cls(
            **_shared_settings(config),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )

    @classmethod
    def of_mistral(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read and check; ArchitectureError names the setting that is missing or unsupported."""
        shared = _shared_settings(config)
        window = _mistral_window(config, longest_context=shared["rope"].max_position)
        return cls(**shared, sliding_window=window)


def _shared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_unsupported(config)
    hidden_size = _positive(config, "hidden_size")
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads != 0:
        raise ArchitectureError(
            f"num_attention_heads ({num_heads}) must be divisible by num_key_value_heads "
            f"({num_kv_heads}); check the checkpoint's config.json"
        )
    head_dim = _positive(config, "head_dim", default=hidden_size // num_heads)
    return {
        "vocab_size": _positive(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _positive(config, "intermediate_size"),
        "num_hidden_layers": _positive(config, "num_hidden_layers"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope": RopeConfig.from_config(config, head_dim),
    }


def _mistral_window(config: Mapping[str, Any], longest_context: int) -> int | None:
    """The window; None also where the longest context fits in it, so that it hides nothing."""
    if config.get("sliding_window", _MISTRAL_WINDOW) is None:
        return None
    window = _positive(config, "sliding_window", default=_MISTRAL_WINDOW)
    return window if window < longest_context else None


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
        raise ArchitectureError(
            f"hidden_act {activation!r} is not supported: Llama and Mistral use 'silu'"
        )
    kinds = sorted(set(config.get("layer_types") or ()))
    if len(kinds) > 1:
        raise ArchitectureError(
            f"layer_types mix {', '.join(kinds)}, which is another architecture (Ministral); "
            "here all layers attend alike"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ArchitectureError(
            f"the checkpoint is quantised ({method}), which is not supported; "
            "use the one in bfloat16 or float16"
        )
