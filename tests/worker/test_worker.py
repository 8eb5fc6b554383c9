"""A worker is one rank's whole: two of them, each with half the heads, are one engine's model."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from nanovllm_core.config.sources import load_config
from nanovllm_core.errors import EngineClosedError, OutOfMemoryError
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.parallel import SINGLE
from nanovllm_core.interfaces.plan import (
    Admission,
    PrefillChunk,
    RowSampling,
    StepPlan,
    StepResult,
    WorkerInfo,
)
from nanovllm_core.selection.startup import start
from nanovllm_core.worker import Worker, worker as worker_module
from nanovllm_core.worker.results import ResultRing
from nanovllm_core.worker.runner import ModelRunner
from nanovllm_core.worker.worker import _try_steps
from nanovllm_kit.plans import decode_plan
from nanovllm_kit.ranks import SimulatedRank, run_ranks

from ..e2e.tiny import Reference, write_checkpoint
from .counted_rank import Counted

for plugin in ("model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

PROMPT = [9, 8, 7, 6, 5, 4]
ASKING = RowSampling(logprobs=2)
SETTINGS = {"device": "cpu", "attention": "sdpa", "max_model_len": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def setup(folder: Path) -> WorkerSetup:
    return start(load_config(str(folder), overrides=SETTINGS)).setup


def with_blocks(setup: WorkerSetup, num_blocks: int) -> WorkerSetup:
    cache = setup.config.cache.model_copy(update={"num_blocks": num_blocks})
    return replace(setup, config=setup.config.model_copy(update={"cache": cache}))


def plans(sampling: RowSampling) -> Iterator[StepPlan]:
    """A prompt, then five decode steps."""
    admission = Admission(
        row=2,
        token_ids=np.array(PROMPT, np.int32),
        num_prompt_tokens=len(PROMPT),
        num_computed=0,
        block_ids=np.array([(3, 1)], np.int32),
        max_length=20,
        sampling=sampling,
    )
    chunk = PrefillChunk(2, 0, len(PROMPT), samples=True)
    yield StepPlan(admissions=(admission,), prefill=(chunk,))
    yield (first := decode_plan((2,)))
    yield from [replace(first, decode_rows=None)] * 4


def run(worker: Worker, sampling: RowSampling = ASKING) -> list[StepResult]:
    results = []
    for plan in plans(sampling):
        worker.submit(plan)
        results.append(worker.collect())
    return results


def test_a_worker_runs_plans_and_closes(setup: WorkerSetup, folder: Path) -> None:
    """Without an executor; before a start and after closing it refuses work."""
    worker = Worker(setup)
    worker.close()
    with pytest.raises(EngineClosedError, match="not started, or is closed"):
        worker.collect()
    worker.start()
    tokens = [int(result.token_ids[0]) for result in run(worker)]
    assert tokens == Reference.of(folder).tokens(PROMPT, 6)
    worker.close()
    worker.close()
    with pytest.raises(EngineClosedError, match="not started, or is closed"):
        worker.submit(next(plans(ASKING)))


def test_a_worker_of_a_cpu_asks_for_no_stream(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU beside it, the question alone would make a context there."""
    monkeypatch.setattr("torch.cuda.stream", Mock(side_effect=AssertionError("a stream")))
    worker = Worker(setup)
    assert worker.start().device == "cpu"
    worker.close()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A worker of a CPU believes in a GPU; the streams that were made, "default" being there.

    The last is the thread's current one.
    """
    made, current = [], ["default"]

    class OnStream:
        def __init__(self, stream: str) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before, current[:] = current[:], [self.stream]

        def __exit__(self, *_: object) -> None:
            current[:] = self.before

    def make(_: object) -> str:
        made.append(f"stream {len(made)}")
        return made[-1]

    monkeypatch.setattr("torch.cuda.Stream", make)
    monkeypatch.setattr("torch.cuda.stream", OnStream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda *_: current[0])
    monkeypatch.setattr("torch.cuda.set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(worker_module, "_idle_streams", defaultdict(list))
    monkeypatch.setattr(worker_module, "_thread", threading.local())
    monkeypatch.setattr(Worker, "_open_device", lambda self, _: self._connect())
    return made


def test_a_worker_has_the_stream_of_one_that_has_ended(
    setup: WorkerSetup, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or of one whose start failed; two at a time have two. More streams make steps slower."""
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_load", Mock(side_effect=OutOfMemoryError("full")))
        with pytest.raises(OutOfMemoryError):
            Worker(setup).start()
    for _ in range(2):
        worker = Worker(setup)
        worker.start()
        worker.close()
    assert len(streams) == 1
    two = Worker(setup), Worker(setup)
    for worker in two:
        worker.start()
    assert len(streams) == 2
    for worker in two:
        worker.close()
    Worker(setup).start()
    assert len(streams) == 2


