"""The model runner on a CPU: padding changes nothing, block 0 is a block as any, trials are idle.

What a GPU would capture runs eagerly here, at the same padded sizes and in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm_core.config.sources import load_config
from nanovllm_core.errors import ExecutorError, InconsistentStateError
from nanovllm_core.interfaces.plan import (
    PADDED,
    Admission,
    PrefillChunk,
    RowSampling,
    StepPlan,
    StepResult,
)
from nanovllm_core.interfaces.sampler import SamplerContext
from nanovllm_core.layers import AttentionLayer
from nanovllm_core.selection.startup import start
from nanovllm_core.worker import logits, sampler_tail as sampler, step_sampler
from nanovllm_core.worker.executor import SingleProcessExecutor
from nanovllm_core.worker.graphs import StepGraphs, StepKey
from nanovllm_core.worker.rows import StagingRing
from nanovllm_core.worker.runner import ModelRunner
from nanovllm_kit.plans import decode_plan

from ..e2e.alternating import NAME as ALTERNATING, choices, install_alternating
from ..e2e.tiny import CONFIG, Reference, write_checkpoint

for plugin in ("model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

PROMPTS = [[3, 1, 4, 1, 5], list(range(20, 37)), [9]]
MAX_LEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    reference = Reference.of(folder)
    return [reference.tokens(prompt, 6) for prompt in PROMPTS]


class EagerGraphs:
    """Stands for captured steps: what would be replayed is launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.replayed: list[StepKey] = []

    def replay(self, key: StepKey) -> None:
        self.replayed.append(key)
        with torch.inference_mode():
            self._runner.run_captured(key)

    def clear(self) -> None: ...


class Started:
    """An executor that has started, and the runner inside it.

    With `prompt_sizes` its steps are those that would be captured.
    """

    def __init__(self, folder: Path, prompt_sizes: tuple[int, ...] = (), **changes: Any) -> None:
        settings = {"device": "cpu", "attention": "sdpa", "max_model_len": MAX_LEN}
        limits = {"max_num_seqs": 8, "cache": {"num_blocks": 32}}
        startup = start(load_config(str(folder), overrides={**settings, **limits, **changes}))
        assert isinstance(startup.executor, SingleProcessExecutor)
        self.executor = startup.executor
        self.executor.start(replace(startup.setup, prompt_graph_sizes=prompt_sizes))
        worker = self.executor._worker
        assert worker is not None
        runner = worker._runner
        assert runner is not None
        self.runner: ModelRunner = runner
        self.graphs = EagerGraphs(runner)
        if prompt_sizes:
            runner._graphs = cast(StepGraphs, self.graphs)

    @property
    def blocks(self) -> Tensor:
        return self.runner.attention.cache

    def run(self, plan: StepPlan) -> StepResult:
        self.runner.submit(plan)
        return self.runner.collect()


