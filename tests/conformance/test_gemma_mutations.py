"""Bugs planted in the Gemma example, whose layers differ: the models' suite catches each."""

from __future__ import annotations

from pathlib import Path

import pytest

from .mutation import Mutation, Subject, numbered

pytest.importorskip("nanovllm_example_model_gemma", reason="needs the Gemma example")

SUITE = """
import pytest
from nanovllm_kit import ModelConformance, PluginUnderTest
from COPY.plugin import SPEC

class TestCopy(ModelConformance):
    @pytest.fixture
    def plugin(self):
        return PluginUnderTest(SPEC, SPEC.options(), "COPY.plugin")
"""
GEMMA2, GEMMA3 = (
    Subject(package="nanovllm_example_model_gemma", suite=SUITE.replace("SPEC", spec))
    for spec in ("GEMMA2", "GEMMA3")
)

LOGITS = "test_logits_equal_those_of_transformers"
BUILT = "test_the_built_model_has_the_shape"


def bug(file: str, name: str, caught_by: str, *edits: tuple[str, str]) -> Mutation:
    return Mutation(name=name, file=file, edits=edits, caught_by=caught_by)


WINDOW = "return self.sliding_window if self.layer_types[layer] == SLIDING else None"
CAP = "soft_cap={},\n        )\n\n    def shape"
ROPES = "for kind, rope in (({}, local), ({}, whole))"
NORMED = "norm_linear(residual_TE, {}, attention.qkv_proj)"
ADDED = "residual_SE = norm_add(attended_SE, self.post_attention_layernorm, residual_SE, {})"
GATED = "hidden_SF = gelu_gate_up(residual_SE, before_mlp, mlp.gate_up_proj)"
EXACT = """gate_SF, up_SF = norm_linear(residual_SE, before_mlp, mlp.gate_up_proj).chunk(2, -1)
        hidden_SF = torch.nn.functional.gelu(gate_SF) * up_SF"""
ATTENTION = "class SelfAttention(nn.Module):"
PLAIN = """class _Plain:
    def __init__(self, norm):
        self.factors, self.eps = norm.weight, norm.eps
        self.take = norm.take


"""

MUTATIONS = [
    bug("config.py", "windows too short", LOGITS, (WINDOW, WINDOW.replace(" if", " - 1 if"))),
    bug("config.py", "the other layers slide", LOGITS, (WINDOW, WINDOW.replace("==", "!="))),
    bug(
        "config.py",
        "the shape has one window for all layers",
        BUILT,
        ("sliding_window=self.window(layer)", "sliding_window=self.window(0)"),
    ),
    bug(
        "config.py",
        "the shape has no cap of scores",
        BUILT,
        (CAP.format("self.scores_cap"), CAP.format("None")),
    ),
    bug(
        "config.py",
        "the ropes of Gemma 3's two kinds are swapped",
        LOGITS,
        (ROPES.format("SLIDING", "FULL"), ROPES.format("FULL", "SLIDING")),
    ),
    bug("model.py", "the embedding is not scaled", LOGITS, (".mul_(self.embed_scale)", "")),
    bug(
        "model.py",
        "the norm behind attention is left out",
        LOGITS,
        (ADDED.format("before_mlp"), "residual_SE = residual_SE.add_(attended_SE)"),
    ),
    bug("model.py", "GELU without tanh", LOGITS, (GATED, EXACT)),
    bug(
        "model.py",
        "a sum is normed for a later reader, and written to before it reads",
        "test_norms_that_a_kernel_set_computes_ahead_are_those_that_are_read",
        (ADDED.format("before_mlp"), ADDED.format("following")),
        (
            "norm_add(hidden_SE, self.post_feedforward_layernorm, residual_SE, following)",
            "residual_SE.add_(self.post_feedforward_layernorm(hidden_SE))",
        ),
    ),
    bug(
        "model.py",
        "scores by the size of heads",
        LOGITS,
        ("config.query_pre_attn_scalar**-0.5", "head_dim**-0.5"),
    ),
    bug(
        "model.py",
        "logits are capped beside the buffer",
        "test_logits_go_where_they_are_told",
        ("logits_TV.div_(self.logits_cap).tanh_()", "(logits_TV / self.logits_cap).tanh_()"),
    ),
    bug(
        "model.py",
        "a norm multiplies by the weight",
        LOGITS,
        (
            NORMED.format("self.input_layernorm"),
            NORMED.format("_Plain(self.input_layernorm)"),
        ),
        (ATTENTION, PLAIN + ATTENTION),
    ),
]


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=6))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    mutation = MUTATIONS[number]
    subject = GEMMA3 if "Gemma 3" in mutation.name else GEMMA2
    subject.assert_caught(tmp_path, number, mutation)


@pytest.mark.parametrize("subject", [GEMMA2, GEMMA3], ids=["Gemma 2", "Gemma 3"])
def test_a_copy_without_a_bug_passes(subject: Subject, tmp_path: Path) -> None:
    """Every check that catches a bug passes without it."""
    subject.assert_passes(tmp_path, MUTATIONS)
