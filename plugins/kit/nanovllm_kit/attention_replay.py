"""Checks of captured decode: on a GPU by CUDA graphs, on a CPU by recording what a step does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from nanovllm_core.config import bucket_sizes
from nanovllm_core.interfaces.attention import AttentionBackend, DecodeMetadata
from nanovllm_kit.attention_backend import (
    AttentionSubject,
    BackendUnderTest,
    assert_near,
)
from nanovllm_kit.attention_checks import load_decode, run_decode_without_waiting
from nanovllm_kit.paged_attention import PagedCase
from nanovllm_kit.recording import HostReadError, record

ROWS = {"cpu": 4, "cuda": 32}
"""`limits.max_num_seqs` of the engine that captures: few rows where kernels are interpreted."""


class Captured(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Run it again."""


Capture = Callable[[Callable[[], None]], Captured]
"""Captures a step, a function of no arguments."""


class AttentionReplay(AttentionSubject):
    """A step that is captured once follows its inputs forever."""

    def test_plans_follow_their_inputs(self, decoder: BackendUnderTest) -> None:
        """Each plan is of its own step: nothing is left over from other lengths or batch sizes."""
        longest = decoder.longest
        steps = [
            decoder.case([longest, 5, 70, 1], seed=1),
            decoder.case([3], seed=2),
            decoder.case([1, 90, 0, longest], seed=3),
            decoder.case([longest, longest], seed=4),
        ]
        backend = decoder.backend(replace(steps[0].config(), max_num_seqs=4))
        for case in steps:
            assert_near(case, decoder.decode(case, backend), "one backend, changing steps")

    def test_a_plan_serves_every_layer(self, decoder: BackendUnderTest) -> None:
        """One plan, then a run per layer: each over its own cache, each as if it were the first."""
        case = decoder.case([decoder.longest, 5, 0, 70])
        backend = decoder.backend(case.config())
        metadata = case.decode_metadata(case.config().max_model_len)
        backend.plan_decode(metadata)
        for number in range(3):
            layer = replace(case, v_cache=case.v_cache * (number + 1), q_THD=case.q_THD / 2**number)
            out = torch.full_like(layer.q_THD, float("nan"))
            backend.run_decode(layer.q_THD, layer.k_cache, layer.v_cache, metadata, out)
            assert_near(layer, out, f"layer {number} of one plan")

    def test_recorded_steps_follow_changed_inputs(self, decoder: BackendUnderTest) -> None:
        """On a CPU a recording stands for the graph: host numbers frozen, memory by address.

        Rows, lengths, blocks and queries change between replays, at every bucket of an engine of
        four rows (1, 2 and 4); steps of other sizes run in between. Each replay gives bitwise what
        the same step gives when it is planned. A backend that reads lengths on the host where
        nothing is captured is checked on a GPU only.
        """
        _skip_without_graphs(decoder, "cpu")
        try:
            for plan_is_captured in (True, False):
                check_replays(decoder, recorded, plan_is_captured=plan_is_captured)
        except HostReadError as error:
            pytest.skip(f"on a CPU, where it may, {error}")

    def test_captured_steps_follow_changed_inputs(self, decoder: BackendUnderTest) -> None:
        """CUDA graphs at every bucket of an engine of 32 rows: 1, 2, 4, 8, 16, 24 and 32.

        Rows, lengths, blocks and queries change between replays, and so does what the allocator
        gives; steps of other sizes run in between. Each replay gives bitwise what the same step
        gives when it is planned.
        """
        _skip_without_graphs(decoder, "cuda")
        for plan_is_captured in (True, False):
            check_replays(decoder, captured, plan_is_captured=plan_is_captured)

    def test_decode_never_waits_for_the_device(self, decoder: BackendUnderTest) -> None:
        """Neither planning nor running makes a call that synchronises."""
        _skip_without_graphs(decoder, "cuda")
        case = decoder.case([300, 0, 5, 128])
        backend = decoder.backend(case.config())
        metadata = case.decode_metadata(case.config().max_model_len)
        out = run_decode_without_waiting(backend, case, metadata)
        assert_near(case, out, "decode without synchronising")

    def test_captured_tensors_stay_where_they_are(self, decoder: BackendUnderTest) -> None:
        """Allocated once: plans and runs write into them, and make none of them anew."""
        case = decoder.case([decoder.longest, 5, 0, 70])
        backend = decoder.backend(case.config())
        before = _addresses(backend)
        for lengths in ([1, 1, 1, 1], [decoder.longest] * 4, [0, 9], [33]):
            step = decoder.case(lengths)
            decoder.decode(step, backend)
            del step
            now = _addresses(backend)
            if moved := sorted(
                name for name in {*before, *now} if before.get(name) != now.get(name)
            ):
                raise AssertionError(
                    f"{', '.join(moved)} changed place (or were added) after a step of lengths "
                    f"{lengths}: allocate them in allocate() and write into them"
                )


def _skip_without_graphs(subject: BackendUnderTest, device: str) -> None:
    if subject.capabilities.cuda_graphs == "none":
        pytest.skip("declares that it cannot be captured")
    if subject.device != device:
        pytest.skip(f"is about {device}; the backend runs on {subject.device} here")


