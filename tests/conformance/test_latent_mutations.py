"""Bugs of latent attention, planted in the torch kernel set and in the sdpa backend.

Those of the core's own part, prompts in parts, are in tests/e2e/test_latent_attention.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .mutation import Mutation, Subject, numbered
from .test_kernels_mutations import KERNELS

pytest.importorskip("nanovllm_attention_sdpa", reason="needs the sdpa plugin")

SDPA = Subject(
    package="nanovllm_attention_sdpa",
    suite="""
import pytest
from nanovllm_kit import AttentionConformance, PluginUnderTest
from COPY.plugin import nanovllm_attention

class TestCopy(AttentionConformance):
    @pytest.fixture
    def plugin(self):
        [spec] = nanovllm_attention()
        return PluginUnderTest(spec, spec.options(), "COPY.plugin")
""",
)

PREPARED = "test_latent_rows_and_queries_are_prepared"
FLOAT32_ROWS = "test_latent_rows_are_normed_in_float32"
PRODUCTS = "test_every_head_has_its_own_product"
ROWS = "test_latent_rows_are_keys_and_values"
SIZES = "test_latent_sizes_and_heads_are_parameters"
SCALE = "test_latent_scores_have_the_configured_scale"
PACKED_SCALE = "test_packed_scores_have_the_configured_scale"
PROMPTS = "test_packed_prompts_are_causal"
CONTEXT = "test_packed_context_is_seen_whole"
CALLS = "test_packed_calls_of_one_step_keep_their_plans"
STARTS = "test_packed_plans_follow_changed_starts"
LONG = "test_packed_calls_may_be_long_or_many"


def bug(name: str, file: str, caught_by: str, *edits: tuple[str, str]) -> Mutation:
    return Mutation(name=name, file=file, edits=edits, caught_by=caught_by)


STORED = "_store(slot_mapping_T, (row_T1R, cache_NPR.unsqueeze(2)))"
KEY = "key_TX = _rotated_pairs(key_TX.unsqueeze(1), cos_sin_TX).squeeze(1)"
QUERY = "torch.cat((nope_THN, _rotated_pairs(rotated_THX, cos_sin_TX)), dim=-1)"
KERNEL_BUGS = [
    bug("the rotated part of the key is not turned", "reference.py", PREPARED, (KEY, "pass")),
    bug("q is not turned", "reference.py", PREPARED, (f"return {QUERY}", "return q_THD.clone()")),
    bug(
        "q is turned in halves",
        "reference.py",
        PREPARED,
        (
            QUERY,
            "torch.cat((nope_THN, _rotated(rotated_THX.float(), cos_sin_TX).to(q_THD.dtype)"
            "), dim=-1)",
        ),
    ),
    bug(
        "a row is stored in the neighbour's slot too",
        "reference.py",
        PREPARED,
        (STORED, f"{STORED}; cache_NPR[0, 3] = row_T1R[0, 0]"),
    ),
    bug(
        "a row is stored one slot further",
        "reference.py",
        PREPARED,
        (STORED, STORED.replace("slot_mapping_T,", "slot_mapping_T + (slot_mapping_T >= 0),")),
    ),
    bug(
        "the whole row is normed",
        "reference.py",
        PREPARED,
        ("latent_TL = self.rms_norm(latent_TL,", "latent_TL = self.rms_norm(latent_TL * 1.1,"),
    ),
    bug(
        "rows are normed in their own dtype",
        "reference.py",
        FLOAT32_ROWS,
        (
            "latent_TL = self.rms_norm(latent_TL, prep.norm_weight, prep.eps)",
            "latent_TL = _normalised(latent_TL, prep.eps) * prep.norm_weight",
        ),
    ),
    bug(
        "what is behind the inputs is lost",
        "reference.py",
        PRODUCTS,
        ("appended.copy_(rest)", "appended.zero_()"),
    ),
    bug(
        "every head has the first one's product",
        "reference.py",
        PRODUCTS,
        (
            "weight_HOI.transpose(1, 2), out=",
            "weight_HOI[:1].expand_as(weight_HOI).transpose(1, 2), out=",
        ),
    ),
]

ATTENDED = "out_BKGD[part.rows, part.heads] = out[..., : out_BKGD.shape[-1]]"
SDPA_BUGS = [
    bug(
        "values are read from the rotated part",
        "backend.py",
        ROWS,
        (ATTENDED, ATTENDED.replace(": out_BKGD.shape[-1]", "-out_BKGD.shape[-1] :")),
    ),
    bug(
        "the scale is that of a row, in decode",
        "backend.py",
        SCALE,
        ("bias[:, None, None], self.config.scale", "bias[:, None, None], k.shape[-1] ** -0.5"),
    ),
    bug(
        "the scale is that of a key, in prompts",
        "packed.py",
        PACKED_SCALE,
        (
            "out_1HQX = self.kernel.causal(q, k, v, self.scale)",
            "out_1HQX = self.kernel.causal(q, k, v, q.shape[-1] ** -0.5)",
        ),
    ),
    bug("context is seen causally", "packed.py", CONTEXT, ("0 if metadata.causal else -1", "0")),
    bug(
        "prompts see what comes later", "packed.py", PROMPTS, ("0 if metadata.causal else -1", "-1")
    ),
    bug(
        "the plan of the step's last call serves all",
        "packed.py",
        CALLS,
        ("metadata.plan = ", "type(self).last = "),
        ("metadata.plan is None", "False"),
        ("in metadata.plan:", "in type(self).last:"),
    ),
    bug(
        "values end where keys of as many numbers would",
        "packed.py",
        PROMPTS,
        ("in (q_QHD, k_QHD, v_QHV)", "in (q_QHD, k_QHD, k_QHD)"),
    ),
    bug(
        "the log-sum-exp is of base 2",
        "packed.py",
        CONTEXT,
        ("lse_HT[:, queries] = lse_HQ", "lse_HT[:, queries] = lse_HQ * 1.442695"),
    ),
    bug(
        "a plan that is there is kept",
        "packed.py",
        STARTS,
        ("        metadata.plan = ", "        metadata.plan = metadata.plan or "),
    ),
    bug(
        "a plan is that of the step before at the same address",
        "packed.py",
        STARTS,
        (
            "        metadata.plan = list(zip(queries, keys, strict=True))",
            "        plans = type(self).__dict__.get('plans') or {}\n"
            "        type(self).plans = plans\n"
            "        key = metadata.key_start_loc.data_ptr()\n"
            "        metadata.plan = plans.setdefault(key, list(zip(queries, keys, strict=True)))",
        ),
    ),
    bug(
        "a context is cut at 512 keys",
        "packed.py",
        LONG,
        (
            "q_QHD, k, v = q_THD[queries], k_LHD[keys], v_LHV[keys]",
            "q_QHD, k, v = q_THD[queries], k_LHD[keys][:512], v_LHV[keys][:512]",
        ),
    ),
    bug(
        "prompts beyond the 16th are left out",
        "packed.py",
        LONG,
        ("for queries, keys in metadata.plan:", "for queries, keys in metadata.plan[:16]:"),
    ),
]

MUTATIONS = [(KERNELS, one) for one in KERNEL_BUGS] + [(SDPA, one) for one in SDPA_BUGS]


@pytest.mark.parametrize("number", numbered([one[1].name for one in MUTATIONS], every=9))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    subject, mutation = MUTATIONS[number]
    subject.assert_caught(tmp_path, number, mutation)


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """Copying breaks nothing, so what a check catches is the bug."""
    SDPA.assert_passes(tmp_path, SDPA_BUGS)
