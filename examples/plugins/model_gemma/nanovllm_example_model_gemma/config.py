"""The settings of Gemma 2 and Gemma 3, read from config.json and checked.

A setting that is left out has the value that transformers gives it. Layers are of two kinds, in
the words of `layer_types`: "sliding_attention" sees the last `sliding_window` tokens, its own
included, "full_attention" all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm_core.api import ArchitectureError, AttentionShape, ModelShape
from nanovllm_core.layers import (
    RopeConfig,
    heads_per_rank,
    list_of,
    nested,
    positive_float,
    positive_int,
    refuse_unless,
    true_or_false,
)

SLIDING, FULL = "sliding_attention", "full_attention"

_HEAD_DIM, _KV_HEADS, _QUERY_SCALE, _WINDOW, _EPS = 256, 4, 256.0, 4096, 1e-6
_SCORES_CAP, _LOGITS_CAP = 50.0, 30.0
"""Gemma 2's; without them in config.json, Gemma 3 caps nothing."""
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
"""Gemma 3's, for layers that see everything and for those that slide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """What the decoder of `model.py` is built from, under the names of config.json.

    `layer_types` has an entry for each layer; `sliding_window` is None where the longest context
    fits in it. `ropes` has one for each kind of layer, all of one `max_position`. `scores_cap` and
    `logits_cap`, None for none, are `attn_logit_softcapping` and `final_logit_softcapping`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    query_pre_attn_scalar: float
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    ropes: Mapping[str, RopeConfig]
    qk_norm: bool
    scores_cap: float | None
    logits_cap: float | None

    def window(self, layer: int) -> int | None:
        """The number of last tokens that a layer sees, None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def attention_shape(self, layer: int) -> AttentionShape:
        """What a layer caches and sees: layers of one shape become a cache group."""
        return AttentionShape(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            sliding_window=self.window(layer),
            soft_cap=self.scores_cap,
        )

    def shape(self) -> ModelShape:
        """The facts that the runner needs before the model is built."""
        return ModelShape(
            num_layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            vocab_size=self.vocab_size,
            max_position=self.ropes[FULL].max_position,
            tied_embeddings=self.tie_word_embeddings,
            sliding_window=self.sliding_window,
            soft_cap=self.scores_cap,
            attention_layers=tuple(map(self.attention_shape, range(self.num_hidden_layers))),
        )


def read_gemma2(config: Mapping[str, Any]) -> GemmaConfig:
    """Gemma 2 (arXiv:2408.00118): caps of scores and logits, every second layer slides."""
    rope = RopeConfig.from_config(config, _head_dim(config))
    return _read(
        config,
        {SLIDING: rope, FULL: rope},
        pattern=2,
        qk_norm=False,
        scores_cap=_cap(config, "attn_logit_softcapping", _SCORES_CAP),
        logits_cap=_cap(config, "final_logit_softcapping", _LOGITS_CAP),
    )


def read_gemma3(config: Mapping[str, Any]) -> GemmaConfig:
    """Gemma 3 (arXiv:2503.19786): norms of q and k, a rope for each kind of layer, five of six
    layers slide. transformers knows a cap of its scores, and ignores it; here it is refused."""
    refuse_unless(config, attn_logit_softcapping=None)
    return _read(
        config,
        _gemma3_ropes(config),
        pattern=positive_int(config, "sliding_window_pattern", 6),
        qk_norm=True,
        scores_cap=None,
        logits_cap=_cap(config, "final_logit_softcapping", None),
    )


def _read(
    config: Mapping[str, Any],
    ropes: Mapping[str, RopeConfig],
    *,
    pattern: int,
    qk_norm: bool,
    scores_cap: float | None,
    logits_cap: float | None,
) -> GemmaConfig:
    refuse_unless(config, hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
    if quantization := nested(config, "quantization_config"):
        raise ArchitectureError(
            f"the checkpoint is quantised ({quantization.get('quant_method', 'unknown')}), which "
            "is not supported; use the one in bfloat16"
        )
    num_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = positive_int(config, "num_key_value_heads", _KV_HEADS)
    heads_per_rank(num_heads, num_kv_heads, tp_size=1)  # refuses what no rank could share out
    stated = positive_int(config, "max_position_embeddings")  # a linear factor is in it already
    longest = max([stated, *(one.max_position for one in ropes.values() if one.kind != "linear")])
    num_layers = positive_int(config, "num_hidden_layers")
    kinds = _layer_types(config, num_layers, pattern)
    window = None
    if SLIDING in kinds:
        window = positive_int({"sliding_window": _WINDOW, **config}, "sliding_window")
    return GemmaConfig(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=positive_int(config, "hidden_size"),
        intermediate_size=positive_int(config, "intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=_head_dim(config),
        query_pre_attn_scalar=positive_float(config, "query_pre_attn_scalar", _QUERY_SCALE),
        rms_norm_eps=positive_float(config, "rms_norm_eps", _EPS),
        attention_bias=true_or_false(config, "attention_bias"),
        tie_word_embeddings=true_or_false(config, "tie_word_embeddings", default=True),
        layer_types=kinds,
        sliding_window=window if window is not None and window < longest else None,
        ropes={kind: replace(rope, max_position=longest) for kind, rope in ropes.items()},
        qk_norm=qk_norm,
        scores_cap=scores_cap,
        logits_cap=logits_cap,
    )


def _head_dim(config: Mapping[str, Any]) -> int:
    return positive_int(config, "head_dim", _HEAD_DIM)


def _cap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Absent means the default; null, and only null, means none."""
    value = config.get(key, default)
    return None if value is None else positive_float({key: value}, key)


def _layer_types(config: Mapping[str, Any], num_layers: int, pattern: int) -> tuple[str, ...]:
    """What each layer is: `layer_types`, else every `pattern`-th layer sees everything."""
    kinds = list_of(config, "layer_types", str)
    if config.get("layer_types") is None:
        return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))
    if len(kinds) != num_layers or not {SLIDING, FULL} >= set(kinds):
        raise ArchitectureError(
            f"config.json: layer_types must say {SLIDING} or {FULL} for each of the {num_layers} "
            f"layers, not {len(kinds)} times {', '.join(sorted(set(kinds)))}; "
            "check the checkpoint's config.json"
        )
    return tuple(kinds)


def _gemma3_ropes(config: Mapping[str, Any]) -> dict[str, RopeConfig]:
    """By kind of layer, as transformers 5 writes them, or in the form before it.

    Before, `rope_theta` and `rope_scaling` were those of the full layers and
    `rope_local_base_freq` the theta of the others. `rope_scaling` still counts for the full ones.
    """
    given = nested(config, "rope_parameters")
    if flat := sorted(given.keys() - {SLIDING, FULL}):
        raise ArchitectureError(
            f"config.json: Gemma 3's rope_parameters are stated for {SLIDING} and {FULL} each, and "
            f"{', '.join(flat)} for neither; move them into one of the two"
        )
    local, whole = ({**nested(given, kind)} for kind in (SLIDING, FULL))
    whole |= nested(config, "rope_scaling")
    _set_theta(local, config.get("rope_local_base_freq"), _LOCAL_THETA)
    _set_theta(whole, config.get("rope_theta"), _GLOBAL_THETA)
    longest = {"max_position_embeddings": config.get("max_position_embeddings")}
    return {
        kind: RopeConfig.from_config({**longest, "rope_parameters": rope}, _head_dim(config))
        for kind, rope in ((SLIDING, local), (FULL, whole))
    }


def _set_theta(rope: dict[str, Any], beside: Any, default: float) -> None:
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = default if beside is None else beside
