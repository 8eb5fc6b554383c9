"""The settings of a Qwen2 checkpoint, read from config.json and checked.

What config.json leaves out has the value that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_core.api import ArchitectureError, RopeConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WINDOW, _FIRST_SLIDING_LAYER = 4096, 28
"""What `use_sliding_window: true` means without `sliding_window` and `max_window_layers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config:
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
    sliding_window: int | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen2Config:
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
        rope = RopeConfig.from_config(config, head_dim)
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
            rope=rope,
            sliding_window=_window_of_all_layers(config, rope.max_position),
        )


def _window_of_all_layers(config: Mapping[str, Any], longest_context: int) -> int | None:
    """The one window of all layers, or None; a mix of windows and full attention is refused.

    `layer_types` decides, where config.json has it; else the layers from `max_window_layers` on
    slide. None also where the longest context fits in the window, so that it hides nothing.
    """
    if not config.get("use_sliding_window") or config.get("sliding_window", _WINDOW) is None:
        window = None
    else:
        window = _positive(config, "sliding_window", default=_WINDOW)
        if window >= longest_context:
            return None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", _FIRST_SLIDING_LAYER)
        layers = range(_positive(config, "num_hidden_layers"))
        kinds = [_SLIDING if window and layer >= first else _FULL for layer in layers]
    if set(kinds) == {_FULL}:
        return None
    if set(kinds) == {_SLIDING} and window:
        return window
    raise ArchitectureError(
        f"layers attend differently (layer_types {sorted(set(kinds))}, sliding_window {window}); "
        "all must have the same window or none: set use_sliding_window to false in config.json, "
        "and layer_types to null, to attend to the whole context"
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
        raise ArchitectureError(f"hidden_act {activation!r} is not supported: Qwen2 uses 'silu'")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ArchitectureError(
            f"the checkpoint is quantised ({method}), which is not supported; "
            "use the one in bfloat16 or float16"
        )
