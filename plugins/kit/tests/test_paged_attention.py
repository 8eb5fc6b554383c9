"""The cases and checks for attention backends catch what they are meant to catch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionConfig,
    DecodeMetadata,
    PrefillMetadata,
)
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_kit.attention_checks import check_matrix, ragged, run_decode, run_prefill
from nanovllm_kit.paged_attention import PagedCase, make_case

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16}


class PlainAttention(AttentionBackend):
    """Softmax in float64, row by row, its window and soft cap as configured.

    `lose` keys are left out from the start of each row; a window is `shift` keys too short.
    """

    lose = 0
    shift = 0

    def run_decode(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DecodeMetadata,
        out_BHD: Tensor,
    ) -> None:
        for row, keys in enumerate(metadata.seq_lens.tolist()):
            if keys:
                table = metadata.block_table[row]
                out_BHD[row] = self._attend(q_BHD[row], k_cache, v_cache, table, keys)

    def run_prefill(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: PrefillMetadata,
        out_THD: Tensor,
    ) -> None:
        starts = metadata.query_start_loc.tolist()
        for row, keys in enumerate(metadata.seq_lens.tolist()):
            for token in range(starts[row], starts[row + 1]):
                seen = keys - (starts[row + 1] - 1 - token)
                out_THD[token] = self._attend(
                    q_THD[token], k_cache, v_cache, metadata.block_table[row], seen
                )

    def _attend(
        self, q_HD: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, keys: int
    ) -> Tensor:
        group = self.config.num_heads // self.config.num_kv_heads
        k_LKD, v_LKD = (x[table.long()].flatten(0, 1)[:keys].double() for x in (k_cache, v_cache))
        out = torch.empty(q_HD.shape, dtype=torch.float64)
        for head, q_D in enumerate(q_HD.double()):
            scores = k_LKD[:, head // group] @ q_D * self.config.scale
            if self.config.soft_cap is not None:
                scores = self.config.soft_cap * (scores / self.config.soft_cap).tanh()
            scores[: min(self.lose, keys - 1)] = -math.inf
            if self.config.sliding_window is not None:
                scores[: max(0, keys - self.config.sliding_window + self.shift)] = -math.inf
            out[head] = scores.softmax(0) @ v_LKD[:, head // group]
        return out.to(q_HD.dtype)


class LosesTheFirstKey(PlainAttention):
    lose = 1


class SeesOneKeyTooMany(PlainAttention):
    shift = -1


def make(config: AttentionConfig) -> PlainAttention:
    return PlainAttention(NoOptions(), config)


def decode(case: PagedCase, backend: type[PlainAttention]) -> Tensor:
    return run_decode(backend(NoOptions(), case.config()), case, case.decode_metadata())


def test_the_matrix_accepts_plain_softmax_in_every_dtype() -> None:
    """An implementation that shares no code with the reference agrees with it."""
    compared = check_matrix(
        make, **SHAPE, block_size=16, dtypes=[torch.bfloat16, torch.float32],
        batches=[1, 4], lengths=[1, 17, 40], device="cpu",
    )  # fmt: skip
    assert compared == 2 * 3 * 2 * (2 + 1)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 1000])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_matrix_accepts_plain_softmax_with_windows_and_soft_caps(
    window: int | None, cap: float | None
) -> None:
    """Windows of one key, within a block, of a block, over its edge and beyond every sequence."""
    check_matrix(
        make, **SHAPE, block_size=16, dtypes=[torch.float32], batches=[4], lengths=[1, 40],
        device="cpu", sliding_window=window, soft_cap=cap,
    )  # fmt: skip


@pytest.mark.parametrize("queries", [1, 3, 30])
def test_a_window_one_key_too_long_shows_even_beside_a_needle(queries: int) -> None:
    """The key right before the last query's window outweighs all that the query may see."""
    case = make_case([queries], [100], **SHAPE, needle=True, sliding_window=20)
    case.assert_close(run_prefill(make(case.config()), case))
    with pytest.raises(AssertionError, match="relative norm error"):
        case.assert_close(run_prefill(SeesOneKeyTooMany(NoOptions(), case.config()), case))


def test_the_matrix_names_the_shape_that_failed() -> None:
    """A lost key is found, and the error says where."""
    with pytest.raises(AssertionError, match=r"decode in torch.float32, query_lens \(1,\)"):
        check_matrix(
            lambda config: LosesTheFirstKey(NoOptions(), config), **SHAPE, block_size=16,
            dtypes=[torch.float32], batches=[1], lengths=[40], device="cpu",
        )  # fmt: skip


def test_a_needle_shows_one_lost_key_among_hundreds() -> None:
    """Where the lost key is the needle the output is another value altogether."""
    case = make_case([1], [400], **SHAPE, needle=True, seed=0)
    k = case.k_cache[case.block_table[0].long()].flatten(0, 1)[:400]
    needle = int(k.sum(dim=(1, 2)).argmax())
    assert k[needle].eq(k[needle, 0, 0]).all()
    weights = (k[:, 0] @ case.q_THD[0, 0] * case.scale).softmax(0)
    assert weights[needle] > 0.99
    out = decode(case, PlainAttention)
    case.assert_close(out)
    block, offset = case.block_table[0, needle // 16], needle % 16
    lost = case.k_cache.clone()
    lost[block, offset] = 0
    with pytest.raises(AssertionError, match="relative norm error"):
        case.assert_close(decode(replace(case, k_cache=lost), PlainAttention))


def test_blocks_that_no_row_owns_are_nan_and_tails_only_if_asked() -> None:
    """So that reading beyond a row shows; the tail of a last block is finite by default."""
    case = make_case([1, 1], [20, 0], **SHAPE)
    owned = case.block_table[0].tolist()
    for block in range(case.k_cache.shape[0]):
        assert case.k_cache[block].isfinite().all() == (block in owned)
    poisoned = make_case([1, 1], [20, 0], **SHAPE, finite_tail=False)
    tail = poisoned.v_cache[poisoned.block_table[0, 1], 4:]
    assert tail.isnan().all()


def test_padded_rows_are_ignored_and_nan_elsewhere_never_passes() -> None:
    """The contract ignores a padded row's output, and nothing else."""
    case = make_case([1, 1], [20, 0], **SHAPE)
    out = decode(case, PlainAttention)
    assert out[1].isnan().all()
    case.assert_close(out)
    out[0, 0, 0] = float("nan")
    with pytest.raises(AssertionError, match="not finite"):
        case.assert_close(out)


def test_a_batch_of_padding_alone_passes() -> None:
    """There is nothing to compare."""
    case = make_case([1], [0], **SHAPE)
    case.assert_close(torch.zeros_like(case.q_THD))


def test_prefill_is_aligned_to_the_last_key() -> None:
    """A chunk's last query sees every key, its first one fewer for each that follows."""
    case = make_case([3], [10], **SHAPE)
    case.assert_close(run_prefill(make(case.config()), case))


def test_ragged_lengths_stay_in_range() -> None:
    """The longest is the one asked for; none is empty."""
    for batch in (1, 4, 32):
        for longest in (1, 2, 127, 4096):
            lens = ragged(batch, longest)
            assert len(lens) == batch
            assert lens[0] == longest
            assert all(1 <= n <= longest for n in lens)
