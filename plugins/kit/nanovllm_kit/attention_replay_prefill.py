"""Checks of captured prefill, for backends that declare it (`cuda_graphs="full"`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import AttentionBackend, PrefillMetadata
from nanovllm_kit.attention_backend import (
    AttentionSubject,
    BackendUnderTest,
    assert_near,
)
from nanovllm_kit.attention_replay import Capture, captured, perturb, recorded
from nanovllm_kit.paged_attention import PagedCase
from nanovllm_kit.recording import HostReadError

NUM_CHUNKS = 4
"""Entries of a captured step, chunks and padding."""
SIZES = {"cpu": (100, 12), "cuda": (1280, 512, 96)}
"""Prompt tokens of captured steps, the largest captured first, as the engine does."""
LONGEST = {"cpu": 90, "cuda": 1024}
"""Tokens of the longest sequence: one chunk never fills the largest size."""


class AttentionPrefillReplay(AttentionSubject):
    """A step with prompts that is captured once follows its chunks forever."""

    def test_recorded_prefill_follows_changed_chunks(self, prefiller: BackendUnderTest) -> None:
        """On a CPU a recording stands for the graph: host numbers frozen, memory by address.

        Number and lengths of chunks, their contexts, blocks and queries change between replays, the
        rest is padding: chunks of no token, and queries beyond the last chunk. Each replay gives
        bitwise what the same step gives when it is planned.
        """
        _skip_unless_full(prefiller, "cpu")
        try:
            check_prefill_replays(prefiller, recorded)
        except HostReadError as error:
            pytest.skip(f"on a CPU, where it may, {error}")

    def test_captured_prefill_follows_changed_chunks(self, prefiller: BackendUnderTest) -> None:
        """The same by CUDA graphs, with a perturbed allocator."""
        _skip_unless_full(prefiller, "cuda")
        check_prefill_replays(prefiller, captured)


def _skip_unless_full(subject: BackendUnderTest, device: str) -> None:
    if subject.capabilities.cuda_graphs != "full":
        pytest.skip("declares that its prefill cannot be captured")
    if subject.device != device:
        pytest.skip(f"is about {device}; the backend runs on {subject.device} here")
    if reasons := subject.reasons(subject.requirements(phase="prefill", cuda_graphs=True)):
        pytest.skip("; ".join(reasons))


@dataclass(frozen=True, slots=True)
class _Step:
    """One size's static tensors, and what runs over them."""

    static: PagedCase
    metadata: PrefillMetadata
    out: Tensor
    run: Callable[[], None]


def _rounds(size: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """Query and sequence lengths: full, nearly empty and empty, first chunks and late ones."""
    third = size // 3
    return [
        ([], []),
        (_full(size, longest), _full(size, longest)),
        ([third, 1, third], [third, longest, longest]),
        ([1], [1]),
        ([2, third, 1, third], [longest, third, 5, third + 7]),
    ]


def _full(size: int, longest: int) -> list[int]:
    """Chunks of `size` tokens in all, each no longer than a sequence can be."""
    rest = [size % longest] if size % longest else []
    return [longest] * (size // longest) + rest


def check_prefill_replays(subject: BackendUnderTest, capture: Capture) -> None:
    """Fail where a replay is off the reference, or differs from the same step when planned."""
    longest = LONGEST[subject.device]
    cases = [
        (size, _case(subject, queries, keys, seed=number))
        for number in range(len(_rounds(1, 1)))
        for size in SIZES[subject.device]
        for queries, keys in [_rounds(size, longest)[number]]
    ]
    num_blocks = max(case.k_cache.shape[0] for _, case in cases)
    backend = None
    steps = {}
    for size in SIZES[subject.device]:
        static = _static(subject, size, num_blocks)
        backend = backend or subject.backend(static.config())
        step = _bind(backend, static)
        # As the engine does: of padding alone, once to warm up and once for the graph.
        step.metadata.seq_lens.zero_()
        step.metadata.query_start_loc.zero_()
        step.run()
        steps[size] = (step, capture(step.run))
    for size, case in cases:
        step, graph = steps[size]
        _load(step, case)
        perturb(case.q_THD.device)
        step.out.fill_(float("nan"))
        graph.replay()
        replayed = step.out[: case.q_THD.shape[0]].clone()
        assert_near(case, replayed, f"a captured step of {size} prompt tokens")
        step.run()
        if not torch.equal(replayed, step.out[: case.q_THD.shape[0]]):
            raise AssertionError(
                f"captured prefill of {size} tokens differs from the step itself: "
                f"query_lens {case.query_lens}, seq_lens {case.seq_lens}"
            )


def _bind(backend: AttentionBackend, static: PagedCase) -> _Step:
    size, config = static.q_THD.shape[0], static.config()
    metadata = replace(
        static.prefill_metadata(),
        max_query_len=min(size, config.max_model_len),
        max_seq_len=config.max_model_len,
    )
    out = static.new_out()

    def run() -> None:
        backend.plan_prefill(metadata)
        for _ in range(2):  # layers
            backend.run_prefill(static.q_THD, static.k_cache, static.v_cache, metadata, out)

    return _Step(static, metadata, out, run)


def _case(
    subject: BackendUnderTest, queries: Sequence[int], keys: Sequence[int], seed: int
) -> PagedCase:
    """Chunks, and padding up to NUM_CHUNKS entries; few heads, since replays are about time."""
    padding = [0] * (NUM_CHUNKS - len(queries))
    return subject.case(
        [*keys, *padding],
        [*queries, *padding],
        num_heads=2 if subject.capabilities.gqa else 1,
        num_kv_heads=1,
        seed=seed,
    )


def _static(subject: BackendUnderTest, size: int, num_blocks: int) -> PagedCase:
    """Zeroed tensors at a fixed place, wide enough for every case of a size."""
    longest = LONGEST[subject.device]
    queries = _full(size, longest)
    case = _case(subject, queries, [longest] * len(queries), seed=0)
    cache = case.k_cache.new_zeros(num_blocks, *case.k_cache.shape[1:])
    case = replace(case, q_THD=torch.zeros_like(case.q_THD))
    if case.latent is not None:
        return case.with_rows(cache, case.latent)
    return replace(case, k_cache=cache, v_cache=cache.clone())


def _load(step: _Step, case: PagedCase) -> None:
    """Put a case's contents where the captured step reads them; padding is NaN or stale."""
    static, metadata = step.static, case.prefill_metadata()
    num_tokens, width = case.q_THD.shape[0], case.block_table.shape[1]
    static.q_THD.fill_(float("nan"))[:num_tokens].copy_(case.q_THD)
    for target, source in ((static.k_cache, case.k_cache), (static.v_cache, case.v_cache)):
        target.fill_(float("nan"))[: source.shape[0]].copy_(source)
    static.block_table[:, :width].copy_(case.block_table)
    step.metadata.seq_lens.copy_(metadata.seq_lens)
    step.metadata.query_start_loc.copy_(metadata.query_start_loc)
