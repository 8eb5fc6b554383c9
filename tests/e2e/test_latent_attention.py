"""A model of latent attention through the whole engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm_core import SamplingParams
from nanovllm_core.interfaces import absorption
from nanovllm_core.interfaces.plan import PrefillChunk, StepPlan
from nanovllm_core.worker import attention, latent

from ..latent import install_latent, naive_logits, random_weights, write_latent
from ..worker.test_runner import Started, admission, decode_plan
from .tiny import open_tiny

Install = Callable[..., None]

pytest.importorskip("nanovllm_attention_sdpa", reason="needs the plugin attention_sdpa")

COUNT = 16
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.0)


@pytest.mark.parametrize(("steps_ahead", "part", "rank"), [(0, 4096, None), (1, 16, 20)])
def test_tokens_are_those_of_the_plain_computation(
    tmp_path: Path,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    steps_ahead: int,
    part: int,
    rank: int | None,
) -> None:
    """Prompts in chunks beside decoding rows, with prefix hits, and with context in many parts.

    The cache is too small for the batch, so that rows are preempted.
    """
    monkeypatch.setattr("nanovllm_core.worker.latent.LEAST_PART", part)
    install_latent(install)
    folder, config = write_latent(tmp_path / "tiny", q_lora_rank=rank)
    draws = Random(part)
    lengths = (3, 33, 17, 150, 200, 90)
    prompts = [[draws.randrange(97) for _ in range(length)] for length in lengths]
    prompts += [prompts[4][:120] + prompts[0], prompts[4]]
    with open_tiny(
        folder,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        steps_ahead=steps_ahead,
        cache={"block_size": 16, "num_blocks": 30},
    ) as llm:
        first, second = (
            [list(one.token_ids) for one in llm.generate(prompts, PARAMS)] for _ in range(2)
        )
    assert first == second, "behind prefix hits"
    weights = random_weights(config)
    for prompt, answer in zip(prompts, first, strict=True):
        logits = naive_logits(config, weights, torch.tensor([*prompt, *answer[:-1]]))
        assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_a_trial_computes_keys_and_values_of_as_much_context_as_a_step_may(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So their memory is in the budget, and no request is the first to run these kernels."""
    monkeypatch.setattr(latent, "LEAST_PART", 8)
    install_latent(install)
    folder, _ = write_latent(tmp_path / "tiny")
    started = Started(folder, max_num_batched_tokens=40)
    expanded: list[int] = []
    expand = latent.LatentAttention.expand_rows

    def seen(self: Any, rows_KR: Tensor) -> Any:
        expanded.append(len(rows_KR))
        return expand(self, rows_KR)

    monkeypatch.setattr(latent.LatentAttention, "expand_rows", seen)
    started.runner.attention.allocate_cache(1)
    started.runner.trial_step(40)
    # Two layers of prompts alone, then two of prompts behind a context, which is one part.
    assert expanded == [40, 40, 40, 40, 40, 40]
    started.executor.close()


def attend_to_rows(
    backend: Any, q_THR: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: Any, out_THL: Tensor
) -> None:
    """`run_prefill` of a backend with `latent_prefill`, by the plainest computation."""
    starts, seq_lens = chunks.query_start_loc.tolist(), chunks.seq_lens.tolist()
    for table, start, end, length in zip(
        chunks.block_table, starts, starts[1:], seq_lens, strict=False
    ):
        rows_KR = k_cache[table.long()].flatten(0, 2)[:length]
        scores_QHK = torch.einsum("qhr,kr->qhk", q_THR[start:end], rows_KR) * backend.config.scale
        positions = torch.arange(length - (end - start), length)
        hidden_QK = torch.arange(length) > positions[:, None]
        weights_QHK = scores_QHK.masked_fill(hidden_QK[:, None], float("-inf")).softmax(-1)
        out_THL[start:end] = weights_QHK @ rows_KR[:, : out_THL.shape[-1]]