@dataclass(frozen=True, slots=True)
class _Step:
    """One bucket's static tensors, and what was captured over them."""

    static: PagedCase
    metadata: DecodeMetadata
    out: Tensor
    run: Callable[[], None]
    captured: Captured


def check_replays(
    subject: BackendUnderTest,
    capture: Capture,
    *,
    plan_is_captured: bool,
) -> None:
    longest = _longest(subject)
    # The engine's own buckets, the largest captured first.
    buckets = bucket_sizes(ROWS[subject.device])[::-1]
    # The lengths of each round, over and over until a bucket's rows have one.
    rounds = [[longest, 70, 1, 40], [1], [0, 33, longest, 16], [longest]]
    cases = {
        (bucket, number): _replayed_case(subject, [*islice(cycle(lengths), bucket)], seed=number)
        for bucket in buckets
        for number, lengths in enumerate(rounds)
    }
    num_blocks = max(case.k_cache.shape[0] for case in cases.values())
    backend = subject.backend(_static(subject, max(buckets), num_blocks).config())
    steps = {
        bucket: _capture_step(subject, backend, bucket, num_blocks, capture, plan_is_captured)
        for bucket in buckets
    }
    gc.collect()  # What a dropped plan held in cycles is freed, as it would be sooner or later.
    other = _case(subject, [17, longest, 3])
    kind = "plan and runs" if plan_is_captured else "runs after a plan of their own,"
    for (bucket, number), case in sorted(cases.items(), key=lambda item: item[0][1]):
        step = steps[bucket]
        load_decode(step.static, step.metadata, case)
        perturb(case.q_THD.device)
        if not plan_is_captured:
            backend.plan_decode(step.metadata)
        step.out.fill_(float("nan"))
        step.captured.replay()
        replayed = step.out.clone()
        assert_near(case, replayed, f"{kind} replayed at bucket {bucket}, round {number}")
        step.out.fill_(float("nan"))
        backend.plan_decode(step.metadata)
        step.run()
        live = step.metadata.seq_lens > 0
        if not torch.equal(replayed[live], step.out[live]):
            raise AssertionError(f"{kind} replayed at bucket {bucket} differ from the step itself")
        if bucket == 2:
            # A step that is not captured, as one with a prompt is: it must leave the graphs valid.
            assert_near(other, subject.decode(other, backend), "a step between replays")


def _capture_step(
    subject: BackendUnderTest,
    backend: AttentionBackend,
    bucket: int,
    num_blocks: int,
    capture: Capture,
    plan_is_captured: bool,
) -> _Step:
    """As the engine captures: rows of padding, once to warm up and once for the graph."""
    static = _static(subject, bucket, num_blocks)
    metadata = static.decode_metadata(static.config().max_model_len)
    out = static.new_out()

    def run() -> None:
        # Two layers.
        for _ in range(2):
            backend.run_decode(static.q_THD, static.k_cache, static.v_cache, metadata, out)

    def step() -> None:
        if plan_is_captured:
            backend.plan_decode(metadata)
        run()

    backend.plan_decode(metadata)
    run()
    return _Step(static, metadata, out, run, capture(step))


def _static(subject: BackendUnderTest, bucket: int, num_blocks: int) -> PagedCase:
    """Zeroed tensors at a fixed place, wide enough for every case of a bucket."""
    case = _case(subject, [0] * bucket)
    width = -(-_longest(subject) // subject.block_size)
    shape = (num_blocks, *case.k_cache.shape[1:])
    k_cache = case.k_cache.new_zeros(shape)
    static = replace(
        case,
        q_THD=torch.zeros_like(case.q_THD),
        block_table=case.block_table.new_zeros(bucket, width),
    )
    if case.latent is not None:
        return static.with_rows(k_cache, case.latent)
    return replace(static, k_cache=k_cache, v_cache=torch.zeros_like(k_cache))


def _longest(subject: BackendUnderTest) -> int:
    """Long enough that a row is worth cutting in parts, short where kernels are interpreted."""
    return 150 if subject.device == "cpu" else 1024


def _case(subject: BackendUnderTest, seq_lens: Sequence[int], **changes: Any) -> PagedCase:
    """Few heads: replays are about time, not about shapes."""
    num_heads = 2 if subject.capabilities.gqa else 1
    return subject.case(seq_lens, num_heads=num_heads, num_kv_heads=1, **changes)


def _replayed_case(subject: BackendUnderTest, seq_lens: Sequence[int], seed: int) -> PagedCase:
    """With one key that outweighs the others, next to a row's last."""
    return _case(subject, seq_lens, seed=seed, needle=[max(0, n - 2) for n in seq_lens])


def perturb(device: torch.device) -> None:
    """Take memory, fill it with NaN and free it: what reads freed memory shows it."""
    for size in (2**8, 2**14, 2**20):
        torch.full((size,), float("nan"), device=device)


def recorded(step: Callable[[], None]) -> Captured:
    """Capture a step on a CPU."""
    with record() as recording:
        step()
    return recording


def captured(step: Callable[[], None]) -> Captured:
    """Capture a step as a CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _addresses(backend: AttentionBackend) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in backend.captured_tensors().items()}
