"""Checks of what an attention backend keeps between calls: it may keep nothing that can change.

An engine writes into the same tensors step after step, makes others where it must, plans steps of
either phase on the same backends, and may have a neighbour in its process. So neither an address
nor an object nor equal lengths say that a step is the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionConfig,
    DecodeMetadata,
    Phase,
    PrefillMetadata,
)
from nanovllm_kit.attention_backend import AttentionSubject, BackendUnderTest, assert_near
from nanovllm_kit.attention_draws import size
from nanovllm_kit.attention_replay import perturb
from nanovllm_kit.paged_attention import PagedCase


@dataclass
class Step:
    """A batch of one phase and the metadata that says so."""

    phase: Phase
    case: PagedCase
    metadata: DecodeMetadata | PrefillMetadata

    def plan(self, backend: AttentionBackend) -> None:
        """What an engine does once per step."""
        if isinstance(self.metadata, DecodeMetadata):
            backend.plan_decode(self.metadata)
        else:
            backend.plan_prefill(self.metadata)

    def run(self, backend: AttentionBackend) -> Tensor:
        """What it does once per layer."""
        case = self.case
        out = torch.full_like(case.q_THD, float("nan"))
        caches = case.k_cache, case.v_cache
        if isinstance(self.metadata, DecodeMetadata):
            backend.run_decode(case.q_THD, *caches, self.metadata, out)
        else:
            backend.run_prefill(case.q_THD, *caches, self.metadata, out)
        return out

    def check(self, backend: AttentionBackend, what: str) -> None:
        """Run it; fail where the output is off the reference."""
        __tracebackhide__ = True
        assert_near(self.case, self.run(backend), f"{self.phase}, {what}")

    def tensors(self) -> list[Tensor]:
        """What the engine gives a backend for this step."""
        case, metadata = self.case, self.metadata
        mine = [case.q_THD, case.k_cache, case.v_cache, metadata.block_table, metadata.seq_lens]
        if isinstance(metadata, PrefillMetadata):
            mine.append(metadata.query_start_loc)
        return mine

    def renewed(self, *, tensors: bool) -> Step:
        """The same step by another object, with other tensors too or around the same ones."""
        if not tensors:
            return Step(self.phase, self.case, replace(self.metadata))
        case = replace(
            self.case,
            q_THD=self.case.q_THD.clone(),
            k_cache=self.case.k_cache.clone(),
            v_cache=self.case.v_cache.clone(),
            block_table=self.case.block_table.clone(),
        )
        return make_step(self.phase, case)


def make_step(phase: Phase, case: PagedCase) -> Step:
    """A step with metadata of its own, over the tensors of a batch."""
    if phase == "decode":
        bound = case.block_table.shape[1] * case.block_size
        return Step(phase, case, case.decode_metadata(bound))
    return Step(phase, case, case.prefill_metadata())


def drawn_step(
    subject: BackendUnderTest,
    draws: Random,
    phase: Phase,
    rows: int,
    longest: int,
    **shape: Any,
) -> Step:
    """A step of some rows of up to `longest` tokens, padding and chunks without queries too."""
    lens = [size(draws, 1, longest) for _ in range(rows)]
    queries = None
    if phase == "prefill":
        queries = [min(n, draws.randint(0, 12)) for n in lens]
        queries[0] = 1
    else:
        lens = [0 if draws.random() < 0.1 else n for n in lens]
    return make_step(phase, small_case(subject, draws, lens, queries, **shape))


def small_case(
    subject: BackendUnderTest,
    draws: Random,
    lens: list[int],
    queries: list[int] | None = None,
    **shape: Any,
) -> PagedCase:
    """A batch of few heads: these checks are about time, not about shapes."""
    heads = {"num_heads": 2, "num_kv_heads": 1 if subject.capabilities.gqa else 2}
    if subject.reasons(subject.requirements(**heads)):
        heads = {}
    return subject.case(lens, queries, seed=draws.randrange(2**31), **heads, **shape)


def backend_for(
    subject: BackendUnderTest, steps: list[Step], longest: int
) -> tuple[AttentionBackend, list[Step]]:
    """A backend that holds all of these steps, and the steps with tables of its width."""
    block_size = steps[0].case.block_size
    config = replace(
        steps[0].case.config(max_num_seqs=max(len(step.case.seq_lens) for step in steps)),
        max_model_len=-(-longest // block_size) * block_size,
        max_num_batched_tokens=max(1, *(len(step.case.q_THD) for step in steps)),
    )
    return subject.backend(config), [widened(step, config) for step in steps]


def widened(step: Step, config: AttentionConfig) -> Step:
    """The step with a table as wide as a backend's configuration says."""
    missing = config.max_blocks_per_seq - step.case.block_table.shape[1]
    table = torch.nn.functional.pad(step.case.block_table, (0, missing))
    return make_step(step.phase, replace(step.case, block_table=table))


