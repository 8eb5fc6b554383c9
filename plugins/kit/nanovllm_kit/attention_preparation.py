"""Checks of a backend that decodes from packed q, k, v, against preparation and decode apart.

The reference prepares them (`TorchKernels.prepare_qkv`) into copies of the same caches, and attends
in float64 over what it stored.
Shape suffixes as in `nanovllm_core.interfaces.attention`; X = (H + 2K)·D, packed q, k, v.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import AttentionBackend, DecodeMetadata
from nanovllm_core.interfaces.kernels import QKPrep
from nanovllm_core.kernels import TorchKernels
from nanovllm_kit.attention_backend import (
    EDGES,
    AttentionSubject,
    BackendUnderTest,
    assert_near,
    describe,
)
from nanovllm_kit.attention_draws import drawn_shape, size
from nanovllm_kit.paged_attention import PagedCase

POSITIONS = 512
"""Positions of the rotation's table; rows need not be at the positions of their last keys."""
LARGE = 1_000.0
"""What some heads are multiplied by before their norm: float16 cannot hold their squares."""


@dataclass(frozen=True, slots=True)
class UnpreparedCase:
    """A decode batch before its preparation: the newest keys and values are not in the caches."""

    case: PagedCase
    qkv_BX: Tensor  # noqa: N815 - shape suffix
    prep: QKPrep
    positions: Tensor
    slots: Tensor

    def prepared(self) -> PagedCase:
        """The batch as the reference prepares it, in caches of its own."""
        case = self.case
        k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
        q_BHD = TorchKernels().prepare_qkv(
            self.qkv_BX, self.prep, self.positions, self.slots, k_cache, v_cache
        )
        return replace(case, q_THD=q_BHD, k_cache=k_cache, v_cache=v_cache)

    def rows(self, rows: slice) -> UnpreparedCase:
        """Some rows of the batch, in caches of their own."""
        case = replace(
            self.case,
            q_THD=self.case.q_THD[rows],
            k_cache=self.case.k_cache.clone(),
            v_cache=self.case.v_cache.clone(),
            block_table=self.case.block_table[rows],
            query_lens=self.case.query_lens[rows],
            seq_lens=self.case.seq_lens[rows],
        )
        of_rows = self.qkv_BX[rows], self.positions[rows], self.slots[rows]
        return UnpreparedCase(case, of_rows[0], self.prep, *of_rows[1:])

    def decode(self, backend: AttentionBackend) -> Tensor:
        """Plan one step and run one layer of it; the caches of the case are written."""
        backend.plan_decode(self._metadata(backend))
        return self.run(backend)

    def run(self, backend: AttentionBackend) -> Tensor:
        """Run one layer of the planned step, into a tensor that held NaN."""
        case = self.case
        out = torch.full_like(case.q_THD, float("nan"))
        backend.run_decode_from_qkv(
            self.qkv_BX,
            self.prep,
            self.positions,
            self.slots,
            case.k_cache,
            case.v_cache,
            self._metadata(backend),
            out,
        )
        return out

    def _metadata(self, backend: AttentionBackend) -> DecodeMetadata:
        return self.case.decode_metadata(max_seq_len=backend.config.max_model_len)


