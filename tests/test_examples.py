"""The examples run, on the embedded model and a CPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
        pytest.importorskip(f"nanovllm_{name}", reason=f"needs the plugin {name}")
    monkeypatch.setenv("NANOVLLM_DEVICE", "cpu")
    # `auto` would take Triton's interpreter, which these tests switch on and which is slow.
    monkeypatch.setenv("NANOVLLM_ATTENTION__BACKEND", "sdpa")
    monkeypatch.setenv("NANOVLLM_CACHE__NUM_BLOCKS", "256")  # not gigabytes of zeros


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_quickstart_answers_rightly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("quickstart.py", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "Attention runs on: " in printed
    assert "Sort: tree apple moon cat\napple cat moon tree\n" in printed
    assert printed.endswith("Reverse: 7 42 19 3\n3 19 42 7\n")


@pytest.mark.parametrize("arguments", [(), ("demo",)])
def test_a_script_for_nano_vllm_runs(
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("nano_vllm_script.py", *arguments, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("Prompt: ") == printed.count("Completion: '") == 2


NANO_VLLM_CALLS = """\
    llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)
    sampling_params = SamplingParams(temperature=0.6, max_tokens=64)
    outputs = llm.generate(prompts, sampling_params)
"""


def test_the_script_for_nano_vllm_makes_the_calls_of_its_readme() -> None:
    """What it shows is the other project's interface, not ours."""
    script = (EXAMPLES / "nano_vllm_script.py").read_text(encoding="utf-8").splitlines()
    assert [line for line in NANO_VLLM_CALLS.splitlines() if line not in script] == []


