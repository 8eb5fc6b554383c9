"""Decode from packed q, k, v: chunks and blocks of heads, which the attention suite cannot see."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_kit.attention_preparation import UnpreparedCase, drawn_prep, unprepared
from nanovllm_kit.paged_attention import make_case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there; see test_gpu_from_qkv.py"
)


def drawn_step(draws: Random, lens: list[int], heads: tuple[int, int], **shape) -> UnpreparedCase:
    case = make_case(
        [1] * len(lens), lens, num_heads=heads[0], num_kv_heads=heads[1], finite_tail=False,
        seed=draws.randrange(2**31), **shape,
    )  # fmt: skip
    return unprepared(case, drawn_prep(case, draws), draws, float("nan"))


def backend_of(step: UnpreparedCase, **options) -> TritonAttention:
    backend = TritonAttention(TritonOptions(**options), step.case.config())
    backend.allocate()
    return backend


@pytest.mark.parametrize(
    ("heads", "chunk"), [((80, 1), 64), ((80, 1), None), ((5, 5), 64), ((22, 2), 64)]
)
def test_chunks_and_blocks_of_heads_equal_the_reference(heads, chunk):
    """Several programs share a row's newest key; one of them stores it, and all of them see it."""
    draws = Random(f"{heads} {chunk}")
    step = drawn_step(draws, [70, 64, 65, 0, 1], heads, head_size=32, dtype=torch.float16)
    expected = step.prepared()
    out = step.decode(backend_of(step, chunk_size=chunk))
    expected.assert_close(out)
    assert (out[3] == 0).all()
    for cache, wanted in (
        (step.case.k_cache, expected.k_cache),
        (step.case.v_cache, expected.v_cache),
    ):
        torch.testing.assert_close(cache, wanted, equal_nan=True)


@pytest.mark.parametrize("most_heads", [1, 2, 4])
@pytest.mark.parametrize("heads", [(8, 1), (10, 2), (22, 2)])
def test_programs_may_share_the_query_heads_of_a_kv_head(heads, most_heads):
    """Fewer heads than a tile has rows, also where the last program has fewer than the others; from
    packed q, k, v and from prepared ones."""
    step = drawn_step(Random(f"{heads}"), [70, 64, 0, 1], heads, head_size=32, dtype=torch.float16)
    backend = TritonAttention(TritonOptions(), step.case.config())
    backend.decode_tunings = [
        (rows, replace(tuning, most_heads=most_heads)) for rows, tuning in backend.decode_tunings
    ]
    backend.allocate()
    expected = step.prepared()
    out = step.decode(backend)
    expected.assert_close(out)
    assert (out[2] == 0).all()
    prepared_out = expected.new_out()
    caches, metadata = (expected.k_cache, expected.v_cache), expected.decode_metadata()
    backend.run_decode(expected.q_THD, *caches, metadata, prepared_out)
    expected.assert_close(prepared_out)


def test_a_rotation_of_any_width_turns_its_columns():
    """Widths that are no multiple of the vector of columns that a thread loads."""
    for half in (1, 3, 4, 8, 20, 24):
        draws = Random(half)
        step = drawn_step(draws, [33, 5], (4, 2), head_size=48)
        angles = torch.linspace(0, 6, 512 * half).view(512, half)
        rotation = torch.cat([angles.cos(), angles.sin()], 1)
        step = replace(step, prep=replace(step.prep, cos_sin_cache=rotation))
        step.prepared().assert_close(step.decode(backend_of(step)))


def test_a_row_has_the_same_bits_in_any_batch_where_chunks_are_fixed():
    """Its own keys alone decide them, and not how many other rows or chunks there are.

    So an engine then prepares q, k and v apart at every number of rows, as beside prompts.
    """
    draws = Random(0)
    step = drawn_step(draws, [300, 64, 129, 1], (8, 2), head_size=64)
    assert backend_of(step).prepares_decode(step.prep, 1)
    assert not backend_of(step, chunk_size=64).prepares_decode(step.prep, 1)
    whole = step.decode(backend_of(step, chunk_size=64))
    for row in range(4):
        one = step.rows(slice(row, row + 1))
        assert torch.equal(one.decode(backend_of(one, chunk_size=64))[0], whole[row])


def test_repeated_runs_are_bitwise_equal_and_leave_the_tickets_at_zero():
    """One plan serves many layers: what a layer leaves behind must not reach the next."""
    step = drawn_step(Random(1), [300, 64, 129], (4, 2), head_size=64)
    backend = backend_of(step, chunk_size=64)
    first = step.decode(backend)
    for _ in range(2):
        assert torch.equal(step.run(backend), first)
    tickets = [t for n, t in backend.captured_tensors().items() if "tickets" in n]
    assert tickets
    assert not any(t.any() for t in tickets)


def test_qkv_may_be_part_of_a_wider_tensor():
    """Rows lie at their stride, as those of a mixed step do."""
    step = drawn_step(Random(2), [33, 90], (4, 2), head_size=64)
    expected = step.decode(backend_of(step))
    wide = torch.full((2, step.qkv_BX.shape[1] + 16), float("nan"))
    wide[:, : step.qkv_BX.shape[1]] = step.qkv_BX
    wide_step = replace(step, qkv_BX=wide[:, : step.qkv_BX.shape[1]])
    assert torch.equal(wide_step.decode(backend_of(step)), expected)