def drawn_prep(case: PagedCase, draws: Random) -> QKPrep:
    """A preparation for the heads of a case: any share of a head rotates; norms on q, k or none."""
    num_kv_heads, head_size = case.k_cache.shape[2:]
    device, dtype = case.q_THD.device, case.q_THD.dtype
    generator = torch.Generator().manual_seed(draws.randrange(2**31))
    half = draws.choice((head_size // 2, head_size // 4, draws.randint(1, max(1, head_size // 2))))
    angles = torch.rand(POSITIONS, max(half, 1), generator=generator) * 6.3
    weights = [
        (1 + torch.rand(head_size, generator=generator)).to(
            device, draws.choice((dtype, torch.float))
        )
        for _ in range(2)
    ]
    has_norm = draws.choice(((True, True), (True, True), (False, False), (True, False)))
    q_weight, k_weight = (w if has else None for w, has in zip(weights, has_norm, strict=True))
    return QKPrep(
        num_heads=case.q_THD.shape[1],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        cos_sin_cache=torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
        q_norm_weight=q_weight,
        k_norm_weight=k_weight,
        eps=draws.choice((1e-6, 1e-2)),
    )


def unprepared(case: PagedCase, prep: QKPrep, draws: Random, held: float) -> UnpreparedCase:
    """The case with packed q, k, v of its last tokens, whose places in the caches hold `held`.

    A norm undoes the size of its heads, so those with one may be large.
    """
    device, dtype = case.q_THD.device, case.q_THD.dtype
    rows, block_size = len(case.seq_lens), case.block_size
    generator = torch.Generator().manual_seed(draws.randrange(2**31))
    heads = prep.num_heads + 2 * prep.num_kv_heads
    qkv = torch.randn(rows, heads, prep.head_size, generator=generator)
    q, k = qkv[:, : prep.num_heads], qkv[:, prep.num_heads : -prep.num_kv_heads]
    for heads_BHD, norm in ((q, prep.q_norm_weight), (k, prep.k_norm_weight)):
        if norm is not None:
            heads_BHD.mul_(draws.choice((1.0, LARGE)))
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    slots = []
    for row, keys in enumerate(case.seq_lens):
        last = keys - 1
        block = int(case.block_table[row, last // block_size]) if keys else -1
        slots.append(block * block_size + last % block_size if keys else -1)
        if keys:
            k_cache[block, last % block_size] = v_cache[block, last % block_size] = held
    positions = [draws.randrange(POSITIONS) for _ in range(rows)]
    return UnpreparedCase(
        replace(case, k_cache=k_cache, v_cache=v_cache),
        qkv.flatten(1).to(device, dtype),
        prep,
        torch.tensor(positions, dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
    )


class AttentionPreparation(AttentionSubject):
    """What a backend must hold that prepares q, k and v itself."""

    def test_decode_from_qkv_equals_preparation_and_decode(
        self, decoder: BackendUnderTest, draws: Random
    ) -> None:
        """In any shape: the output, and in the caches each row's newest key and value alone."""
        for _ in range(12 if decoder.device == "cpu" else 40):
            lens = [draws.choice((size(draws, 1, decoder.longest), 1)) for _ in range(3)]
            case = decoder.case(
                [*lens, 0], seed=draws.randrange(2**31), **drawn_shape(decoder, draws)
            )
            _check(decoder, case, draws)

    def test_decode_from_qkv_at_the_edges_of_tiles_and_blocks(
        self, decoder: BackendUnderTest, draws: Random
    ) -> None:
        """The newest key is the first of a block or of a tile, or the only one.

        Alone, a long row is worth cutting in parts that are merged: only one of them has that key.
        """
        _check(decoder, decoder.case([*EDGES, 0, decoder.longest]), draws)
        _check(decoder, decoder.case([decoder.longest]), draws)

    def test_decode_from_qkv_sees_windows_and_soft_caps(
        self, decoder: BackendUnderTest, draws: Random
    ) -> None:
        """The newest key counts as one of the window; its score is bent as the others' are."""
        for window in (1, 2, 31, 100):
            if decoder.capabilities.sliding_window:
                _check(decoder, decoder.case([200, 100, 1, 33], sliding_window=window), draws)
        if decoder.capabilities.soft_cap:
            _check(decoder, decoder.case([40, 1, 130], soft_cap=0.5), draws)

    def test_a_step_reads_what_the_one_before_it_stored(
        self, decoder: BackendUnderTest, draws: Random
    ) -> None:
        """Rows that grow by a token per step, through one backend."""
        case = decoder.case([40, 33, 17])
        prep = drawn_prep(case, draws)
        backend = _preparing(decoder, case, prep)
        for shorter in (4, 3, 2, 1, 0):
            lens = tuple(keys - shorter for keys in case.seq_lens)
            step = unprepared(replace(case, seq_lens=lens), prep, draws, _held(decoder))
            expected = step.prepared()
            assert_near(expected, step.decode(backend), f"{shorter} steps before the last")
            case = replace(case, k_cache=step.case.k_cache, v_cache=step.case.v_cache)


def _preparing(subject: BackendUnderTest, case: PagedCase, prep: QKPrep) -> AttentionBackend:
    """A backend for the case; skips where it leaves the preparation to the kernel set."""
    backend = subject.backend(case.config())
    if not backend.prepares_decode(prep, len(case.seq_lens)):
        pytest.skip("leaves the preparation of decode tokens to the kernel set")
    return backend


def _held(subject: BackendUnderTest) -> float:
    """NaN, where the backend does not read what it will not use."""
    return 1e4 if subject.capabilities.needs_finite_tail else float("nan")


def _check(subject: BackendUnderTest, case: PagedCase, draws: Random) -> None:
    """Fail, naming the batch, where the output or a byte of the caches is wrong."""
    __tracebackhide__ = True
    prep = drawn_prep(case, draws)
    step = unprepared(case, prep, draws, _held(subject))
    expected = step.prepared()
    out = step.decode(_preparing(subject, case, prep))
    what = f"decode from qkv, {_described(prep)}: {describe(expected)}"
    assert_near(expected, out, what)
    _assert_stored(step.case.k_cache, expected.k_cache, f"keys of {what}")
    _assert_stored(step.case.v_cache, expected.v_cache, f"values of {what}")


def _described(prep: QKPrep) -> str:
    """The preparation in a few words."""
    norms = [n for n in ("q", "k") if getattr(prep, f"{n}_norm_weight") is not None]
    return f"{prep.cos_sin_cache.shape[1]} columns rotate, norm of {' and '.join(norms) or 'none'}"


def _assert_stored(cache: Tensor, expected: Tensor, what: str) -> None:
    """The cache is the reference's: at most the last bit differs, for the order of sums is free."""
    __tracebackhide__ = True
    if not torch.equal(cache.isnan(), expected.isnan()):
        places = (cache.isnan() != expected.isnan()).nonzero()[:4].tolist()
        raise AssertionError(f"{what}: not what was to be stored, or elsewhere, at {places}")
    epsilon = torch.finfo(cache.dtype).eps
    cache, expected = cache.nan_to_num().double(), expected.nan_to_num().double()
    limit = expected.abs() * epsilon + 1e-6 * expected.abs().max()
    if ((cache - expected).abs() > limit).any():
        worst = (cache - expected).abs().max().item()
        raise AssertionError(f"{what}: off by up to {worst:.3e}")
