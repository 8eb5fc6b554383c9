"""Bugs planted in qwen3: the models' suite catches each by the check that names the matter.

Most of that model is the core's decoder, so the copy has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .mutation import Mutation, Subject, numbered

pytest.importorskip("nanovllm_model_qwen3", reason="needs the qwen3 plugin")

QWEN3 = Subject(
    package="nanovllm_model_qwen3",
    inlined=tuple(
        f"nanovllm_core.layers.{module}"
        for module in ("decoder", "decoder_config", "linear", "mlp", "embedding")
    ),
    suite="""
import pytest
from nanovllm_kit import ModelConformance, PluginUnderTest
from COPY.plugin import nanovllm_models

class TestCopy(ModelConformance):
    variants = {"attention biases": {"attention_bias": True}}
    rope_kinds = frozenset({"default", "linear", "yarn", "llama3"})

    @pytest.fixture
    def plugin(self):
        [spec] = nanovllm_models()
        return PluginUnderTest(spec, spec.options(), "COPY.plugin")
""",
)

BUILT = "test_the_model_of_the_test_configuration_can_be_built"
LOGITS = "test_logits_equal_those_of_transformers"
SPLIT = "test_the_model_split_over_ranks_equals_the_whole_one"
HONOURED = "test_a_setting_is_honoured_or_refused"
ROPE = "test_a_kind_of_rope_is_honoured_or_refused"
REFUSED = "test_a_setting_that_cannot_be_served_is_refused"
WEIGHTS = "test_every_weight_is_needed"
CAPTURED = "test_a_pass_can_be_captured_and_replayed"
HALF = "test_half_precision_is_computed_in_its_own_dtype"
KERNELS = "test_the_kernel_set_alone_reads_the_weight_matrices"
CHUNKS = "test_chunks_and_single_tokens_equal_one_prefill"


def planted_in(file: str) -> Callable[..., Mutation]:
    def mutation(
        name: str, caught_by: str, *edits: tuple[str, str], peers: int | None = None
    ) -> Mutation:
        return Mutation(name=name, file=file, edits=edits, caught_by=caught_by, peers=peers)

    return mutation


model = planted_in("decoder.py")
config = planted_in("decoder_config.py")
linear = planted_in("linear.py")
embedding = planted_in("embedding.py")
own = planted_in("model.py")

ROPE_LINE = "rope = RopeConfig.from_config(config, head_dim)"
MODEL_CLASS = "class SelfAttention(nn.Module):"

MUTATIONS = [
    config(
        "rope settings in a dict are ignored",
        ROPE,
        (
            ROPE_LINE,
            "rope = RopeConfig.from_config({k: v for k, v in config.items() "
            "if k not in ('rope_parameters', 'rope_scaling')}, head_dim)",
        ),
        peers=6,
    ),
    config(
        "rope scaling in the old form is ignored",
        "test_rope_settings_in_the_old_form_mean_the_same",
        (
            ROPE_LINE,
            "rope = RopeConfig.from_config({k: v for k, v in config.items() "
            "if k != 'rope_scaling'}, head_dim)",
        ),
        peers=6,
    ),
    config(
        "an unknown kind of rope counts as none",
        REFUSED,
        (
            ROPE_LINE,
            "rope = RopeConfig.from_config({**config, 'rope_parameters': {'rope_theta': "
            "(config.get('rope_parameters') or config).get('rope_theta', 1e4)}}, head_dim)",
        ),
        peers=6,
    ),
    config(
        "rope theta ignored",
        LOGITS,
        (
            ROPE_LINE,
            "rope = __import__('dataclasses').replace("
            "RopeConfig.from_config(config, head_dim), theta=1e6)",
        ),
    ),
    model(
        "positions off by one",
        "test_the_last_position_of_the_shape_can_be_computed",
        ("self.attn(qkv_TX, positions_T)", "self.attn(qkv_TX, positions_T + 1)"),
        peers=10,
    ),
    model(
        "positions counted anew in every pass",
        CHUNKS,
        (
            "residual_TE = self.embed_tokens(input_ids_T)",
            "residual_TE = self.embed_tokens(input_ids_T)\n"
            "        positions_T = positions_T - positions_T[0]",
        ),
        peers=10,
    ),
    model(
        "the scale of the scores applied twice",
        LOGITS,
        ("scale=head_dim**-0.5", "scale=head_dim**-1.0"),
        peers=15,
    ),
    linear(
        "the bias of the row-parallel layer added on every rank",
        SPLIT,
        ("self.bias if self.context.tp.rank == 0 else None", "self.bias"),
        peers=16,
    ),
    model(
        "fewer KV heads than ranks",
        SPLIT,
        (
            "num_kv_heads=self.qkv_proj.num_kv_heads",
            "num_kv_heads=max(1, config.num_key_value_heads // context.tp.size) "
            "* (2 if context.tp.size > config.num_key_value_heads else 1)",
        ),
        peers=16,
    ),
    model(
        "a weight that is not there is not missed",
        WEIGHTS,
        (
            "        settings = self._settings(config)",
            "        settings = self._settings(config)\n"
            "        self.__class__.ignored_weights = ('model.norm.weight',)",
        ),
        ("self.norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)",
         "self._norm = [RMSNorm(context, config.hidden_size, config.rms_norm_eps)]\n"
         "        self._norm[0].weight.fill_(1.0)"),
        ("for layer in layers), self.norm]", "for layer in layers), self._norm[0]]"),
        ("return self.norm(residual_TE)", "return self._norm[0](residual_TE)"),
        peers=16,
    ),
    model(
        "norm epsilon lost",
        LOGITS,
        (
            "self.input_layernorm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)",
            "self.input_layernorm = RMSNorm(context, config.hidden_size, 1e-6)",
        ),
    ),
    model(
        "the epsilon of the heads' norms lost",
        LOGITS,
        ("            eps=config.rms_norm_eps,\n", ""),
    ),
    model(
        "k_norm skipped",
        LOGITS,
        ("            k_norm_weight=self.k_norm.weight if config.qk_norm else None,\n", ""),
    ),
    model(
        "q's norm used for k",
        LOGITS,
        ("k_norm_weight=self.k_norm.weight", "k_norm_weight=self.q_norm.weight"),
    ),
    model(
        "gate and up swapped",
        LOGITS,
        ('("gate_up_proj", 0)', '("gate_up_proj", 2)'),
        ('("gate_up_proj", 1)', '("gate_up_proj", 0)'),
        ('("gate_up_proj", 2)', '("gate_up_proj", 1)'),
    ),
    model(
        "k and v swapped",
        LOGITS,
        ('"k_proj": ("qkv_proj", "k")', '"k_proj": ("qkv_proj", "v")'),
        ('"v_proj": ("qkv_proj", "v")', '"v_proj": ("qkv_proj", "k")'),
    ),
    model(
        "a tied head is not tied",
        "test_the_head_is_the_embedding_only_where_the_configuration_says_so",
        ("self.model.embed_tokens if settings.tie_word_embeddings else None", "None"),
    ),
    model(
        "a head of its own is ignored",
        BUILT,
        ("if settings.tie_word_embeddings else None", "if True else None"),
    ),
    model(
        "the residual dropped",
        LOGITS,
        ("self.o_proj, residual_SE)", "self.o_proj, residual_SE * 0)"),
    ),
    model(
        "the norm after attention skipped",
        LOGITS,
        (
            "self.mlp(residual_SE, self.post_attention_layernorm)",
            "self.mlp(residual_SE, self.input_layernorm)",
        ),
    ),
    model(
        "the last norm skipped",
        LOGITS,
        ("return self.norm(residual_TE)", "return residual_TE"),
    ),
    model(
        "one layer too few",
        BUILT,
        ("in range(config.num_hidden_layers)", "in range(config.num_hidden_layers - 1)"),
    ),
    own(
        "biases of the attention forgotten",
        HONOURED,
        ('bias = true_or_false(config, "attention_bias")', "bias = False"),
    ),
    config(
        "the size of heads guessed",
        "test_the_shape_agrees_with_the_configuration",
        ("head_size=self.head_dim", "head_size=self.hidden_size // self.num_key_value_heads"),
    ),
    model(
        "the logits go into a tensor of their own",
        "test_logits_go_where_they_are_told",
        ("self.lm_head(hidden_TE, out_TV)", "self.lm_head(hidden_TE)"),
    ),
    model(
        "the logits of all ranks, whatever the width that is asked for",
        "test_each_rank_gives_the_logits_of_its_own_ids_where_they_are_asked",
        (
            "self.lm_head(hidden_TE, out_TV)",
            "self.lm_head(hidden_TE, out_TV if out_TV is not None "
            "and out_TV.shape[1] == self.lm_head.vocab_size else None)",
        ),
    ),
    model(
        "a model that remembers",
        "test_a_second_run_is_bitwise_equal",
        (
            "residual_TE = self.embed_tokens(input_ids_T)",
            "self.calls = getattr(self, 'calls', 0) + 1\n"
            "        residual_TE = self.embed_tokens(input_ids_T) * (1 + self.calls * 1e-6)",
        ),
    ),
    model(
        "prompts that share a pass run into each other",
        "test_prompts_that_share_a_pass_do_not_meet",
        (
            "        return self.norm(residual_TE)",
            "        return self.norm(residual_TE + 1e-3 * residual_TE.roll(1, 0) "
            "* (positions_T == 0)[:, None])",
        ),
    ),
    config(
        "another activation is computed as silu",
        HONOURED,
        ('refuse_unless(config, hidden_act="silu")', "pass"),
    ),
    own(
        "a sliding window is ignored",
        HONOURED,
        ('refuse_unless(config, layer_types="full_attention")', "pass"),
        ("refuse_unless(config, use_sliding_window=False)", "pass"),
    ),
    config(
        "a quantised checkpoint is taken for a plain one",
        REFUSED,
        ('if quantization := nested(config, "quantization_config"):', "if quantization := None:"),
    ),
    config(
        "the width of heads is always hidden_size / heads",
        HONOURED,
        ('positive_int(config, "head_dim", default=hidden_size // num_heads)',
         "hidden_size // num_heads"),
    ),
    model(
        "the configuration is changed",
        "test_the_configuration_is_only_read",
        (
            "return cls._settings(config).shape()",
            "settings = cls._settings(config)\n"
            "        config.pop('rope_parameters', None)\n"
            "        return settings.shape()",
        ),
    ),
    model(
        "a length is read on the host",
        CAPTURED,
        (
            "residual_TE = self.embed_tokens(input_ids_T)",
            "residual_TE = self.embed_tokens(input_ids_T[: int(positions_T.max()) + 10**6])",
        ),
    ),
    model(
        "at one row a position is read on the host",
        CAPTURED,
        (
            "residual_TE = self.embed_tokens(input_ids_T)",
            "residual_TE = self.embed_tokens(input_ids_T)\n"
            "        if len(input_ids_T) == 1:\n"
            "            positions_T = positions_T.new_full((1,), int(positions_T))",
        ),
    ),
    model(
        "a count on the host is frozen into the graph",
        CAPTURED,
        (
            "residual_TE = self.embed_tokens(input_ids_T)",
            "residual_TE = self.embed_tokens(input_ids_T)\n"
            "        self.calls = getattr(self, 'calls', 0) + 1\n"
            "        positions_T = positions_T + self.calls",
        ),
    ),
    model(
        "the residual is float32 whatever was asked",
        HALF,
        (
            "residual_TE = self.embed_tokens(input_ids_T)",
            "residual_TE = self.embed_tokens(input_ids_T).float()",
        ),
    ),
    model(
        "the last norm is rounded twice as coarsely",
        HALF,
        (
            "return self.norm(residual_TE)",
            "hidden_TE = self.norm(residual_TE)\n"
            "        coarse_TE = (hidden_TE * 8).round() / 8\n"
            "        return hidden_TE if hidden_TE.dtype.itemsize > 2 else coarse_TE",
        ),
    ),
    model(
        "the last norm sums squares in the dtype of the model",
        "test_large_states_do_not_overflow_in_float16",
        (
            "return self.norm(residual_TE)",
            "mean_T1 = residual_TE.square().mean(dim=-1, keepdim=True)\n"
            "        return residual_TE * (mean_T1 + self.norm.eps).rsqrt() * self.norm.weight",
        ),
    ),
    model(
        "positions end at a length of the model's own",
        "test_the_last_position_of_the_shape_can_be_computed",
        (
            "self.attn(qkv_TX, positions_T)",
            "self.attn(qkv_TX, positions_T.clamp(max=40))",
        ),
    ),
    linear(
        "a split product takes torch's own",
        KERNELS,
        (
            "self.matrix.linear(x, self.bias if self.context.tp.rank == 0 else None)",
            "x @ self.weight.t()",
        ),
    ),
    embedding(
        "a split embedding takes torch's lookup",
        KERNELS,
        (
            "self.matrix.embed(local_T.masked_fill_(elsewhere_T, 0))",
            "self.weight[local_T.masked_fill_(elsewhere_T, 0)]",
        ),
    ),
    embedding(
        "the head's product takes torch's own",
        KERNELS,
        (
            "return self.matrix.linear(hidden_TE, out_TX=out_TV)",
            "logits_TV = hidden_TE @ self.weight.t()\n"
            "            return logits_TV if out_TV is None else out_TV.copy_(logits_TV)",
        ),
    ),
    config(
        "a window in the shape that no layer has",
        "test_the_built_model_has_the_shape",
        ("sliding_window=self.sliding_window", "sliding_window=32"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=12))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    QWEN3.assert_caught(tmp_path, number, MUTATIONS[number])


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """Every check that catches a bug passes without it."""
    QWEN3.assert_passes(tmp_path, MUTATIONS)