@pytest.mark.parametrize("tile", [1, 7, 64])
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 77), (77, 77), (30, 100)])
def test_flash_attention_equals_naive_attention(
    queries: int, keys: int, block_size: int, tile: int
) -> None:
    """For every length, block and tile; blocks it does not own and unused tails are NaN."""
    example = runpy.run_path(str(EXAMPLES / "flash_attention.py"))
    torch.manual_seed(keys)
    q_TD = torch.randn(queries, 32, dtype=torch.float64) * 5  # peaked weights: order matters
    k_LD, v_LD = torch.randn(2, keys, 32, dtype=torch.float64).unbind()
    num_blocks = -(-keys // block_size)
    block_table = torch.randperm(num_blocks + 3)[:num_blocks]
    k_NPD, v_NPD = torch.full((2, num_blocks + 3, block_size, 32), torch.nan).double().unbind()
    for position in range(keys):
        block, offset = block_table[position // block_size], position % block_size
        k_NPD[block, offset], v_NPD[block, offset] = k_LD[position], v_LD[position]
    out_TD = example["flash_attention"](q_TD, k_NPD, v_NPD, block_table, keys, tile)
    torch.testing.assert_close(out_TD, example["naive_attention"](q_TD, k_LD, v_LD))


def test_flash_attention_says_how_close_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("flash_attention.py", monkeypatch=monkeypatch)
    difference, scores = capsys.readouterr().out.splitlines()
    assert float(difference.rsplit(maxsplit=1)[1]) < 1e-6
    assert scores == "scores at once: 300,000 naive, 1,024 here"


def naive_mixture(
    x_TE: Tensor, logits_TN: Tensor, top_k: int, gate_up_N2FE: Tensor, down_NEF: Tensor
) -> Tensor:
    """Every expert computes every token, and is weighted with 0 where it was not chosen."""
    weights_TN = logits_TN.softmax(1)
    weakest_T1 = weights_TN.sort(1, descending=True).values[:, top_k - 1, None]
    weights_TN = weights_TN.where(weights_TN >= weakest_T1, 0)
    weights_TN = weights_TN / weights_TN.sum(1, keepdim=True)
    gate_TNF, up_TNF = torch.einsum("te,nfe->tnf", x_TE, gate_up_N2FE).chunk(2, dim=-1)
    hidden_TNF = gate_TNF * torch.sigmoid(gate_TNF) * up_TNF
    return torch.einsum("tn,tnf,nef->te", weights_TN, hidden_TNF, down_NEF)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1, 1), (1, 9, 3), (5, 7, 7), (40, 6, 2)]
)
def test_every_order_of_a_mixture_gives_the_naive_result_and_counts_its_reads(
    tokens: int, experts: int, top_k: int
) -> None:
    """Pairs read an expert each; sorted they read each touched one, or one for each tile."""
    example = runpy.run_path(str(EXAMPLES / "moe.py"))
    torch.manual_seed(tokens)
    x_TE, logits_TN = torch.randn(tokens, 10).double(), torch.randn(tokens, experts).double()
    gate_up_N2FE, down_NEF = (
        torch.randn(experts, 12, 10).double(),
        torch.randn(experts, 10, 6).double(),
    )
    weights_TC, ids_TC = example["route"](logits_TN, top_k)
    expected_TE = naive_mixture(x_TE, logits_TN, top_k, gate_up_N2FE, down_NEF)
    inputs = x_TE, weights_TC, ids_TC, gate_up_N2FE, down_NEF
    rows = [ids_TC.flatten().tolist().count(index) for index in range(experts)]
    orders = {None: tokens * top_k} | {
        tile: sum(-(-count // tile) for count in rows) for tile in (1, 4, tokens)
    }
    assert orders[tokens] == experts - rows.count(0), "no expert has more rows than tokens"
    for tile, expected in orders.items():
        if tile is None:
            out_TE, reads = example["pair_by_pair"](*inputs)
        else:
            out_TE, reads = example["in_tiles"](*inputs, tile=tile)
        torch.testing.assert_close(out_TE, expected_TE)
        assert reads == expected


def test_the_mixture_says_what_each_order_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One token: the same in all orders. 256 tokens: every expert once, and more in tiles."""
    rows = printed_rows("moe.py", monkeypatch, capsys)
    first, last = rows[0], rows[-1]
    assert first[:6] == ["1", "4", "4.0", "72", "72", "72"]
    pairs, once, tiles = (int(cell.replace(",", "")) for cell in last[3:6])
    assert (pairs, once) == (256 * 4 * 18, 32 * 18)
    assert once < tiles < pairs
    assert all(float(row[-1]) < 1e-5 for row in rows)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (4, 9), (9, 9)])
@pytest.mark.parametrize(("heads", "sizes"), [(1, (4, 2, 3, 6)), (5, (3, 4, 8, 2))])
def test_both_ways_of_latent_attention_equal_a_loop_over_tokens_and_heads(
    queries: int, keys: int, heads: int, sizes: tuple[int, int, int, int]
) -> None:
    """Every head's own keys and values, made a token at a time, and the scale of their size."""
    nope, rotated, value, latent = sizes
    example = runpy.run_path(str(EXAMPLES / "mla.py"))
    torch.manual_seed(keys)
    q_THN = torch.randn(queries, heads, nope).double() * 3
    rotated_THX = torch.randn(queries, heads, rotated).double() * 3
    rows_KR = torch.randn(keys, latent + rotated).double()
    w_k_HNL, w_v_HVL = (torch.randn(heads, size, latent).double() for size in (nope, value))
    expected_THV = torch.empty(queries, heads, value).double()
    for i in range(queries):
        seen_KR = rows_KR[: keys - queries + i + 1]
        for head in range(heads):
            k = torch.stack([torch.cat([w_k_HNL[head] @ r[:latent], r[latent:]]) for r in seen_KR])
            v = torch.stack([w_v_HVL[head] @ r[:latent] for r in seen_KR])
            q = torch.cat([q_THN[i, head], rotated_THX[i, head]])
            expected_THV[i, head] = (k @ q / (nope + rotated) ** 0.5).softmax(0) @ v
    inputs = q_THN, rotated_THX, rows_KR, w_k_HNL, w_v_HVL
    for name in ("unabsorbed", "absorbed"):
        torch.testing.assert_close(example[name](*inputs), expected_THV)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 50), (7, 20), (20, 20)])
def test_the_flops_of_latent_attention_are_those_of_its_products(queries: int, keys: int) -> None:
    """Counted a query and a key at a time; a multiplication and an addition are two."""
    heads, key, rotated, value, latent = 3, 5, 2, 7, 11
    flops = runpy.run_path(str(EXAMPLES / "mla.py"))["flops"]
    seen = sum(keys - queries + i + 1 for i in range(queries))
    made = [2 * latent * (key + value) * heads * count for count in (keys, queries)]
    apart = 2 * heads * seen * (key + rotated) + 2 * heads * seen * value
    rows = 2 * heads * seen * (latent + rotated) + 2 * heads * seen * latent
    assert flops(queries, keys, heads, *(key, rotated, value, latent)) == (
        made[0] + apart,
        made[1] + rows,
    )


def test_latent_attention_says_which_way_is_cheaper(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Absorbed for one query, un-absorbed for a whole prompt, and the results are equal."""
    rows = printed_rows("mla.py", monkeypatch, capsys)
    one, whole = ([int(cell.replace(",", "")) for cell in row[2:4]] for row in (rows[0], rows[-1]))
    assert one[1] < one[0]
    assert whole[0] < whole[1]
    assert all(float(row[-1]) < 1e-5 for row in rows)


def printed_rows(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[list[str]]:
    """The cells of the table that an example prints."""
    run(name, monkeypatch=monkeypatch)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
