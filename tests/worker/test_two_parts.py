"""A step in two parts on a real worker: masks count in the tail, and nothing comes out of order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm_core.config.sources import load_config
from nanovllm_core.errors import EngineClosedError, InconsistentStateError
from nanovllm_core.interfaces.constraint import allow_ids
from nanovllm_core.interfaces.plan import RowSampling, TokenMasks, mask_words
from nanovllm_core.interfaces.sampler import SamplerContext
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.selection.startup import start
from nanovllm_core.worker import SingleProcessExecutor, Worker
from nanovllm_core.worker.masks import ForwardPass, MaskTable
from nanovllm_core.worker.processors import RowProcessors
from nanovllm_core.worker.sampler import GumbelSampler
from nanovllm_core.worker.sampler_tail import SamplerTail
from nanovllm_kit.executor_plans import admit, decodes

from ..e2e.tiny import VOCAB_SIZE, write_config
from .tail_step import ints, tail_step

CPU = torch.device("cpu")
WORDS = mask_words(VOCAB_SIZE)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = write_config(tmp_path_factory.mktemp("tiny"))
    config = load_config(
        str(folder),
        overrides={"load_format": "dummy", "device": "cpu", "max_num_seqs": 4,
                   "cache.num_blocks": 32, "limits.max_model_len": 64},
    )  # fmt: skip
    worker = Worker(start(config).setup)
    worker.start()
    yield worker
    worker.close()


def masks(rows: list[int], words: int = WORDS, dtype: type = np.int32) -> TokenMasks:
    return TokenMasks(rows=np.array(rows, np.int32), allowed=np.full((len(rows), words), -1, dtype))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (masks([0, 0]), r"rows \[0, 0\], but the step waits for those of rows \[0\], each once"),
        (masks([0, 2]), r"rows \[0, 2\], but the step waits for those of rows \[0\]"),
        (masks([0], 1), rf"int32 \[1, 1\]; 1 rows of {VOCAB_SIZE} ids are int32 \[1, {WORDS}\]"),
        (masks([0], WORDS, np.int64), rf"are int64 \[1, {WORDS}\]; .* int32 \[1, {WORDS}\]"),
    ],
)
def test_masks_that_are_not_the_step_s_are_refused_and_the_right_ones_still_count(
    worker: Worker, wrong: TokenMasks, said: str
) -> None:
    """With the values of both; the step still waits. A row without a mask has ended."""
    worker.submit(admit({0: (5, 6, 7)}, constrained=True, epoch=next_epoch(worker)))
    with pytest.raises(InconsistentStateError, match=said):
        worker.sample(wrong)
    worker.sample(masks([]))
    assert len(worker.collect().token_ids) == 1


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("decoding", [True, False])
def test_a_plan_and_its_rows_agree_about_the_second_part(
    worker: Worker, constrained: bool, decoding: bool
) -> None:
    """Else a mask of an earlier step would count, or the graph would have sampled already."""
    epoch = next_epoch(worker)
    plan = admit({0: (5, 6, 7)}, constrained=constrained, epoch=epoch)
    if decoding:
        worker.submit(plan)
        if constrained:
            worker.sample(masks([0]))
        worker.collect()
        [plan] = decodes((0,), 1, epoch + 1)
        plan = replace(plan, samples_later=constrained)
    rows = r"\[0\]" if constrained else r"\[\]"
    said = f"samples_later={not constrained}, but .* {rows} are constrained"
    with pytest.raises(InconsistentStateError, match=said):
        worker.submit(replace(plan, samples_later=not constrained))


def next_epoch(worker: Worker) -> int:
    assert worker._runner is not None
    return worker._runner._epoch + 1


def test_before_a_start_and_after_the_end_masks_are_refused(worker: Worker) -> None:
    with pytest.raises(EngineClosedError):
        Worker(worker.setup).sample(masks([0]))
    with pytest.raises(EngineClosedError):
        SingleProcessExecutor(NoOptions()).sample(masks([0]))


samplings = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 99),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 50.0), (30, 50.0))]),
    constrained=st.booleans(),
)


@given(
    vocab=st.sampled_from([31, 32, 33, 64, 70]),
    rows=st.lists(samplings, min_size=1, max_size=6),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_masked_row_samples_as_if_its_other_logits_were_forbidden(
    vocab: int, rows: list[RowSampling], seed: int
) -> None:
    """Equal to the same tail without a mask, on logits in which those ids are -inf already."""
    random = np.random.default_rng(seed)
    chosen = [random.permutation(vocab)[: random.integers(1, vocab)] for _ in rows]
    allowed = np.zeros((len(rows), mask_words(vocab)), np.int32)
    forbidden = torch.zeros(len(rows), vocab, dtype=torch.bool)
    for i, ids in enumerate(chosen):
        allow_ids(allowed[i], ids)
        forbidden[i] = rows[i].constrained
        forbidden[i, ids] = False
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab, generator=generator)
    table = MaskTable(len(rows), vocab, CPU)
    constrained = tuple(i for i, one in enumerate(rows) if one.constrained)
    step = ForwardPass(None, 0, (), (), constrained)  # type: ignore[arg-type]
    words = allowed[[*constrained]].reshape(-1, mask_words(vocab))
    table.load(TokenMasks(rows=np.array(constrained, np.int32), allowed=words), step)
    masked = run_tail(logits, rows, table)
    free = [replace(one, constrained=False) for one in rows]
    already = logits.masked_fill(forbidden, -torch.inf)
    assert masked == run_tail(already, free, MaskTable(len(rows), vocab, CPU))
    assert all(masked[i] in chosen[i] for i in constrained)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("allowed", [0, 5, 69])
def test_a_row_whose_allowed_ids_are_all_forbidden_gets_none(
    allowed: int, temperature: float
) -> None:
    """The host takes -1 for the error that it is; its neighbour gets its own id."""
    vocab = 70
    ends = RowSampling(
        temperature=temperature,
        stop_token_ids=(allowed,),
        min_tokens=9,
        constrained=True,
        top_k=3,
        top_p=0.5,
        seed=4,
    )
    words = np.zeros((2, mask_words(vocab)), np.int32)
    for mask in words:
        allow_ids(mask, [allowed])
    table = MaskTable(2, vocab, CPU)
    step = ForwardPass(None, 0, (), (), (0, 1))  # type: ignore[arg-type]
    table.load(TokenMasks(rows=np.arange(2, dtype=np.int32), allowed=words), step)
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(3))
    other, chosen = run_tail(logits, [ends, replace(ends, min_tokens=0)], table)
    assert (other, chosen) == (-1, allowed)


def run_tail(logits: torch.Tensor, rows: list[RowSampling], table: MaskTable) -> list[int]:
    size, vocab = logits.shape
    context = SamplerContext(device=CPU, vocab_size=vocab, max_entries=size)
    sampler = GumbelSampler(NoOptions(), context)
    tail = SamplerTail(CPU, vocab, sampler, RowProcessors({}), table)
    entries = torch.arange(size, dtype=torch.int32)
    out = torch.zeros(size, dtype=torch.int32)
    known, index = ints(size, 3, CPU), ints(size, 2, CPU)
    temperature = torch.tensor([one.temperature for one in rows])
    seed = torch.tensor([one.seed for one in rows])
    never = torch.zeros(1, dtype=torch.int32)
    sampler.sample(logits, entries, temperature, seed, index, out, never)
    token_ids = torch.full((size, 4), 2, dtype=torch.int32)
    step = tail_step(entries, known, index, token_ids, temperature, seed)
    tail(logits.clone(), tuple(range(size)), tuple(rows), *step, out)
    ids: list[int] = out.tolist()
    return ids