def test_steps_are_on_the_stream_of_their_worker_whoever_submits_them(
    setup: WorkerSetup, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that started a worker last is there already; another goes there and back."""
    seen: list[str] = []
    submit = ModelRunner.submit

    def watched(self: ModelRunner, plan: StepPlan) -> None:
        seen.append(torch.cuda.current_stream())
        submit(self, plan)

    monkeypatch.setattr(ModelRunner, "submit", watched)
    monkeypatch.setattr(ResultRing, "_is_idle", lambda _: True)
    first, second = Worker(setup), Worker(setup)
    first.start()
    second.start()
    run(first)
    run(second)
    assert torch.cuda.current_stream() == "stream 1"
    second.close()
    first.close()
    assert torch.cuda.current_stream() == "default"
    assert seen == ["stream 0"] * 6 + ["stream 1"] * 6
    elsewhere = Worker(setup)
    starting = threading.Thread(target=elsewhere.start)
    starting.start()
    starting.join()
    torch.cuda.set_stream("default")  # each thread has its own
    run(elsewhere)
    assert seen[12:] == ["stream 0"] * 6
    assert torch.cuda.current_stream() == "default"


def test_two_ranks_give_the_results_of_one(setup: WorkerSetup, folder: Path) -> None:
    """Each caches the keys and values of its own heads, and both see the same tokens."""

    def on_rank(rank: SimulatedRank) -> tuple[WorkerInfo, tuple[int, ...], list[StepResult]]:
        worker = Worker(setup, rank.context())
        info = worker.start()
        assert worker._runner is not None
        shape = tuple(worker._runner.attention.cache.shape)
        results = run(worker)
        worker.close()
        return info, shape, results

    (info, shape, results), (other, its_shape, its_results) = run_ranks(2, on_rank)
    assert shape == its_shape == (2, 2, info.num_blocks, 16, 16), "one of two KV heads each"
    assert info.num_blocks == other.num_blocks
    assert results == its_results
    tokens = [int(result.token_ids[0]) for result in results]
    assert tokens == Reference.of(folder).tokens(PROMPT, 6)


@pytest.mark.parametrize("debug", [False, True])
def test_a_step_of_plain_rows_gathers_no_logits(folder: Path, debug: bool) -> None:
    """A score and an id cross; in debug mode the largest logit too. A trial gathers whole rows."""
    setup = start(load_config(str(folder), overrides={**SETTINGS, "debug": debug})).setup

    def on_rank(rank: SimulatedRank) -> tuple[list[int], list[int], list[int]]:
        counted = Counted(rank)
        worker = Worker(setup, counted.context())
        worker.start()
        assert worker._runner is not None
        assert worker._runner.sampling.logits.shape[1] == 49, "of 97 ids"
        worker._runner.trial_step(20)
        trial, counted.sent = counted.sent, []
        results = run(worker, RowSampling())
        worker.close()
        return trial, counted.sent, [int(result.token_ids[0]) for result in results]

    for trial, sent, tokens in run_ranks(2, on_rank):
        assert 4 * 49 * 4 in trial, "four rows ask for everything"
        assert sent == ([8, 4] if debug else [8]) * 6
        assert tokens == Reference.of(folder).tokens(PROMPT, 6)


@pytest.mark.parametrize("blocks", [(9, 7), (5, 8)])
def test_ranks_agree_on_the_number_of_blocks(setup: WorkerSetup, blocks: tuple[int, int]) -> None:
    """All have as many as the rank with the fewest."""

    def on_rank(rank: SimulatedRank) -> int:
        worker = Worker(with_blocks(setup, blocks[rank.rank]), rank.context())
        num_blocks = worker.start().num_blocks
        worker.close()
        return num_blocks

    assert run_ranks(2, on_rank) == [min(blocks)] * 2


def test_ranks_agree_on_the_longest_sequence(folder: Path) -> None:
    """With `fit` it follows the blocks of the rank with the fewest."""
    overrides = {**SETTINGS, "max_model_len": "fit"}
    setup = start(load_config(str(folder), overrides=overrides)).setup

    def on_rank(rank: SimulatedRank) -> tuple[int, int]:
        worker = Worker(with_blocks(setup, (9, 5)[rank.rank]), rank.context())
        info = worker.start()
        assert worker._runner is not None
        length = worker._runner.max_model_len
        worker.close()
        return info.max_model_len, length

    assert run_ranks(2, on_rank) == [(80, 80)] * 2


def test_all_ranks_refuse_a_length_that_one_cannot_hold(setup: WorkerSetup) -> None:
    """With the same numbers, so that none waits for another."""

    def on_rank(rank: SimulatedRank) -> str:
        worker = Worker(with_blocks(setup, (9, 3)[rank.rank]), rank.context())
        with pytest.raises(OutOfMemoryError) as caught:
            worker.start()
        return str(caught.value)

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "holds 3 blocks" in first


def test_a_rank_runs_on_its_own_device(setup: WorkerSetup) -> None:
    """The set-up names the device of rank 0; a rank's context overrides it."""
    worker = Worker(replace(setup, device="cuda:7"), replace(SINGLE, device="cpu"))
    assert worker.start().device == "cpu"
    worker.close()


@pytest.mark.parametrize(
    ("captured", "context", "most", "expected"),
    [
        ((), 0, 40, [40, 1, 2, 4, 8, 16, 32]),
        ((), 0, 1, [1]),
        ((32,), 0, 40, [40]),
        ((32,), 4096, 10, [10, 1, 2, 4, 8]),
    ],
)
def test_a_start_tries_short_steps_with_prompts_where_some_are_not_captured(
    setup: WorkerSetup,
    monkeypatch: pytest.MonkeyPatch,
    captured: tuple[int, ...],
    context: int,
    most: int,
    expected: list[int],
) -> None:
    """Their kernels follow from the number of tokens; a request would wait for the compiler.

    Of latent attention, whose contexts are computed in parts, those with a long one never are.
    """
    tried: list[int] = []
    runner = Mock(prompt_sizes=captured, trial_step=tried.append)
    runner.attention.context_part = context
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 0)
    limits = setup.config.limits.model_copy(update={"max_num_batched_tokens": most})
    config = setup.config.model_copy(update={"limits": limits})
    for cuda_graphs, sizes in ((True, expected), (False, [most])):
        _try_steps(replace(setup, config=config, cuda_graphs=cuda_graphs), runner, Mock())
        assert tried == sizes
        tried.clear()