class AttentionState(AttentionSubject):
    """Every plan is of its own step, whatever the one before was."""

    def test_equal_lengths_may_come_with_other_contents(
        self, subject: BackendUnderTest, draws: Random
    ) -> None:
        """Blocks, keys, queries and lengths change one by one, in place or in new tensors.

        Lengths may be equal from step to step, and so may addresses and the metadata object.
        """
        for phase in subject.phases:
            lens = [subject.block_size + draws.randint(4, 70) for _ in range(4)]
            queries = [draws.randint(2, 9) for _ in lens] if phase == "prefill" else None
            step = make_step(phase, small_case(subject, draws, lens, queries))
            backend = subject.backend(step.case.config())
            step.plan(backend)
            step.check(backend, "the first step")
            # Each change as a captured step sees it, then in any order by any object.
            again = draws.sample([*CHANGES.items()], len(CHANGES))
            for number, (name, change) in enumerate([*CHANGES.items(), *again]):
                if change is _swap_queries and phase == "decode":
                    continue
                change(step, draws)
                identity = IDENTITIES[0] if number < len(CHANGES) else draws.choice(IDENTITIES)
                if identity != IDENTITIES[0]:
                    step = step.renewed(tensors=identity == "new tensors")
                step.plan(backend)
                step.check(backend, f"{name}, by {identity}")

    def test_rows_grow_token_by_token(self, decoder: BackendUnderTest, draws: Random) -> None:
        """As in an engine's steady step: lengths grow in place, tables gain blocks, keys come."""
        block_size = decoder.block_size
        lens = [block_size - 2, 2 * block_size - 1, draws.randint(1, block_size), 3 * block_size]
        case = small_case(decoder, draws, [n + 4 for n in lens])
        step, blocks = make_step("decode", case), case.block_table.clone()
        backend = decoder.backend(case.config())
        for grown in range(5):
            keys = [n + grown for n in lens]
            for row, count in enumerate(keys):
                case.block_table[row] = 0
                own = slice(-(-count // block_size))
                case.block_table[row, own] = blocks[row, own]
            step.case = replace(case, seq_lens=tuple(keys))
            step.metadata.seq_lens.copy_(step.case.decode_metadata().seq_lens)
            case.q_THD.copy_(case.q_THD.flip(-1))
            step.plan(backend)
            step.check(backend, f"{grown} tokens later")

    def test_a_plan_is_the_last_one(self, subject: BackendUnderTest, draws: Random) -> None:
        """Plans of steps that never run, and of the other phase in between, leave nothing."""
        # As many rows in each, so that a step cannot be told from another by its shape.
        rows = draws.randint(2, 5)
        steps = [drawn_step(subject, draws, phase, rows, 80) for phase in subject.phases * 3]
        backend, steps = backend_for(subject, steps, 80)
        last: dict[Phase, Step] = {}
        for number in range(24):
            step = draws.choice(steps)
            step.plan(backend)
            last[step.phase] = step
            for phase in draws.sample([*last], draws.randint(0, len(last))):
                last[phase].check(backend, f"planned last, after {number + 1} plans")

    def test_batches_shrink_and_grow(self, subject: BackendUnderTest, draws: Random) -> None:
        """Of one row and of all, of short ones and of long, in any order and in either phase."""
        rows, longest = draws.randint(5, 9), draws.randint(150, 300)
        sizes = [(rows, longest), (1, 3)]
        sizes += [(draws.randint(1, rows), size(draws, 1, longest)) for _ in range(5)]
        steps = [
            drawn_step(subject, draws, phase, *both) for both in sizes for phase in subject.phases
        ]
        backend, steps = backend_for(subject, steps, longest)
        for step in steps:
            perturb(step.case.q_THD.device)
            step.plan(backend)
            step.check(backend, f"after other batches on a backend for {rows} rows")

    def test_backends_share_nothing(self, subject: BackendUnderTest, draws: Random) -> None:
        """Two engines in a process, alike or not, plan and run in any order, each its own steps."""
        other = {"block_size": 2 * subject.block_size, "head_size": subject.head_sizes[-1]}
        for rows, longest, shape in ((4, 80, {}), (7, 200, other)):
            engines = []
            for limits in ((4, 80, {}), (rows, longest, shape)):
                steps = [
                    drawn_step(subject, draws, phase, *limits[:2], **limits[2])
                    for phase in subject.phases * 2
                ]
                engines.append(backend_for(subject, steps, limits[1]))
            last: dict[tuple[int, Phase], Step] = {}
            for _ in range(10):
                engine = draws.randrange(2)
                step = draws.choice(engines[engine][1])
                step.plan(engines[engine][0])
                last[engine, step.phase] = step
                for one, phase in draws.sample([*last], draws.randint(0, len(last))):
                    last[one, phase].check(engines[one][0], f"engine {one + 1} of two")


# ------------------------------------------------------------------ what changes between steps


def _move_blocks(step: Step, draws: Random) -> None:
    """Every block goes elsewhere in the cache, and the table follows: outputs stay as they were."""
    case = step.case
    order = torch.tensor(draws.sample(range(len(case.k_cache)), len(case.k_cache)))
    order = order.to(case.k_cache.device)
    for cache in (case.k_cache, case.v_cache):
        cache[order] = cache.clone()
    case.block_table.copy_(order[case.block_table.long()])


def _swap_blocks(step: Step, draws: Random) -> None:
    """Two sequences swap their tables' first blocks, as blocks are freed and handed out again."""
    table = step.case.block_table
    one, other = draws.sample(range(len(table)), 2)
    table[[one, other], 0] = table[[other, one], 0]


def _change_keys(step: Step, draws: Random) -> None:
    """The same blocks hold other tokens."""
    for cache in (step.case.k_cache, step.case.v_cache):
        cache.copy_(cache.flip(-1) * draws.choice((-1, 1)))


def _change_queries(step: Step, draws: Random) -> None:
    step.case.q_THD.copy_(step.case.q_THD.flip(-1) * draws.choice((-1, 1)))


def _swap_lengths(step: Step, draws: Random) -> None:
    """Two sequences swap places but for their queries, so the longest is as long as before."""
    case = step.case
    order = [*range(len(case.seq_lens))]
    pairs = [(i, j) for i in order for j in order[:i] if case.query_lens[i] == case.query_lens[j]]
    one, other = draws.choice(pairs) if pairs else (0, 0)
    order[one], order[other] = order[other], order[one]
    case.block_table.copy_(case.block_table[order])
    step.case = replace(case, seq_lens=tuple(case.seq_lens[i] for i in order))
    step.metadata.seq_lens.copy_(step.metadata.seq_lens[order])


def _swap_queries(step: Step, draws: Random) -> None:
    """Two chunks swap how many queries they bring: lengths of sequences stay as they are."""
    case, metadata = step.case, step.metadata
    assert isinstance(metadata, PrefillMetadata)
    counts = [*case.query_lens]
    one, other = draws.sample(range(len(counts)), 2)
    counts[one], counts[other] = counts[other], counts[one]
    step.case = replace(case, query_lens=tuple(counts))
    metadata.query_start_loc.copy_(step.case.prefill_metadata().query_start_loc)


CHANGES: dict[str, Callable[[Step, Random], None]] = {
    "blocks elsewhere": _move_blocks,
    "blocks of each other": _swap_blocks,
    "other keys in the same blocks": _change_keys,
    "other queries": _change_queries,
    "lengths of each other": _swap_lengths,
    "queries of each other": _swap_queries,
}
IDENTITIES = ("the same metadata object", "new metadata around the same tensors", "new tensors")
