"""Bugs planted in the torch kernel set: the suite of kernel sets catches each.

Each gives right results for a few rows of a test and wrong text in an engine: work that ends after
some rows or columns, results written over inputs that others read, sums that overflow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .mutation import Mutation, Subject, numbered

KERNELS = Subject(
    package="nanovllm_core.kernels",
    suite="""
from dataclasses import replace
import pytest
from nanovllm_kit import KernelSetConformance, PluginUnderTest, installed_plugin

CORE = installed_plugin("kernels", "torch")

class TestCopy(KernelSetConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return replace(CORE, spec=replace(CORE.spec, impl="COPY.reference:TorchKernels"))
""",
)

EMBED = "test_embed_copies_rows"
NORM = "test_rms_norm_equals_the_reference"
FLOAT32_NORM = "test_rms_norm_is_computed_in_float32"
ONE_ROUNDING = "test_a_norm_with_a_float32_weight_rounds_once"
ACTIVATION = "test_silu_and_mul_equals_the_reference"
PRODUCTS = "test_products_equal_the_reference"
BIASED = "test_products_with_a_bias_equal_the_reference"
OUT = "test_linear_writes_where_it_is_told"
FLOAT32_OUT = "test_linear_does_not_round_what_it_writes_to_float32"
ADDED = "test_linear_add_adds_to_the_residual"
QKV = "test_qkv_is_prepared_as_by_the_reference"
MANY_TOKENS = "test_many_tokens_are_prepared_as_few_are"
FLOAT32_HEADS = "test_heads_are_normed_in_float32"
PADDING = "test_a_slot_of_minus_one_stores_nothing"


def bug(name: str, caught_by: str, *edits: tuple[str, str]) -> Mutation:
    return Mutation(name=name, file="reference.py", edits=edits, caught_by=caught_by)


EMBEDDED = "return embedding(ids_T, weight_VE)"
NORMED = "return _normalised(x_TE.float(), eps).to(weight_E.dtype).mul_(weight_E).to(x_TE.dtype)"
MULTIPLIED = "return torch.mm(x_TE, weight_XE.t(), out=out_TX)"
SUMMED = "return residual_TE if bias_E is None else residual_TE.add_(bias_E)"
WITH_BIAS = "return torch.addmm(bias_X, x_TE, weight_XE.t(), out=out_TX)"
NORMED_PRODUCT = "return self.linear(self.rms_norm(x_TE, norm_weight_E, eps), weight_XE, bias_X)"
GATED = "self.norm_linear(x_TE, norm_weight_E, eps, weight_2FE, bias_2F)"
SCALED = "return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)"
SCALED_IN_PLACE = "return x.mul_(torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps))"
STORED = "stored_T = slot_mapping_T >= 0"


def before(statement: str, *more: str) -> tuple[str, str]:
    """The edit that puts `more` above a statement of an operation."""
    return statement, "\n        ".join((*more, statement))


def after(returned: str, *more: str, result: str = "y") -> tuple[str, str]:
    """The edit that puts `more` between the making of a result y and its return."""
    return returned, "\n        ".join(
        (returned.replace("return", "y ="), *more, f"return {result}")
    )


ENDS_EARLY = [
    bug("embed knows 128 ids", EMBED, after(EMBEDDED, "y[128:] = 0")),
    bug("rms_norm ends after 16 rows", NORM, after(NORMED, "y[16:] = 0")),
    bug(
        "silu_and_mul ends after 512 rows",
        ACTIVATION,
        ("gate_up_T2F.float().chunk", "gate_up_T2F.float().clone().chunk"),
        before("return silu(gate_TF)", "up_TF[512:] = 0"),
    ),
    bug(
        "linear drops its last inputs from 9 rows on",
        PRODUCTS,
        before(
            MULTIPLIED,
            "kept = x_TE.shape[1] - 16 * (len(x_TE) > 8)",
            "x_TE, weight_XE = x_TE[:, :kept], weight_XE[:, :kept]",
        ),
    ),
    bug(
        "linear drops its last inputs of as many rows as attention prepares",
        PRODUCTS,
        (
            "    def embed(",
            "    def announce_prepared_decode(self, rows): self.told = rows\n\n    def embed(",
        ),
        before(
            MULTIPLIED,
            "kept = x_TE.shape[1] - 16 * (len(x_TE) <= getattr(self, 'told', 0))",
            "x_TE, weight_XE = x_TE[:, :kept], weight_XE[:, :kept]",
        ),
    ),
    bug(
        "linear computes whole tiles of 64 outputs",
        PRODUCTS,
        after(MULTIPLIED, "y[:, max(len(weight_XE) // 64, 1) * 64 :] = 0"),
    ),
    bug(
        "linear_add ends after 128 rows",
        ADDED,
        (
            "residual_TE.addmm_(x_TF, weight_EF.t())",
            "residual_TE[:128].addmm_(x_TF[:128], weight_EF.t())",
        ),
    ),
    bug(
        "prepare_qkv stores 128 tokens", MANY_TOKENS, (STORED, f"{STORED}; stored_T[128:] = False")
    ),
]

SIDE_EFFECTS = [
    bug(
        "embed of one id gives the weight itself",
        EMBED,
        before(EMBEDDED, "if len(ids_T) == 1: return weight_VE[ids_T[0]][None]"),
    ),
    bug("rms_norm overwrites its input", NORM, after(NORMED, "x_TE.copy_(y)")),
    bug("rms_norm gives its input back", NORM, after(NORMED, result="x_TE.copy_(y)")),
    bug("rms_norm overwrites a float32 input", NORM, (SCALED, SCALED_IN_PLACE)),
    bug("norm_linear overwrites a float32 input", PRODUCTS, (SCALED, SCALED_IN_PLACE)),
    bug(
        "prepare_qkv turns q and k where they lie",
        QKV,
        before(
            "_store(slot_mapping_T, (qk_THD[:, num_heads:], k_cache_NPKD)",
            "heads_THD[:, : qk_THD.shape[1]] = qk_THD",
        ),
    ),
    bug(
        "prepare_qkv turns -1 to 0 for the layers after it",
        PADDING,
        (STORED, f"{STORED}; slot_mapping_T.clamp_(min=0)"),
    ),
    bug(
        "silu_and_mul overwrites a float32 gate",
        ACTIVATION,
        ("silu(gate_TF)", "silu(gate_TF, inplace=True)"),
    ),
    bug("linear overwrites its input", PRODUCTS, after(MULTIPLIED, "x_TE.zero_()")),
    bug("linear_add overwrites its input", ADDED, after(SUMMED, "x_TF.zero_()")),
    bug(
        "linear returns nothing where it is told where to write",
        OUT,
        after(MULTIPLIED, result="y if out_TX is None else None"),
    ),
]

FLOAT32 = "_normalised(x_TE.float(), eps)"
ROUNDS_EARLY = [
    bug("rms_norm computes in x's dtype", FLOAT32_NORM, (FLOAT32, "_normalised(x_TE, eps)")),
    bug(
        "rms_norm computes in bfloat16",
        FLOAT32_NORM,
        (FLOAT32, f"({FLOAT32} if x_TE.dtype != torch.bfloat16 else _normalised(x_TE, eps))"),
    ),
    bug(
        "rms_norm rounds before a float32 weight",
        ONE_ROUNDING,
        (NORMED, NORMED.replace("weight_E.dtype", "x_TE.dtype")),
    ),
    bug(
        "prepare_qkv norms in the dtype of q and k",
        FLOAT32_HEADS,
        ("num_kv_heads].float(), prep", "num_kv_heads], prep"),
    ),
    bug(
        "linear rounds what it writes to float32",
        FLOAT32_OUT,
        (
            "return _exact_product(x_TE, weight_XE, out_TX)",
            "return out_TX.copy_(torch.mm(x_TE, weight_XE.t()))",
        ),
    ),
]

BIASES = [
    bug("linear forgets the bias", BIASED, (WITH_BIAS, WITH_BIAS.replace("bias_X", "bias_X * 0"))),
    bug("norm_linear forgets the bias", BIASED, (NORMED_PRODUCT, NORMED_PRODUCT[:-9] + ")")),
    bug("norm_gate_up forgets the bias", BIASED, (GATED, GATED.replace(", bias_2F", ""))),
    bug("linear_add forgets the bias", BIASED, (SUMMED, "return residual_TE")),
    bug(
        "linear adds the bias twice", BIASED, (WITH_BIAS, WITH_BIAS.replace("bias_X", "2 * bias_X"))
    ),
    bug(
        "linear_add adds the bias twice", BIASED, (SUMMED, SUMMED.replace("bias_E)", "2 * bias_E)"))
    ),
    bug(
        "norm_linear adds the bias before the norm",
        BIASED,
        (
            NORMED_PRODUCT,
            "if bias_X is not None:\n"
            "            inputs = x_TE.shape[1]\n"
            "            x_TE = x_TE + bias_X.repeat(2 + inputs // len(bias_X))[:inputs]\n"
            "        return self.linear(self.rms_norm(x_TE, norm_weight_E, eps), weight_XE)",
        ),
    ),
    bug(
        "norm_gate_up adds the bias after the activation",
        BIASED,
        (
            f"return self.silu_and_mul({GATED})",
            f"y = self.silu_and_mul({GATED.replace(', bias_2F', '')})\n"
            "        return y if bias_2F is None else y.add_(bias_2F[: y.shape[1]])",
        ),
    ),
    bug(
        "linear adds the bias to the first row",
        BIASED,
        (
            WITH_BIAS,
            "out_TX = torch.mm(x_TE, weight_XE.t(), out=out_TX)\n"
            "        out_TX[0] += bias_X\n"
            "        return out_TX",
        ),
    ),
    bug(
        "linear leaves a bias out where it is told where to write",
        BIASED,
        (
            "if bias_X is None:\n            return torch.mm",
            "if bias_X is None or out_TX is not None:\n            return torch.mm",
        ),
    ),
    bug("linear adds to the bias itself", BIASED, before(WITH_BIAS, "bias_X.mul_(1.5)")),
]


def expert_bug(name: str, caught_by: str, *edits: tuple[str, str]) -> Mutation:
    return Mutation(name=name, file="experts_reference.py", edits=edits, caught_by=caught_by)


ROUTED = "test_tokens_choose_the_experts_of_the_rule"
RESIDUAL = "test_the_residual_is_in_the_sum_of_experts"
SHARED = "test_experts_that_all_tokens_share_are_added_once"
TIES = "test_of_equal_experts_the_first_are_chosen"
FLOAT32_SCORES = "test_scores_are_computed_in_float32"
UNDERFLOW = "test_weights_are_zero_where_all_scores_underflow"
PADDED_ROUTES = "test_a_row_of_padding_names_experts_that_are_there"
MIXED = "test_every_token_gets_the_sum_of_its_experts"
OWN_EXPERTS = "test_no_token_gets_another_ones_experts"
ZERO_WEIGHT = "test_an_expert_of_weight_zero_adds_nothing"
PICKED = "weights_TC = scores_TN.gather(1, ids_TC)"
SORTED = "x_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]"
GATHERED = "y_TE = _expert(x_TE[tokens], gate_up_N2FE[expert], down_NEF[expert])"
WEIGHTED = "y_TE.float() * weights_TC[tokens, places].unsqueeze(-1)"

EXPERTS = [
    expert_bug(
        "weights are divided by the sum of all scores",
        ROUTED,
        ("weights_TC.sum(dim=-1, keepdim=True)", "scores_TN.sum(dim=-1, keepdim=True)"),
    ),
    expert_bug("a sum of 0 divides", UNDERFLOW, ("+ TINY", "+ 0")),
    expert_bug(
        "shared experts are dropped", ROUTED, ("not (shared := routing.num_shared)", "True")
    ),
    expert_bug("shared experts are scaled", ROUTED, ("value=1.0", "value=routing.scale")),
    expert_bug("shared experts have no weight", ROUTED, ("value=1.0", "value=0.0")),
    expert_bug(
        "the first experts are taken for the shared ones",
        ROUTED,
        ("arange(num_routed, num_routed + shared", "arange(0, shared"),
    ),
    expert_bug(
        "the first shared expert counts for all",
        ROUTED,
        ("ids_S.expand", "ids_S[:1].expand(shared).expand"),
    ),
    expert_bug(
        "shared experts come first, their weights last",
        ROUTED,
        ("(ids_TC, ids_S.expand(len(ids_TC), -1))", "(ids_S.expand(len(ids_TC), -1), ids_TC)"),
    ),
    expert_bug(
        "shared experts take the places of the worst",
        ROUTED,
        (
            "weights_TC, ids_TC = weights_TC * routing.scale, ids_TC.int()",
            "kept = routing.top_k - routing.num_shared; "
            "weights_TC, ids_TC = weights_TC[:, :kept] * routing.scale, ids_TC[:, :kept].int()",
        ),
    ),
    expert_bug(
        "shared experts are among those whose weights add up to 1",
        ROUTED,
        ("keepdim=True) + TINY)", "keepdim=True) + routing.num_shared)"),
    ),
    expert_bug(
        "padding chooses a shared expert",
        PADDED_ROUTES,
        (
            "ids_S = torch.arange",
            "ids_TC[logits_TN[:, 0].isnan()] = num_routed; ids_S = torch.arange",
        ),
    ),
    expert_bug(
        "weights are always divided by their sum", ROUTED, ("if routing.renormalize:", "if True:")
    ),
    expert_bug("the bias is in the weight", ROUTED, (PICKED, PICKED.replace("scores", "choice"))),
    expert_bug("the bias is left out", ROUTED, ("scores_TN + bias_N", "scores_TN")),
    expert_bug("the scale is left out", ROUTED, ("weights_TC * routing.scale", "weights_TC")),
    expert_bug("a sigmoid is taken for a softmax", ROUTED, ('== "softmax"', "!= ''")),
    expert_bug("groups are judged by their best alone", ROUTED, ('== "max"', "!= ''")),
    expert_bug("all groups are open", ROUTED, ("routing.top_groups < routing", "0 > routing")),
    expert_bug("the next expert is taken", ROUTED, ("ids_TC.int()", "(ids_TC + 1).int()")),
    expert_bug(
        "of equal experts the last come first",
        TIES,
        (
            SORTED,
            "(x_TN.shape[1] - 1 - x_TN.flip(-1).sort(dim=-1, descending=True, stable=True)"
            ".indices)[:, :count]",
        ),
    ),
    expert_bug(
        "of equal experts all but one are dropped",
        TIES,
        (
            SORTED,
            "(x_TN - (x_TN == x_TN.roll(1, -1)).float()).sort(dim=-1, descending=True)"
            ".indices[:, :count]",
        ),
    ),
    expert_bug(
        "a place is counted by larger scores alone",
        PADDED_ROUTES,
        (
            SORTED,
            "x_TN.sort(dim=-1, descending=True).values[:, :count].unsqueeze(-1)"
            ".eq(x_TN.unsqueeze(1)).int().argmax(dim=-1)",
        ),
    ),
    expert_bug(
        "scores are computed in the dtype of the logits",
        FLOAT32_SCORES,
        ("logits_TN = logits_TN.float()", "pass"),
    ),
    expert_bug(
        "an expert of padding lies behind the last",
        PADDED_ROUTES,
        ("ids_TC.int()", "ids_TC.where(weights_TC == weights_TC, len(logits_TN[0])).int()"),
    ),
    expert_bug(
        "a neighbour's expert is multiplied",
        MIXED,
        (GATHERED, GATHERED.replace("down_NEF[expert]", "down_NEF[expert - 1]")),
    ),
    expert_bug(
        "the weight of a token's first expert is taken for all",
        MIXED,
        (WEIGHTED, WEIGHTED.replace("places", "0 * places")),
    ),
    expert_bug("an expert ends after 64 tokens", MIXED, (GATHERED, f"{GATHERED}; y_TE[64:] = 0")),
    expert_bug("gate and up are exchanged", MIXED, ("gate_TF, up_TF =", "up_TF, gate_TF =")),
    expert_bug(
        "the sum is rounded after each expert",
        MIXED,
        (
            f"sum_TE.index_add_(0, tokens, {WEIGHTED})",
            f"sum_TE.index_add_(0, tokens, {WEIGHTED}).copy_(sum_TE.bfloat16())",
        ),
    ),
    expert_bug(
        "the tokens of an expert are weighted in place",
        MIXED,
        (GATHERED, f"weights_TC[tokens, places] *= 0.5; {GATHERED}"),
    ),
    expert_bug(
        "every expert adds to all tokens",
        OWN_EXPERTS,
        ("sum_TE.index_add_(0, tokens,", "sum_TE += 0 * x_TE.sum(); sum_TE.index_add_(0, tokens,"),
    ),
    expert_bug(
        "weights of padding reach all tokens",
        OWN_EXPERTS,
        (
            "sum_TE.index_add_(0, tokens,",
            "sum_TE += 0 * weights_TC.sum(); sum_TE.index_add_(0, tokens,",
        ),
    ),
    expert_bug(
        "the token before reaches into a token",
        OWN_EXPERTS,
        (GATHERED, f"{GATHERED}; y_TE = y_TE + 0 * x_TE[tokens - 1, :1]"),
    ),
    expert_bug(
        "experts are summed in another order each time",
        MIXED,
        (
            "in ids_TC.unique().tolist():",
            "in ids_TC.unique()[torch.randperm(len(ids_TC.unique()))].tolist():",
        ),
    ),
    bug(
        "the residual is left out",
        RESIDUAL,
        ("residual_TE.add_(sum_TE)", "residual_TE.copy_(sum_TE)"),
    ),
    bug(
        "the residual counts twice",
        RESIDUAL,
        ("residual_TE.add_(sum_TE)", "sum_TE.add_(residual_TE, alpha=2)"),
    ),
    bug("the residual is returned as it is", RESIDUAL, ("residual_TE.add_(sum_TE)", "residual_TE")),
    bug(
        "shared experts are added again",
        SHARED,
        (
            "sum_TE = self._experts(x_TE, weights_TC, ids_TC,",
            "weights_TC = torch.cat((weights_TC[:, : weights_TC.shape[1] - num_shared], "
            "2 * weights_TC[:, weights_TC.shape[1] - num_shared :]), 1)\n"
            "        sum_TE = self._experts(x_TE, weights_TC, ids_TC,",
        ),
    ),
    bug(
        "shared experts are left to another kernel",
        SHARED,
        (
            "sum_TE = self._experts(x_TE, weights_TC, ids_TC,",
            "kept = ids_TC.shape[1] - num_shared\n"
            "        sum_TE = self._experts(x_TE, weights_TC[:, :kept], ids_TC[:, :kept],",
        ),
    ),
    expert_bug(
        "a weight of zero is taken for one",
        ZERO_WEIGHT,
        (
            WEIGHTED,
            "y_TE.float() * weights_TC[tokens, places].unsqueeze(-1)"
            ".where(weights_TC[tokens, places].unsqueeze(-1) > 0, 1)",
        ),
    ),
]

MUTATIONS = ENDS_EARLY + SIDE_EFFECTS + ROUNDS_EARLY + BIASES + EXPERTS


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=12))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    KERNELS.assert_caught(tmp_path, number, MUTATIONS[number])


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """Copying breaks nothing, so what a check catches is the bug; TestTorchKernels runs all."""
    checks = [EMBED, FLOAT32_NORM, OUT, FLOAT32_HEADS]
    outcomes = KERNELS.run(tmp_path, "kernels_copy", None, checks)
    ends = {check: outcomes.of[check] & {"passed", "failed"} for check in checks}
    assert ends == {check: {"passed"} for check in checks}