@pytest.mark.parametrize("captured", [True, False])
def test_prompts_of_captured_steps_attend_to_rows(
    captured: bool, tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a decoding row, and behind a chunk before; those of eager steps never do.

    Which these are, is asked of each step.
    """
    runs: list[int] = []
    expanded: list[int] = []

    def run_prefill(backend: Any, q_THR: Tensor, *others: Any) -> None:
        runs.append(len(q_THR))
        attend_to_rows(backend, q_THR, *others)

    expand = latent.LatentAttention.expand_rows

    def expand_rows(self: Any, rows_KR: Tensor) -> tuple[Tensor, Tensor]:
        expanded.append(len(rows_KR))
        return expand(self, rows_KR)

    monkeypatch.setattr("nanovllm_attention_sdpa.backend.SdpaAttention.run_prefill", run_prefill)
    monkeypatch.setattr(latent.LatentAttention, "expand_rows", expand_rows)
    if not captured:
        monkeypatch.setattr(attention, "suit_capture", lambda *_: False)
    install_latent(install)
    folder, config = write_latent(tmp_path / "tiny")
    started = Started(folder, (8, 32), cuda_graphs={"sizes": (3, 8)})
    draws = Random(2)
    long, short = ([draws.randrange(97) for _ in range(length)] for length in (40, 7))
    rows = {
        4: admission(4, long, 0, block_ids=np.array([(2, 3, 4)], np.int32), max_length=48),
        1: admission(1, short, 0, block_ids=np.array([(5, 6, 7)], np.int32), max_length=48),
    }
    answers: dict[int, list[int]] = {4: [], 1: []}

    def run(plan: StepPlan, *sampled: int) -> None:
        for row, token in zip(sampled, started.run(plan).token_ids.tolist(), strict=True):
            answers[row].append(token)

    whole = PrefillChunk(1, 0, len(short), samples=True)
    first, last = PrefillChunk(4, 0, 24, samples=False), PrefillChunk(4, 24, 16, samples=True)
    run(StepPlan(admissions=(rows[1],), prefill=(whole,)), 1)
    run(decode_plan((1,), admissions=(rows[4],), prefill=(first,)), 1)
    run(replace(decode_plan((1,)), decode_rows=None, prefill=(last,)), 1, 4)
    for _ in range(3):
        run(decode_plan((4, 1), epoch=2), 4, 1)
    started.executor.close()
    # Of two layers each: padded to a size in captured steps; own tokens and context in eager ones.
    assert started.runner.prompt_sizes == (8, 32)
    assert runs == ([8, 8, 32, 32, 32, 32] if captured else [])
    assert expanded == ([] if captured else [7, 7, 24, 24, 16, 24, 16, 24])
    weights = random_weights(config)
    for row, prompt in ((4, long), (1, short)):
        logits = naive_logits(config, weights, torch.tensor([*prompt, *answers[row][:-1]]))
        assert answers[row] == logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("lengths", "context", "captured"),
    [
        ((16,), 0, True),
        ((1000,), 0, True),
        ((2000,), 0, False),
        ((512,), 4000, True),
        ((16,), 4000, True),
        ((16,), 16000, True),
        ((256,), 16000, True),
        ((500,), 8192, True),
        ((500,), 16384, False),
        ((1000,), 2048, True),
        ((1000,), 8192, False),
        ((2000,), 1024, False),
        ((100,) * 8, 0, True),
        ((30,) * 20, 0, True),
        ((30,) * 100, 0, False),
        ((125,) * 32, 0, False),
    ],
)
def test_a_step_is_captured_where_that_was_faster(
    lengths: tuple[int, ...], context: int, captured: bool
) -> None:
    """On an H200, for DeepSeek-V2-Lite, with its 16 heads."""
    chunks = [PrefillChunk(row, context, n, samples=True) for row, n in enumerate(lengths)]
    assert absorption.suit_capture(chunks, num_heads=16) is captured


BUGS = {
    "the context of the first chunk is kept": (
        "self._context = list(self._context_parts(chunks, num_context))",
        "self._context = getattr(self, '_context', None) or "
        "list(self._context_parts(chunks, num_context))",
    ),
    "the first part of the context counts alone": ("in self._context:", "in self._context[:1]:"),
    "context ends with its last whole part": (
        "range(0, num_context, self.part_size)",
        "range(0, num_context // self.part_size * self.part_size, self.part_size)",
    ),
    "parts weigh alike": ("part_lse_HT - lse_HT", "0 * lse_HT"),
    "the log-sum-exp is that of the last part": (
        "torch.logaddexp(lse_HT, part_lse_HT, out=lse_HT)",
        "lse_HT.copy_(part_lse_HT)",
    ),
    "context is seen causally": ("causal=False", "causal=True"),
    "positions begin anew in each part": (
        "position_K = index_K - start_loc[sequence_K]",
        "position_K = index_K - start_loc[sequence_K].clamp(min=first)",
    ),
    "all context is the first sequence's": ("right=True)", "right=True) * 0"),
    "the own rows are those of the decoding tokens": (
        "self._own = _Part(slots_T, own)",
        "self._own = _Part(slots_T.roll(1), own)",
    ),
}


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_planted_bug_changes_the_tokens(
    bug: str | None, tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are right without one."""
    old, new = BUGS[bug] if bug else ("causal=False", "causal=False")
    source = inspect.getsource(latent)
    assert source.count(old) == 1
    wrong: dict[str, Any] = {"__name__": latent.__name__}
    exec(compile(source.replace(old, new), "wrong", "exec"), wrong)
    wrong["LEAST_PART"] = 16
    monkeypatch.setattr(attention, "LatentPrompts", wrong["LatentPrompts"])
    install_latent(install)
    folder, config = write_latent(tmp_path / "tiny")
    draws = Random(1)
    first = [draws.randrange(97) for _ in range(70)]
    prompts = [first, *([*first[:length], length, 5] for length in (64, 48, 66))]
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "cache": {"block_size": 16}}
    with open_tiny(folder, debug=False, **limits) as llm:
        # The later ones share steps, each behind its own part of a cached prefix.
        batches = llm.generate(prompts[:1], PARAMS), llm.generate(prompts[1:], PARAMS)
        answers = [list(one.token_ids) for batch in batches for one in batch]
    weights = random_weights(config)
    expected = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = naive_logits(config, weights, torch.tensor([*prompt, *answer[:-1]]))
        expected.append(logits[len(prompt) - 1 :].argmax(-1).tolist())
    assert (answers == expected) is (bug is None)
