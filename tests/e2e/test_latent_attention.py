"""A model of latent attention through the whole engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from nanovllm_core import SamplingParams
from nanovllm_core.worker import attention, latent

from ..latent import install_latent, naive_logits, random_weights, write_latent
from ..worker.test_runner import Started
from .tiny import open_tiny

Install = Callable[..., None]

for plugin in ("attention_sdpa",):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

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

    def seen(self: Any, rows_KR: torch.Tensor) -> Any:
        expanded.append(len(rows_KR))
        return expand(self, rows_KR)

    monkeypatch.setattr(latent.LatentAttention, "expand_rows", seen)
    started.runner.attention.allocate_cache(1)
    started.runner.trial_step(40)
    # Two layers of prompts alone, then two of prompts behind a context, which is one part.
    assert expanded == [40, 40, 40, 40, 40, 40]
    started.executor.close()


BUGS = {
    "the context of the first chunk is kept": (
        "self._context = list(self._context_parts(chunks))",
        "self._context = getattr(self, '_context', None) or list(self._context_parts(chunks))",
    ),
    "the first part of the context counts alone": ("in self._context:", "in self._context[:1]:"),
    "context ends with its last whole part": (
        "range(0, num_context, self.part_size)",
        "range(0, num_context // self.part_size * self.part_size, self.part_size)",
    ),
    "parts weigh alike": ("_weight(part_lse_HT, total_HT)", "0.5"),
    "the log-sum-exp is that of the last part": ("lse_HT = total_HT", "lse_HT = part_lse_HT"),
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
