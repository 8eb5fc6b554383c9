"""config.json beyond a decoder's usual settings: latent attention, mixtures, groups of experts.

What it leaves out has the value that transformers gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_core.api import ArchitectureError, Routing
from nanovllm_core.layers import (
    LatentConfig,
    RopeConfig,
    nested,
    positive_float,
    positive_int,
    refuse_unless,
    true_or_false,
)


def read_latent(config: Mapping[str, Any], rope: RopeConfig) -> LatentConfig:
    """The sizes of latent attention; `rope` rotates `qk_rope_head_dim` numbers.

    The norms within attention have an epsilon of 1e-6, whatever `rms_norm_eps` is.
    """
    num_heads = positive_int(config, "num_attention_heads")
    refuse_unless(
        config,
        attention_bias=False,
        rope_interleave=True,
        num_key_value_heads=num_heads,
        head_dim=rope.rotary_size,  # transformers writes it so; published checkpoints have none
    )
    nope_size = positive_int(config, "qk_nope_head_dim", default=128)
    compressed = config.get("q_lora_rank", 1536) is not None  # null: queries are not compressed
    return LatentConfig(
        hidden_size=positive_int(config, "hidden_size"),
        num_attention_heads=num_heads,
        kv_lora_rank=positive_int(config, "kv_lora_rank", default=512),
        qk_nope_head_dim=nope_size,
        qk_rope_head_dim=rope.rotary_size,
        v_head_dim=positive_int(config, "v_head_dim", default=128),
        scale=_score_scale(config, rope, nope_size + rope.rotary_size),
        q_lora_rank=positive_int(config, "q_lora_rank", default=1536) if compressed else None,
    )


def _score_scale(config: Mapping[str, Any], rope: RopeConfig, key_size: int) -> float:
    """1 / sqrt(key size). A stretched rope sharpens scores: `mscale_all_dim` says how much.

    yarn (arXiv:2309.00071, 3.4) multiplies q and k by mscale = 0.1 ln(factor) + 1. DeepSeek leaves
    the part of mscale that `mscale_all_dim` states to the scores, where it counts twice.
    """
    scaling = nested(config, "rope_scaling") or nested(config, "rope_parameters")
    if rope.kind == "default" or rope.factor <= 1 or not scaling.get("mscale_all_dim"):
        return 1.0 / math.sqrt(key_size)
    weight = positive_float(scaling, "mscale_all_dim", where="config.json, rope")
    mscale = 0.1 * weight * math.log(rope.factor) + 1.0
    return mscale * mscale / math.sqrt(key_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """The mixtures of a model: layers from `first` on have one, every `step`-th of them.

    `shared_size` is the width of the experts that all tokens go through, as one MLP; None for none.
    `has_bias`: the router has a bias for the choice.
    """

    num_experts: int
    expert_size: int
    shared_size: int | None
    first: int
    step: int
    routing: Routing
    has_bias: bool

    def is_in(self, layer: int) -> bool:
        """Whether a layer, from 0, has a mixture."""
        return layer >= self.first and layer % self.step == 0


def read_v2_mixture(config: Mapping[str, Any]) -> MixtureConfig:
    """DeepSeek-V2: softmax; the best experts, or the best of the groups with the best expert.

    `norm_topk_prob` is refused: DeepSeek's code then leaves out `routed_scaling_factor`, and
    transformers ignores the setting.
    """
    refuse_unless(config, scoring_func="softmax", norm_topk_prob=False)
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ArchitectureError(
            f"config.json: topk_method {method!r} is not supported for DeepSeek-V2, only 'greedy' "
            "and 'group_limited_greedy'; check the checkpoint's config.json"
        )
    in_groups = method == "group_limited_greedy"
    routing = Routing(
        top_k=positive_int(config, "num_experts_per_tok"),
        num_groups=positive_int(config, "n_group") if in_groups else 1,
        top_groups=positive_int(config, "topk_group") if in_groups else 1,
        group_score="max",
        exact_logits=True,
        scale=positive_float(config, "routed_scaling_factor", default=1.0),
    )
    return _mixture(
        config, routing, num_experts=64, expert_size=1407, num_shared=2, first=0, has_bias=False
    )


def read_v3_mixture(config: Mapping[str, Any]) -> MixtureConfig:
    """DeepSeek-V3: sigmoid; a bias for the choice; groups by the sum of their two best experts."""
    refuse_unless(config, scoring_func="sigmoid", topk_method="noaux_tc")
    routing = Routing(
        top_k=positive_int(config, "num_experts_per_tok", default=8),
        scoring="sigmoid",
        renormalize=true_or_false(config, "norm_topk_prob", default=True),
        num_groups=positive_int(config, "n_group", default=8),
        top_groups=positive_int(config, "topk_group", default=4),
        group_score="top2",
        exact_logits=True,
        scale=positive_float(config, "routed_scaling_factor", default=2.5),
    )
    return _mixture(
        config, routing, num_experts=256, expert_size=2048, num_shared=1, first=3, has_bias=True
    )


def _mixture(
    config: Mapping[str, Any],
    routing: Routing,
    *,
    num_experts: int,
    expert_size: int,
    num_shared: int,
    first: int,
    has_bias: bool,
) -> MixtureConfig:
    """The settings that both have, with the defaults of each."""
    num_experts = positive_int(config, "n_routed_experts", default=num_experts)
    _check_groups(routing, num_experts)
    expert_size = positive_int(config, "moe_intermediate_size", default=expert_size)
    num_shared = read_count(config, "n_shared_experts", default=num_shared)
    return MixtureConfig(
        num_experts=num_experts,
        expert_size=expert_size,
        shared_size=num_shared * expert_size or None,
        first=read_count(config, "first_k_dense_replace", default=first),
        step=positive_int(config, "moe_layer_freq", default=1),
        routing=routing,
        has_bias=has_bias,
    )


def _check_groups(routing: Routing, num_experts: int) -> None:
    """Raise ArchitectureError where a token could not choose so many experts by this rule."""
    groups, top_groups = routing.num_groups, routing.top_groups
    if num_experts % groups or top_groups > groups:
        raise ArchitectureError(
            f"config.json: n_group ({groups}) must divide n_routed_experts ({num_experts}), and "
            f"topk_group ({top_groups}) must not be more; check the checkpoint's config.json"
        )
    group_size = num_experts // groups
    if routing.group_score == "top2" and group_size < 2:
        raise ArchitectureError(
            f"config.json: n_group ({groups}) leaves {group_size} of n_routed_experts "
            f"({num_experts}) in a group, and a group is judged by two; check the checkpoint's "
            "config.json"
        )
    if routing.top_k > top_groups * group_size:
        raise ArchitectureError(
            f"config.json: num_experts_per_tok ({routing.top_k}) is more than the "
            f"{top_groups * group_size} experts that a token may choose from (n_routed_experts "
            f"{num_experts}, n_group {groups}, topk_group {top_groups}); check the checkpoint's "
            "config.json"
        )


def read_count(config: Mapping[str, Any], key: str, *, default: int) -> int:
    """A number of things of config.json, which may be 0; null is 0, and absent means `default`."""
    value = config.get(key, default)
    value = 0 if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ArchitectureError(
            f"config.json: {key} must be 0 or a positive integer, not {value!r}; check the "
            "checkpoint's config.json"
        )
    return value


def read_block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """(rows, columns) of a block of float8 weights; None for other checkpoints, quantised or not.

    DeepSeek-V3 is published in this form, with blocks of 128 x 128. Its activations are not
    quantised here.
    """
    quantization = nested(config, "quantization_config")
    size = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or quantization.get("fmt", "e4m3") != "e4m3":
        return None
    match size:
        case [int() as rows, int() as columns] if rows > 0 and columns > 0:
            return rows, columns
    return None
