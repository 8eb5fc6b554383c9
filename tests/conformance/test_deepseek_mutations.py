"""Bugs planted in copies of the DeepSeek plugin and of the core's mixture.

Those of latent attention are in test_latent_mutations.py, those of routing as such in
test_kernels_mutations.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .mutation import Mutation, Subject, numbered

pytest.importorskip("nanovllm_model_deepseek", reason="needs the deepseek plugin")

SUITE = """
from types import MappingProxyType
import pytest
from nanovllm_kit import ModelConformance, PluginUnderTest, plugin_under_test
from COPY.plugin import ARCHITECTURE

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale_all_dim": 0.9,
}

class TestCopy(ModelConformance):
    variants = MappingProxyType({
        "yarn": {"rope_parameters": YARN},
        "whole queries": {"q_lora_rank": None},
        "other weights": {"norm_topk_prob": False},
    })

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(ARCHITECTURE)
"""


def subject(architecture: str) -> Subject:
    return Subject(
        package="nanovllm_model_deepseek",
        inlined=("nanovllm_core.layers.experts",),
        suite=SUITE.replace("ARCHITECTURE", architecture),
    )


V2, V3 = subject("DEEPSEEK_V2"), subject("DEEPSEEK_V3")
LOGITS = "test_logits_equal_those_of_transformers"
SPLIT = "test_the_model_split_over_ranks_equals_the_whole_one"
BUILT = "test_the_model_of_the_test_configuration_can_be_built"
CHOSEN = "num_shared=num_shared"


def bug(file: str, name: str, caught_by: str, *edits: tuple[str, str]) -> Mutation:
    return Mutation(name=name, file=file, edits=edits, caught_by=caught_by)


MUTATIONS = [
    (V3, bug("experts.py", "shared experts are left out", LOGITS, (CHOSEN, "num_shared=0"))),
    (
        V3,
        bug(
            "experts.py",
            "the last shared expert is left out",
            LOGITS,
            (CHOSEN, "num_shared=max(num_shared - 1, 0)"),
        ),
    ),
    (
        V2,
        bug(
            "experts.py",
            "every rank has the columns of the first in its shared experts",
            SPLIT,
            ("whole.narrow(dim, columns.source,", "whole.narrow(dim, 0,"),
        ),
    ),
    (
        V3,
        bug(
            "experts.py",
            "shared experts are counted by every rank",
            SPLIT,
            (
                "weights_TC, ids_TC, normed_TE = gate(x_TE, norm)",
                "weights_TC, ids_TC, normed_TE = gate(x_TE, norm)\n"
                "        weights_TC[:, gate.routing.top_k :] *= self.tp.size",
            ),
        ),
    ),
    (
        V2,
        bug(
            "experts.py",
            "a mixture on one rank leaves the residual out",
            LOGITS,
            (
                "return self._mixture(residual_TE, norm, residual_TE)",
                "return self._mixture(residual_TE, norm)",
            ),
        ),
    ),
    (
        V2,
        bug(
            "experts.py",
            "all shared experts are loaded with the first one's rows",
            LOGITS,
            ("tensor.chunk(num_shared, dim)", "[tensor.chunk(num_shared, dim)[0]] * num_shared"),
        ),
    ),
    (
        V3,
        bug(
            "experts.py",
            "gate and up of shared experts are exchanged",
            LOGITS,
            ("[shards.index(shard_id)]", "[-1 - shards.index(shard_id)]"),
        ),
    ),
    (
        V2,
        bug(
            "experts.py",
            "the first routed experts are taken for the shared ones",
            LOGITS,
            ("one.tensor[experts.num_experts :]", "one.tensor[: experts.num_shared]"),
        ),
    ),
    (
        V3,
        bug(
            "experts.py",
            "ranks keep their parts",
            SPLIT,
            ("self.sum.add_to(y_TE, residual_TE)", "residual_TE.add_(y_TE)"),
        ),
    ),
    (
        V3,
        bug(
            "experts.py",
            "the router's bias is left out",
            LOGITS,
            ("bias_N = self.e_score_correction_bias", "bias_N = None"),
        ),
    ),
    (
        V3,
        bug(
            "settings.py",
            "experts are not scaled",
            LOGITS,
            ('positive_float(config, "routed_scaling_factor", default=2.5)', "1.0"),
        ),
    ),
    (
        V2,
        bug(
            "settings.py",
            "experts of V2 are not scaled",
            LOGITS,
            ('positive_float(config, "routed_scaling_factor", default=1.0)', "1.0"),
        ),
    ),
    (
        V3,
        bug(
            "settings.py",
            "weights always add up to 1",
            LOGITS,
            ('true_or_false(config, "norm_topk_prob", default=True)', "True"),
        ),
    ),
    (
        V3,
        bug(
            "settings.py",
            "a group is judged by one",
            LOGITS,
            ('group_score="top2"', 'group_score="max"'),
        ),
    ),
    (
        V2,
        bug(
            "settings.py",
            "a group of V2 is judged by two",
            LOGITS,
            ('group_score="max"', 'group_score="top2"'),
        ),
    ),
    (
        V2,
        bug(
            "settings.py",
            "V2 chooses from all groups",
            LOGITS,
            ('in_groups = method == "group_limited_greedy"', "in_groups = False"),
        ),
    ),
    (
        V3,
        bug(
            "settings.py",
            "one layer more is dense",
            BUILT,
            ("layer >= self.first", "layer > self.first"),
        ),
    ),
    (
        V3,
        bug(
            "settings.py",
            "there is one shared expert",
            BUILT,
            ("num_shared * expert_size or None", "expert_size"),
        ),
    ),
    (
        V2,
        bug("settings.py", "mscale counts once", LOGITS, ("mscale * mscale", "mscale")),
    ),
    (
        V2,
        bug(
            "settings.py",
            "scores are scaled by the part that does not rotate",
            LOGITS,
            ("nope_size + rope.rotary_size)", "nope_size)"),
        ),
    ),
    (
        V2,
        bug(
            "settings.py",
            "the norms of attention have the decoder's epsilon",
            LOGITS,
            (
                "        hidden_size=positive_int(config, ",
                '        rms_norm_eps=positive_float(config, "rms_norm_eps"),\n'
                "        hidden_size=positive_int(config, ",
            ),
        ),
    ),
    (
        V2,
        bug(
            "model.py",
            "queries are always compressed",
            LOGITS,
            ('"q_a_proj" if config.get("q_lora_rank", 1536) is None else "q_proj"', '"q_proj"'),
        ),
    ),
]


@pytest.mark.parametrize("number", numbered([one[1].name for one in MUTATIONS], every=12))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    subject, mutation = MUTATIONS[number]
    subject.assert_caught(tmp_path, number, mutation)


@pytest.mark.parametrize("subject", [V2, V3], ids=["V2", "V3"])
def test_a_copy_without_a_bug_passes(subject: Subject, tmp_path: Path) -> None:
    """Every check that catches a bug passes without it."""
    subject.assert_passes(tmp_path, [mutation for one, mutation in MUTATIONS if one is subject])
