"""Bugs in qwen3 that no list of sizes shows: the drawn checks of the models' suite catch each.

So do the checks of what lasts between calls and of what spreads between rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_qwen3_mutations import MODEL_CLASS, QWEN3, ROPE_LINE, config, model

DRAWN = "test_drawn_sizes_equal_transformers"
VARIANT = "test_drawn_sizes_with_each_variant_equal_transformers"
FAR = "test_far_positions_equal_transformers"
THOUSANDS = "test_a_pass_of_thousands_of_tokens_equals_transformers"
DRAWN_SPLIT = "test_a_drawn_model_split_over_ranks_equals_the_whole_one"
CALLS = "test_a_call_does_not_depend_on_those_before"
TWO_MODELS = "test_two_models_in_one_process_do_not_meet"
PADDING = "test_garbage_in_padding_does_not_spread"
TIED = "test_a_tied_head_is_the_embedding_itself"
LAYERS = "DecoderLayer(config, context, make_attention(cos_sin_cache), make_mlp(layer))"
EMBED = "residual_TE = self.embed_tokens(input_ids_T)"
ATTEND = "self.attn(qkv_TX, positions_T)"
LAST_NORM = "return self.norm(residual_TE)"
HEAD = "return self.lm_head(hidden_TE, out_TV)"


def with_rope(changes: str) -> tuple[str, str]:
    """The settings of the rope with some changed, as `dataclasses.replace` takes them."""
    return (
        ROPE_LINE,
        f"{ROPE_LINE}\n        rope = __import__('dataclasses').replace(rope, {changes})",
    )


def in_layer(condition: str, statement: str) -> tuple[str, str]:
    """After the layers are built: a statement about each `layer` of number `i` that meets it."""
    return (
        "self.norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)",
        "self.norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)\n"
        "        for i, layer in enumerate(self.layers):\n"
        f"            if {condition}:\n"
        f"                {statement}",
    )


MUTATIONS = [
    model(
        "theta ignored in layer 7",
        DRAWN,
        (
            LAYERS,
            "DecoderLayer(config, context, make_attention(build_cos_sin_cache("
            "__import__('dataclasses').replace(config.rope, theta=1e6), context.device) "
            "if layer == 7 else cos_sin_cache), make_mlp(layer))",
        ),
    ),
    config("theta floored", DRAWN, with_rope("theta=float(int(rope.theta))")),
    config("theta at most a million", DRAWN, with_rope("theta=min(rope.theta, 1e6)")),
    model("logits clipped", DRAWN, (HEAD, f"{HEAD}.clamp_(-100, 100)")),
    model("logits clipped at 1,000", DRAWN, (HEAD, f"{HEAD}.clamp_(-1000, 1000)")),
    model("the residual clipped", DRAWN, (EMBED, f"{EMBED}.clamp_(-500, 500)")),
    model(
        "the epsilon at least 1e-6",
        DRAWN,
        (
            "self.input_layernorm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)",
            "self.input_layernorm = RMSNorm("
            "context, config.hidden_size, max(config.rms_norm_eps, 1e-6))",
        ),
    ),
    model(
        "another epsilon from layer 30 on",
        DRAWN,
        in_layer("i >= 30", "layer.input_layernorm.eps = 1e-6"),
    ),
    model(
        "the 9th KV head is the first",
        DRAWN,
        (
            ATTEND,
            "self.attn(torch.cat([qkv_TX[:, : -self.attn.prep.head_size], qkv_TX[:, "
            "-self.attn.prep.num_kv_heads * self.attn.prep.head_size :][:, : "
            "self.attn.prep.head_size]], dim=1).contiguous() if "
            "self.attn.prep.num_kv_heads > 8 else qkv_TX, positions_T)",
        ),
        ("from torch import Tensor, nn", "import torch\nfrom torch import Tensor, nn"),
    ),
    model(
        "the scale of heads of another size",
        DRAWN,
        ("scale=head_dim**-0.5", "scale=min(head_dim, 128) ** -0.5"),
    ),
    model("ids in 16 bits", DRAWN, (EMBED, EMBED.replace("_ids_T", "_ids_T & 0xffff"))),
    model(
        "biases forgotten in the last layer",
        VARIANT,
        in_layer(
            "config.qkv_bias and i == config.num_hidden_layers - 1",
            "layer.self_attn.o_proj.bias.weight_loader = lambda p, t, s: p.zero_()",
        ),
    ),
    config(
        "a window of 4,096 that nobody asked for",
        FAR,
        (
            "if sliding_window is not None:",
            "sliding_window = sliding_window or 4096\n        if sliding_window is not None:",
        ),
    ),
    model("positions in 16 bits", FAR, (ATTEND, "self.attn(qkv_TX, positions_T & 0xffff)")),
    model(
        "tokens behind the 2,048th of a pass are the one before",
        THOUSANDS,
        (EMBED, f"{EMBED}\n        residual_TE[2048:] = residual_TE[2047:2048]"),
    ),
    model(
        "from the fourth rank on, the first one's heads",
        DRAWN_SPLIT,
        (
            MODEL_CLASS,
            "class FewRanks(QKVParallelLinear):\n"
            "    def finalize(self):\n"
            "        if self.context.tp.size > 4 and self.context.tp.rank > 3:\n"
            "            self.weight.zero_()\n\n\n" + MODEL_CLASS,
        ),
        ("self.qkv_proj = QKVParallelLinear(", "self.qkv_proj = FewRanks("),
    ),
    model(
        "positions kept while the number of tokens is the same",
        CALLS,
        (
            EMBED,
            f"{EMBED}\n"
            "        kept = self.__dict__.setdefault('kept', {})\n"
            "        positions_T = kept.setdefault(len(positions_T), positions_T)",
        ),
    ),
    model(
        "one rope for all models of a shape",
        TWO_MODELS,
        (
            "cos_sin_cache = build_cos_sin_cache(config.rope, context.device)",
            "key = config.rope.rotary_size, config.rope.max_position\n"
            "        if key not in TABLES:\n"
            "            TABLES[key] = build_cos_sin_cache(config.rope, context.device)\n"
            "        cos_sin_cache = TABLES[key]",
        ),
        (MODEL_CLASS, "TABLES = {}\n\n\n" + MODEL_CLASS),
    ),
    model(
        "a maximum over the whole tensor",
        PADDING,
        (
            LAST_NORM,
            "hidden_TE = self.norm(residual_TE)\n"
            "        largest = hidden_TE.abs().amax()\n"
            "        return hidden_TE / largest * largest",
        ),
    ),
    model(
        "a maximum over all logits, in half precision",
        PADDING,
        (
            HEAD,
            "logits_TV = self.lm_head(hidden_TE, out_TV)\n"
            "        if logits_TV.dtype.itemsize > 2:\n"
            "            return logits_TV\n"
            "        return logits_TV.sub_(logits_TV.amax())",
        ),
    ),
    model(
        "a tied head that is copied",
        TIED,
        (
            HEAD,
            "if not hasattr(self, 'copied'):\n"
            "            self.copied = self.lm_head.weight.detach().clone()\n"
            "        logits_TV = hidden_TE @ self.copied.T\n"
            "        return logits_TV if out_TV is None else out_TV.copy_(logits_TV)",
        ),
    ),
    config(
        "a vocabulary that nobody checked",
        "test_a_value_that_no_size_has_is_an_error",
        (
            'vocab_size=positive_int(config, "vocab_size")',
            'vocab_size=config["vocab_size"]',
        ),
    ),
    config(
        "twelve layers unless something is said",
        "test_a_setting_that_is_left_out_is_named_or_has_the_default_of_transformers",
        (
            'positive_int(config, "num_hidden_layers")',
            'positive_int(config, "num_hidden_layers", default=12)',
        ),
    ),
]  # fmt: skip

FURTHER = frozenset(
    {
        "tokens behind the 2,048th of a pass are the one before",
        "theta at most a million",
        "logits clipped at 1,000",
        "the residual clipped",
        "the epsilon at least 1e-6",
        "another epsilon from layer 30 on",
        "the 9th KV head is the first",
        "the scale of heads of another size",
        "ids in 16 bits",
        "positions in 16 bits",
        "a maximum over all logits, in half precision",
    }
)
"""Bugs of a family of which another is caught in every run."""


def number(name: str) -> object:
    """A bug as a parameter, by its place in the list."""
    place = [mutation.name for mutation in MUTATIONS].index(name)
    return pytest.param(place, id=name, marks=[pytest.mark.slow] if name in FURTHER else [])


@pytest.mark.parametrize("number", [number(mutation.name) for mutation in MUTATIONS])
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    QWEN3.assert_caught(tmp_path, 100 + number, MUTATIONS[number])


@pytest.mark.slow
def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """Every check that catches a bug passes without it."""
    QWEN3.assert_passes(tmp_path, MUTATIONS)