@pytest.fixture(params=[(), (8, 32, 64)], ids=["exact", "padded"])
def started(folder: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    """Mixed steps of just their tokens and chunks, or padded as those that are captured."""
    started = Started(folder, prompt_sizes=request.param)
    yield started
    started.executor.close()


def admission(row: int, ids: list[int], first_block: int, **changes: Any) -> Admission:
    fields: dict[str, Any] = {
        "row": row,
        "token_ids": np.array(ids, np.int32),
        "num_prompt_tokens": len(ids),
        "num_computed": 0,
        "block_ids": np.array([(first_block, first_block + 1)], np.int32),
        "max_length": 32,
        "sampling": RowSampling(),
    }
    return Admission(**{**fields, **changes})


def prefill(rows: tuple[int, ...], **changes: Any) -> StepPlan:
    """The three prompts, in these rows, on blocks 2 and 3, 4 and 5, 6 and 7."""
    return StepPlan(
        admissions=tuple(
            admission(row, ids, 2 + 2 * place, **changes)
            for place, (row, ids) in enumerate(zip(rows, PROMPTS, strict=True))
        ),
        prefill=tuple(
            PrefillChunk(row, 0, len(ids), samples=True)
            for row, ids in zip(rows, PROMPTS, strict=True)
        ),
    )


def generate(started: Started, rows: tuple[int, ...]) -> list[list[int]]:
    steps = [started.run(prefill(rows)).token_ids]
    decode = decode_plan(rows)
    steps += [started.run(decode).token_ids for _ in range(5)]
    return np.stack(steps, axis=1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("sizes", [(3, 8), (8,), (1, 2, 4, 5, 8), (1, 2, 3, 4, 5, 6, 7, 8)])
@pytest.mark.parametrize("rows", [(0, 1, 2), (7, 0, 3)])
def test_a_padded_decode_step_equals_one_without_padding(
    sizes: tuple[int, ...], rows: tuple[int, ...], folder: Path, expected: list[list[int]]
) -> None:
    """Three rows in a bucket of 3, 4 or 8, wherever in the tables they are."""
    started = Started(folder, cuda_graphs={"sizes": sizes})
    assert generate(started, rows) == expected
    started.executor.close()


def test_the_bucket_is_the_smallest_that_holds_the_rows(folder: Path) -> None:
    """And there is one for every number of rows up to the maximum, which is the last."""
    started = Started(folder, cuda_graphs={"sizes": (1, 2, 4, 8)})
    assert started.runner.bucket_sizes == (1, 2, 4, 8)
    assert [started.runner.bucket(n) for n in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
    started.executor.close()


def test_a_maximum_that_no_step_of_8_meets_is_a_bucket(
    folder: Path, expected: list[list[int]]
) -> None:
    """Bug 5 of peers: nothing held the rows between the last step and the maximum."""
    for maximum in (3, 5, 13):
        started = Started(folder, max_num_seqs=maximum)
        assert started.runner.bucket(maximum) == maximum == started.runner.bucket_sizes[-1]
        assert generate(started, (maximum - 1, 0, 1)) == expected
        started.executor.close()


def test_padding_neither_writes_nor_reads_block_0(
    started: Started, expected: list[list[int]]
) -> None:
    """Block 0, and every block that no row has, is poisoned: it stays so, and no NaN spreads."""
    rows = (1, 5, 2)
    owned = [2, 3, 4, 5, 6, 7]
    others = [block for block in range(32) if block not in owned]
    started.blocks[:, :, others] = torch.nan
    assert generate(started, rows) == expected
    assert started.blocks[:, :, others].isnan().all()
    assert not started.blocks[:, :, owned].isnan().any()


def test_behind_its_attention_the_last_layer_sees_no_token_but_those_that_are_sampled_from(
    started: Started, expected: list[list[int]]
) -> None:
    """Of 23 prompt tokens three, padded as entries are; the layer before it sees them all."""
    model = cast(Any, started.runner.model.module).model
    rows: dict[str, list[int]] = {}
    for name, layer in (("first", model.layers[0]), ("last", model.layers[-1])):
        seen = rows[name] = []
        layer.mlp.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(len(args[0])))
    assert generate(started, (1, 5, 2)) == expected
    assert rows["first"][0] >= 23
    assert rows["last"][0] == (3 if started.runner.prompt_sizes == () else 16)
    assert rows["last"][1:] == rows["first"][1:], "a decode step samples from every token"


def test_a_model_that_keeps_all_tokens_to_its_end_is_sampled_at_the_same_ones(
    started: Started, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model has to ask which tokens are needed."""
    monkeypatch.setattr(AttentionLayer, "keep_sampled", lambda self, *tensors: tensors)
    assert generate(started, (1, 5, 2)) == expected


def runs_what_it_planned(backend: Any, phase: str) -> None:
    """Make a backend fail where it runs another batch than that of its last plan."""
    plan, run = getattr(backend, f"plan_{phase}"), getattr(backend, f"run_{phase}")
    planned = []

    def plan_this(metadata: object) -> None:
        planned.append(metadata)
        plan(metadata)

    def run_this(q: Tensor, k: Tensor, v: Tensor, metadata: object, out: Tensor) -> None:
        assert metadata is planned[-1]
        run(q, k, v, metadata, out)

    setattr(backend, f"plan_{phase}", plan_this)
    setattr(backend, f"run_{phase}", run_this)


@pytest.mark.parametrize("prompt_sizes", [(), (8, 32, 64)], ids=["exact", "padded"])
def test_groups_of_layers_read_and_write_blocks_of_their_own(
    prompt_sizes: tuple[int, ...], tmp_path: Path, install: Callable[..., None]
) -> None:
    """A window of 8 beside none: chunks while another row decodes, and a block freed behind it.

    Every block that no row has, and the freed one once it is, holds other numbers.
    """
    install_alternating(install)
    facts = {"architectures": [ALTERNATING], "windows": [8, None]}
    folder = write_checkpoint(tmp_path / "tiny", **facts)
    started = Started(folder, prompt_sizes, cuda_graphs={"sizes": (3, 8)})
    for group in started.runner.attention.groups:
        runs_what_it_planned(group.decode, "decode")
        runs_what_it_planned(group.prefill, "prefill")
    ids = [(5 * i + 1) % 97 for i in range(40)]
    others = [block for block in range(32) if block not in range(2, 12)]
    started.blocks[:, :, others] = 300.0
    tables = [np.array([(2, 3, 4), (5, 6, 7)], np.int32), np.array([(8, 9), (10, 11)], np.int32)]
    long = admission(4, ids, 0, block_ids=tables[0], max_length=64)
    short = admission(1, PROMPTS[1], 0, block_ids=tables[1], max_length=64)
    whole = PrefillChunk(1, 0, len(PROMPTS[1]), samples=True)
    answers: dict[int, list[int]] = {4: [], 1: []}

    def run(plan: StepPlan, *rows: int) -> None:
        for row, token in zip(rows, started.run(plan).token_ids.tolist(), strict=True):
            answers[row].append(token)

    run(StepPlan(admissions=(short,), prefill=(whole,)), 1)
    first, last = PrefillChunk(4, 0, 24, samples=False), PrefillChunk(4, 24, 16, samples=True)
    run(decode_plan((1,), admissions=(long,), prefill=(first,)), 1)
    started.blocks[:, :, 2] = 300.0
    run(replace(decode_plan((1,)), decode_rows=None, prefill=(last,)), 1, 4)
    for _ in range(5):
        run(decode_plan((4, 1), epoch=2), 4, 1)
    for row, prompt in ((4, ids), (1, PROMPTS[1])):
        assert answers[row] == choices(folder, CONFIG | facts, prompt, answers[row])
    assert (started.blocks[:, :, [2, *others]] == 300.0).all()
    started.executor.close()


def test_a_finished_row_is_padding_until_it_is_admitted_again(
    started: Started, expected: list[list[int]]
) -> None:
    """It ends on the device at its length; later steps give PADDED for it and write nothing."""
    rows = (0, 1, 2)
    plan = prefill(rows)
    short = admission(0, PROMPTS[0], 2, max_length=len(PROMPTS[0]) + 2)
    plan = StepPlan(admissions=(short, *plan.admissions[1:]), prefill=plan.prefill)
    assert not started.run(plan).finished.any()
    decode = decode_plan(rows)
    second = started.run(decode)
    assert second.finished.tolist() == [True, False, False]
    before = started.blocks[:, :, 2:4].clone()
    third = started.run(decode)
    assert third.token_ids.tolist() == [PADDED, expected[1][2], expected[2][2]]
    assert torch.equal(started.blocks[:, :, 2:4], before)
    again = decode_plan(
        (1, 2),
        epoch=2,
        admissions=(admission(0, PROMPTS[0], 2),),
        prefill=(PrefillChunk(0, 0, 5, samples=True),),
    )
    assert started.run(again).token_ids.tolist() == [
        expected[1][3],
        expected[2][3],
        expected[0][0],
    ]


def test_chunks_beside_decoding_rows_change_neither(
    started: Started, expected: list[list[int]]
) -> None:
    """A prompt in three chunks, a block appended on the way; only its last chunk gives a token."""
    first = StepPlan(
        admissions=(admission(4, PROMPTS[0], 2),),
        prefill=(PrefillChunk(4, 0, 5, samples=True),),
    )
    tokens = [int(started.run(first).token_ids[0])]
    ids = PROMPTS[1]
    admitted = admission(3, ids, 9, block_ids=np.array([(9,)], np.int32))
    chunks = [
        decode_plan((4,), admissions=(admitted,), prefill=(PrefillChunk(3, 0, 6, False),)),
        decode_plan((4,), prefill=(PrefillChunk(3, 6, 10, False),)),
        decode_plan(
            (4,),
            appends=np.array([(3, 0, 1, 30)], np.int32),
            prefill=(PrefillChunk(3, 16, 1, True),),
        ),
    ]
    for plan, count in zip(chunks, (1, 1, 2), strict=True):
        result = started.run(plan)
        assert len(result.token_ids) == count
        tokens.append(int(result.token_ids[0]))
    assert tokens == expected[0][:4]
    assert result.token_ids[1] == expected[1][0]
    both = started.run(decode_plan((3, 4)))
    assert both.token_ids.tolist() == [expected[1][1], expected[0][4]]


def test_a_step_with_prompts_replays_the_smallest_graph_that_holds_it(folder: Path) -> None:
    """By prompt tokens, prompts and decoding rows; one that none holds is launched as it is."""
    started = Started(folder, prompt_sizes=(8, 32, 256), max_num_seqs=16)
    runner = started.runner
    assert runner.prompt_sizes == (8, 32, 256)

    def key(lengths: list[int], num_decode: int) -> StepKey | None:
        chunks = tuple(PrefillChunk(i, 0, n, samples=True) for i, n in enumerate(lengths))
        return runner._mixed_key(decode_plan(range(num_decode), prefill=chunks))

    assert key([3, 5], 0) == StepKey("mixed", 8, 8)
    assert key([3, 6], 8) == StepKey("mixed", 32, 8)
    assert key([1], 9) == StepKey("mixed", 8, 16)
    assert key([257], 0) is None, "too many tokens"
    assert key([1] * 8, 8) == StepKey("mixed", 8, 8)
    assert key([1] * 9, 0) == StepKey("mixed", 256, 16), "more chunks than there is room beside 8"
    assert key([1] * 16, 0) == StepKey("mixed", 256, 16), "as many as there are rows"
    started.run(prefill((0, 1, 2)))
    started.run(decode_plan((0, 1, 2)))
    assert started.graphs.replayed == [StepKey("mixed", 32, 8), StepKey.decode(3)]
    started.executor.close()


def test_a_step_that_fills_a_small_budget_replays_a_graph_of_that_size(folder: Path) -> None:
    """17 decoding rows are padded to 20, all there are; 44 tokens of a budget of 64 are left."""
    settings: dict[str, Any] = {"max_num_seqs": 20, "max_num_batched_tokens": 64}
    plain = Started(folder, **settings)
    assert plain.runner.row_padding == 1, "no step with prompts is padded"
    plain.executor.close()
    started = Started(folder, (8, 32), **settings)
    runner = started.runner
    assert runner.row_padding == 16

    def key(num_decode: int, num_tokens: int) -> StepKey | None:
        chunk = PrefillChunk(num_decode, 0, num_tokens, samples=True)
        return runner._mixed_key(decode_plan(range(num_decode), prefill=(chunk,)))

    assert key(17, 44) == StepKey("mixed", 44, 20)
    assert key(16, 48) == StepKey("mixed", 48, 16)
    assert key(0, 64) == StepKey("mixed", 64, 8)
    assert key(17, 45) is None, "more than the budget has beside these rows"
    started.executor.close()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_no_step_has_more_entries_than_the_sampler_was_told(
    folder: Path, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step has room for a full batch and for chunks beside it."""
    told = []

    class Noting(SamplerContext):
        def __init__(self, **fields: Any) -> None:
            told.append(fields["max_entries"])
            super().__init__(**fields)

    monkeypatch.setattr("nanovllm_core.worker.step_sampler.SamplerContext", Noting)
    started = Started(folder, prompt_sizes=(8, 32), max_num_seqs=max_num_seqs)
    sample, entries = started.runner.sampling.sampler.sample, []

    def note(logits: Tensor, *arguments: Any) -> None:
        entries.append(logits.shape[0])
        sample(logits, *arguments)

    monkeypatch.setattr(started.runner.sampling.sampler, "sample", note)
    for key in started.runner._mixed_keys:
        started.runner.run_captured(key)
    assert max(entries) == told[0]
    started.executor.close()


def test_blocks_that_hold_a_prefix_already_are_not_computed_again(
    started: Started, expected: list[list[int]]
) -> None:
    """With `num_computed` 16 the first block is read, not written."""
    ids = PROMPTS[1]
    started.run(
        StepPlan(
            admissions=(admission(0, ids, 4),), prefill=(PrefillChunk(0, 0, 17, samples=True),)
        )
    )
    before = started.blocks[:, :, 4].clone()
    hit = admission(6, ids, 4, num_computed=16, block_ids=np.array([(4, 20)], np.int32))
    plan = StepPlan(admissions=(hit,), prefill=(PrefillChunk(6, 16, 1, samples=True),))
    assert started.run(plan).token_ids.tolist() == [expected[1][0]]
    assert torch.equal(started.blocks[:, :, 4], before)
    assert started.blocks[:, :, 20, 0].any()


def test_the_longest_sequence_fills_its_block_table_exactly(folder: Path) -> None:
    """Bug 4 of peers: a prompt of the model's length needed one entry too many."""
    ids = [(7 * i) % 97 for i in range(MAX_LEN - 1)]
    started = Started(folder)
    assert started.runner.tables.block_table.shape[2] == 4
    admitted = admission(
        0, ids, 0, block_ids=np.array([(5, 9, 1, 30)], np.int32), max_length=MAX_LEN
    )
    plan = StepPlan(admissions=(admitted,), prefill=(PrefillChunk(0, 0, len(ids), samples=True),))
    result = started.run(plan)
    assert result.token_ids.tolist() == Reference.of(folder).tokens(ids, 1)
    assert result.finished.tolist() == [True]
    started.executor.close()


def test_a_prompt_for_every_row_is_one_replay(folder: Path) -> None:
    """A burst of short prompts, and then decoding rows beside two more."""
    started = Started(folder, (8, 32, 256), max_num_seqs=16, cache={"num_blocks": 40})
    prompts = [[3 + row, 1, 4] for row in range(11)]
    plan = StepPlan(
        admissions=tuple(admission(row, ids, 2 * row) for row, ids in enumerate(prompts)),
        prefill=tuple(PrefillChunk(row, 0, 3, samples=True) for row in range(11)),
    )
    tokens = [started.run(plan).token_ids]
    late = decode_plan(
        range(11),
        admissions=(admission(11, PROMPTS[0], 22), admission(12, PROMPTS[2], 24)),
        prefill=(PrefillChunk(11, 0, 5, samples=True), PrefillChunk(12, 0, 1, samples=True)),
    )
    tokens.append(started.run(late).token_ids)
    reference = Reference.of(folder)
    assert np.stack([tokens[0], tokens[1][:11]], axis=1).tolist() == [
        reference.tokens(prompt, 2) for prompt in prompts
    ]
    first, last = reference.tokens(PROMPTS[0], 1), reference.tokens(PROMPTS[2], 1)
    assert tokens[1][11:].tolist() == first + last
    assert started.graphs.replayed == [StepKey("mixed", 256, 16), StepKey("mixed", 8, 16)]
    started.executor.close()


def test_trials_run_on_one_block_whatever_the_groups(
    tmp_path: Path, install: Callable[..., None]
) -> None:
    """As a GPU's start does: every block table names block 0, and the results are thrown away."""
    install_alternating(install)
    facts = {"architectures": [ALTERNATING], "windows": (8, None)}
    started = Started(write_checkpoint(tmp_path / "tiny", **facts), max_num_batched_tokens=40)
    started.runner.attention.allocate_cache(1)
    started.runner.trial_step(40)
    started.runner.trial_captured_step()
    assert torch.isfinite(started.blocks).all()
    started.executor.close()


@pytest.mark.parametrize("prompt_sizes", [(), (8, 32)], ids=["exact", "padded"])
def test_a_trial_step_does_all_that_a_request_may_ask_for(
    folder: Path, prompt_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peak of memory is the true one, and no request is the first to run a kernel."""
    started = Started(folder, prompt_sizes, max_num_seqs=16, cache={"num_blocks": 40})
    done: set[str] = set()
    asked = ("penalise", "forbid_stop_ids", "cut_min_p", "cut_top_k_top_p", "raw_logprobs")
    for name in asked:
        module = sampler if name == "raw_logprobs" else logits
        real = getattr(module, name)

        def seen(*arguments: Any, name: str = name, real: Any = real) -> Any:
            done.add(f"{name} {len(arguments[0])}")
            return real(*arguments)

        monkeypatch.setattr(module, name, seen)
    scattered: list[int] = []
    monkeypatch.setattr(
        started.runner.ops, "scatter_updates", lambda arena, updates: scattered.append(1)
    )
    started.runner.trial_step(200)
    assert done == {f"{name} {rows}" for name in asked for rows in (1, logits.MAX_SORTED_ROWS, 16)}
    assert scattered == [1]
    started.executor.close()


@pytest.mark.parametrize(
    ("num_tokens", "most"), [(40, 40), (65, 65), (200, 200), (4096, 8 * MAX_LEN)]
)
def test_a_trial_step_has_as_many_prompt_tokens_as_a_step_may_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int, most: int
) -> None:
    """Also where no sequence is as long: the last chunk is shorter, or memory would be kept free
    for a step that never comes."""
    started = Started(folder, max_num_batched_tokens=4096)
    computed: list[int] = []
    real = started.runner._module.forward

    def seen(input_ids: Tensor, positions: Tensor) -> Tensor:
        computed.append(len(input_ids))
        return cast(Tensor, real(input_ids, positions))

    monkeypatch.setattr(started.runner._module, "forward", seen)
    started.runner.trial_step(num_tokens)
    assert computed == [most]
    started.executor.close()


@pytest.mark.parametrize("debug", [False, True])
def test_no_part_of_a_trial_copies_from_the_host_or_looks_at_logits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    """A part is captured: what it reads is on the device before, and it waits for nothing."""
    started = Started(folder, max_num_seqs=16, cache={"num_blocks": 40}, debug=debug)
    copied: list[str] = []
    monkeypatch.setattr(step_sampler, "check_logits", lambda *_: pytest.fail("it waits"))
    for owner, name in ((StagingRing, "copy"), (sampler, "to_device")):
        real = getattr(owner, name)

        def seen(*arguments: Any, name: str = name, real: Any = real) -> Tensor:
            copied.append(name)
            return cast(Tensor, real(*arguments))

        monkeypatch.setattr(owner, name, seen)
    with torch.inference_mode():
        for launch in started.runner.trial_launches(200):
            before = copied[:]
            launch()
            assert copied == before
    assert sorted(set(copied)) == ["copy", "to_device"]
    started.executor.close()


@pytest.mark.parametrize(
    "trial", [lambda runner: runner.trial_step(200), lambda runner: runner.trial_captured_step()]
)
def test_a_trial_leaves_no_trace_in_tables_or_results(
    started: Started, expected: list[list[int]], trial: Callable[[ModelRunner], None]
) -> None:
    """It runs a largest step on whatever blocks are set, and requests come out as ever.

    With `enforce_eager` nothing is captured after it, which would make up for a trace.
    """
    arena = started.runner.tables.arena.clone()
    trial(started.runner)
    assert torch.equal(started.runner.tables.arena, arena)
    with pytest.raises(ExecutorError, match="no step is in flight"):
        started.runner.collect()
    assert generate(started, (0, 1, 2)) == expected


@pytest.mark.parametrize("prompt_sizes", [(), (64,)], ids=["exact", "padded"])
def test_a_tail_for_one_row_leaves_the_others_to_the_same_noise(
    folder: Path, prompt_sizes: tuple[int, ...]
) -> None:
    """Rows with and without extras, in one step: each gets the token that it gets alone."""
    sampled = RowSampling(temperature=0.9, seed=5)
    extras = RowSampling(temperature=0.9, seed=5, top_k=3, logprobs=2)

    def tokens(samplings: list[RowSampling]) -> list[list[int]]:
        started = Started(folder, prompt_sizes=prompt_sizes)
        rows = tuple(range(len(samplings)))
        plan = StepPlan(
            admissions=tuple(
                admission(row, PROMPTS[1], 2 + 2 * row, sampling=sampling)
                for row, sampling in zip(rows, samplings, strict=True)
            ),
            prefill=tuple(PrefillChunk(row, 0, 17, samples=True) for row in rows),
        )
        steps = [started.run(plan)] + [started.run(decode_plan(rows)) for _ in range(4)]
        for step in steps:
            asked = {i for i, sampling in enumerate(samplings) if sampling.logprobs is not None}
            assert set(step.logprobs) == asked
        started.executor.close()
        return np.stack([step.token_ids for step in steps], axis=1).tolist()  # type: ignore[no-any-return]

    alone = tokens([sampled]) + tokens([extras])
    assert tokens([sampled, extras]) == alone
    assert tokens([extras, sampled]) == alone[::-1]


def test_a_tail_in_a_padded_step_works_on_the_entries_that_asked(folder: Path) -> None:
    """Decoding rows and chunks, some with extras: as without padding, and not as without extras."""
    hungry = RowSampling(temperature=0.9, seed=5, repetition_penalty=3.0, top_k=5, logprobs=1)
    curious = RowSampling(temperature=0.9, seed=6, logprobs=3)
    plain = RowSampling(temperature=0.9, seed=7)

    def outcomes(
        prompt_sizes: tuple[int, ...], extras: tuple[RowSampling, ...]
    ) -> tuple[list[int], dict[int, Any]]:
        started = Started(folder, prompt_sizes=prompt_sizes)
        first = StepPlan(
            admissions=tuple(
                admission(row, PROMPTS[1], 2 + 2 * place, sampling=sampling)
                for place, (row, sampling) in enumerate(zip((4, 1, 6), extras[:3], strict=True))
            ),
            prefill=tuple(PrefillChunk(row, 0, 17, samples=True) for row in (4, 1, 6)),
        )
        started.run(first)
        second = decode_plan(
            (4, 1, 6),
            admissions=tuple(
                admission(row, PROMPTS[0], 12 + 2 * place, sampling=sampling)
                for place, (row, sampling) in enumerate(zip((0, 7), extras[3:], strict=True))
            ),
            prefill=(PrefillChunk(0, 0, 3, samples=False), PrefillChunk(7, 0, 5, samples=True)),
        )
        result = started.run(second)
        started.executor.close()
        return result.token_ids.tolist(), dict(result.logprobs)

    asked = (plain, hungry, curious, hungry, hungry)
    tokens, logprobs = outcomes((64,), asked)
    assert len(tokens) == 4, "three rows and the chunk that samples"
    assert set(logprobs) == {1, 2, 3}
    exact_tokens, exact = outcomes((), asked)
    assert tokens == exact_tokens
    for entry, found in logprobs.items():  # Products of other shapes may round otherwise.
        assert found.token_logprob == pytest.approx(exact[entry].token_logprob, abs=1e-4)
        assert dict(found.top) == pytest.approx(dict(exact[entry].top), abs=1e-4)
    assert tokens != outcomes((64,), (plain,) * 5)[0]


def test_rows_that_decoded_take_no_part_in_a_step_of_prompts_alone(
    started: Started, expected: list[list[int]]
) -> None:
    """A step names the rows that decode in it; whoever decoded before waits, and loses nothing."""
    rows = (0, 1)
    first = prefill((0, 1, 2))
    steps = [started.run(first).token_ids[:2], started.run(decode_plan(rows)).token_ids]
    alone = decode_plan(
        (),
        epoch=2,
        admissions=(admission(5, PROMPTS[0], 10),),
        prefill=(PrefillChunk(5, 0, 5, samples=True),),
    )
    assert started.run(alone).token_ids.tolist() == [expected[0][0]]
    steps += [started.run(decode_plan(rows)).token_ids for _ in range(2)]
    assert np.stack(steps, axis=1).tolist() == [tokens[:4] for tokens in expected[:2]]


def test_an_eager_step_tells_backends_the_longest_chunk_and_sequence(started: Started) -> None:
    """Bounds of the host: a backend sizes its grid and its workspace by them."""
    lengths = ((0, 3), (4, 7), (2, 5))
    chunks = tuple(
        PrefillChunk(row=row, start=start, length=length, samples=False)
        for row, (start, length) in enumerate(lengths)
    )
    step = started.runner._eager_step(chunks, num_decode=0, needs_tail=False)
    assert (step.max_query_len, step.max_seq_len) == (7, 11)


def test_a_plan_whose_epoch_the_worker_does_not_hold_is_refused(started: Started) -> None:
    """Its rows are those of an earlier plan, which was lost or came out of order."""
    rows = (0, 1, 2)
    started.run(prefill(rows))
    started.run(decode_plan(rows, epoch=4))
    with pytest.raises(InconsistentStateError, match=r"epoch 5 .*those of epoch 4; .*every plan"):
        started.runner.submit(StepPlan(epoch=5, num_decode=3))
    started.run(StepPlan(epoch=4, num_decode=3))


def test_copies_of_a_steady_plan_change_nothing(
    started: Started, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal plans in objects of their own: no update of the tables, no new plan of the tail."""
    rows, sampling = (0, 1, 2), RowSampling(logprobs=1)
    steps = [started.run(prefill(rows, sampling=sampling)), started.run(decode_plan(rows))]
    calls: list[object] = []
    monkeypatch.setattr(started.runner.ops, "scatter_updates", lambda *update: calls.append(update))
    monkeypatch.setattr(started.runner.sampling._tail, "plan", lambda *plan: calls.append(plan))
    steps += [started.run(StepPlan(epoch=1, num_decode=3)) for _ in range(3)]
    assert np.stack([step.token_ids for step in steps], axis=1).tolist() == [
        tokens[:5] for tokens in expected
    ]
    assert calls == []
