"""The settings of a decoder, read from config.json and checked; `layers.decoder` is built from it.

`DecoderConfig.from_config` refuses what that decoder cannot compute for any architecture. What
depends on the architecture, its `read_config` answers: with an argument of `from_config`, or with
`refuse_unless`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_core.errors import ArchitectureError, shown
from nanovllm_core.interfaces.model import ModelShape, heads_per_rank
from nanovllm_core.layers.rotary import RopeConfig
from nanovllm_core.layers.settings import (
    list_of,
    nested,
    positive_float,
    positive_int,
    true_or_false,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The configuration of `DecoderForCausalLM`, under the names of config.json.

    `num_key_value_heads` divides `num_attention_heads`; `head_dim` need not be their share of
    `hidden_size`. The fields with a default are those in which architectures differ: biases of q, k
    and v, of the attention's output, of the MLP; an RMS norm of each head of q and k;
    `sliding_window`, the number of last keys that a query sees in every layer, None for all.
    """

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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        sliding_window: int | None = None,
        partial_rotary: bool = False,
        default_eps: float = 1e-6,
    ) -> DecoderConfig:
        """Read and check a config.json; the arguments are the architecture's answers.

        A setting that is absent or null has its usual value. `sliding_window` becomes None where
        the longest context fits in it, so that it hides nothing. `partial_rotary`: the architecture
        honours `partial_rotary_factor`. `default_eps`: the norms' epsilon, where config.json has
        none. Raises ArchitectureError, which names the setting, its value and what to do: for one
        that is missing or wrong, another activation than SiLU, layers that differ, a quantised
        checkpoint, a rope that is not served.
        """
        _refuse_what_no_decoder_here_computes(config)
        hidden_size = positive_int(config, "hidden_size")
        num_heads = positive_int(config, "num_attention_heads")
        num_kv_heads = positive_int(config, "num_key_value_heads", default=num_heads)
        heads_per_rank(num_heads, num_kv_heads, tp_size=1)  # refuses what no rank could share out
        head_dim = positive_int(config, "head_dim", default=hidden_size // num_heads)
        rope = RopeConfig.from_config(config, head_dim)
        if rope.rotary_size != head_dim and not partial_rotary:
            raise ArchitectureError(
                f"config.json: by partial_rotary_factor only {rope.rotary_size} of a head's "
                f"{head_dim} dimensions rotate, which is not supported for this architecture; "
                "remove the setting, or use another plugin for its architecture"
            )
        if sliding_window is not None:
            window = positive_int({"sliding_window": sliding_window}, "sliding_window")
            sliding_window = window if window < rope.max_position else None
        return cls(
            vocab_size=positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive_int(config, "intermediate_size"),
            num_hidden_layers=positive_int(config, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=positive_float(config, "rms_norm_eps", default=default_eps),
            tie_word_embeddings=true_or_false(config, "tie_word_embeddings"),
            rope=rope,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            sliding_window=sliding_window,
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
            max_position=self.rope.max_position,
            tied_embeddings=self.tie_word_embeddings,
            sliding_window=self.sliding_window,
        )


def refuse_unless(config: Mapping[str, Any], **served: Any) -> None:
    """Raise ArchitectureError for a setting that is there with another value than the one served.

        refuse_unless(config, mlp_bias=False, layer_types="full_attention")

    Absent and null are fine. Of a list (`layer_types`) every entry must be the value. Call it in
    `read_config` for each setting of the architecture that the model would otherwise ignore.
    """
    for key, only in served.items():
        value = config.get(key)
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and one != only:
                raise ArchitectureError(
                    f"config.json: {key} {shown(one)} is not supported, only {shown(only)}; use "
                    "another checkpoint, or another plugin for its architecture"
                )


def _refuse_what_no_decoder_here_computes(config: Mapping[str, Any]) -> None:
    refuse_unless(config, is_causal=True)
    if config.get("hidden_act") != "swish":  # another name of it
        refuse_unless(config, hidden_act="silu")
    kinds = sorted(set(list_of(config, "layer_types", str)))
    if len(kinds) > 1:
        raise ArchitectureError(
            f"config.json: layer_types mix {', '.join(kinds)}, which is not supported: all layers "
            "attend alike here; use another checkpoint, or another plugin for its architecture"
        )
    if quantization := nested(config, "quantization_config"):
        raise ArchitectureError(
            f"the checkpoint is quantised ({quantization.get('quant_method', 'unknown')}), which "
            "is not supported; use the one in bfloat16 or float16"
        )
