"""Sampling one token per row in Triton; `sampling_reference` says what is computed.

One pass over the logits: each program reads one split of one row's vocabulary, scores the few ids
that may win, and leaves its best (score, id) in the workspace; a second, tiny kernel reduces the
splits. Scores are compared, never added up, so the number of splits does not change the result.
"""

# Triton ships no types, and a kernel's arguments have none a checker knows.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_core.interfaces.tail import NUM_ROW_COLUMNS
from nanovllm_core.kernels.dependent_launch import launch_options, supports_dependent_launch
from nanovllm_core.kernels.sampling_reference import KEY_1, KEY_2, LOWBIAS_1, LOWBIAS_2, NO_ID
from nanovllm_core.kernels.sizes import next_power_of_2

C1, C2 = tl.constexpr(LOWBIAS_1), tl.constexpr(LOWBIAS_2)
K1, K2 = tl.constexpr(KEY_1), tl.constexpr(KEY_2)
NONE = tl.constexpr(NO_ID)

TILE = 1024
CHUNK = 8
"""Logits that one thread reads at once: 16 bytes of a half-precision type."""
NUM_WARPS = 4
MAX_SPLITS = 64
TARGET_PROGRAMS = 4096
"""Programs to aim for: two waves of those that 132 multiprocessors hold."""
# Bounds are computed without this constant, which is 32 - log2(log2(e)), for the hash is about
# 2^32 v. What is added is more than the missing step of the hash and all roundings together.
BOUND_OFFSET = tl.constexpr(31.4712336270551 + 2.0**-13)


class SamplingWorkspace:
    """The partial results of a batch: allocated once, so that a captured launch allocates nothing.

    `scores` float32 and `ids` int32, both [max_batch, MAX_SPLITS]. `launch_options` are those of
    the device.
    """

    def __init__(self, max_batch: int, device: torch.device) -> None:
        self.launch_options = launch_options(supports_dependent_launch(device))
        self.scores = torch.zeros(max_batch, MAX_SPLITS, dtype=torch.float32, device=device)
        self.ids = torch.zeros(max_batch, MAX_SPLITS, dtype=torch.int32, device=device)


def tiles_per_split(batch: int, vocab_size: int) -> int:
    """How many tiles of the vocabulary one program reads."""
    tiles = -(-vocab_size // TILE)
    wanted = min(MAX_SPLITS, max(1, TARGET_PROGRAMS // batch))
    return -(-tiles // wanted)


def num_splits(batch: int, vocab_size: int) -> int:
    """How many entries of a workspace row a launch of this shape fills."""
    return -(-vocab_size // (TILE * tiles_per_split(batch, vocab_size)))


def sample_tokens(
    logits_BV: Tensor,
    rows_B: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    output_index_B: Tensor,
    out_B: Tensor,
    *,
    workspace: SamplingWorkspace,
    skip_flag: Tensor,
) -> None:
    """As `sampling_reference.sample_tokens`; writes nothing while `skip_flag` (int32 [1]) is not 0.

    All tensors are contiguous. Allocates nothing and never waits for the device.
    """
    inputs = (logits_BV, rows_B, temperature_R, seed_R, output_index_B)
    splits = launch_partial(*inputs, workspace=workspace, skip_flag=skip_flag)
    sample_reduce_kernel[(len(rows_B),)](
        rows_B, skip_flag, workspace.scores, workspace.ids, out_B, splits, MAX_SPLITS,
        STEP=1, LANES=MAX_SPLITS, num_warps=1, **workspace.launch_options,
    )  # fmt: skip


def best_pairs(
    logits_BX: Tensor,
    rows_B: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    output_index_B: Tensor,
    first_id: int,
    num_ids: int,
    out_B2: Tensor,
    *,
    workspace: SamplingWorkspace,
    skip_flag: Tensor,
) -> None:
    """As `sampling_reference.best_pairs`, into `out_B2`, and as `sample_tokens` otherwise.

    The pair of padding, and every pair while `skip_flag` is not 0, may be any.
    """
    inputs = (logits_BX, rows_B, temperature_R, seed_R, output_index_B)
    splits = launch_partial(
        *inputs, workspace=workspace, skip_flag=skip_flag, first_id=first_id, num_ids=num_ids
    )
    best_pair_kernel[(len(rows_B),)](
        skip_flag, workspace.scores, workspace.ids, out_B2, splits,
        LANES=MAX_SPLITS, num_warps=1, **workspace.launch_options,
    )  # fmt: skip


def choose_pair(pairs_BP: Tensor, rows_B: Tensor, out_B: Tensor, *, skip_flag: Tensor) -> None:
    """As `sampling_reference.choose_pair`, and as `sample_tokens` otherwise."""
    num_pairs = pairs_BP.shape[1] // 2
    sample_reduce_kernel[(len(rows_B),)](
        rows_B, skip_flag, pairs_BP.view(torch.float32), pairs_BP[:, 1:], out_B,
        num_pairs, pairs_BP.stride(0),
        STEP=2, LANES=next_power_of_2(num_pairs), num_warps=1,
        **launch_options(supports_dependent_launch(pairs_BP.device)),
    )  # fmt: skip


def launch_partial(
    logits_BX: Tensor,
    rows_B: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    output_index_B: Tensor,
    *,
    workspace: SamplingWorkspace,
    skip_flag: Tensor,
    asked: Tensor | None = None,
    first_id: int = 0,
    num_ids: int | None = None,
) -> int:
    """Leave the best of each split in the workspace, and return how many splits there are.

    Rows whose flags in `asked` (`TailTables.parameters`) are not 0 are left out. The first
    `num_ids` columns, all without it, are the ids from `first_id` on.
    """
    batch, row_size = logits_BX.shape
    splits = num_splits(batch, row_size)
    sample_partial_kernel[(batch, splits)](
        logits_BX, rows_B, temperature_R, seed_R, output_index_B, skip_flag, asked,
        workspace.scores, workspace.ids, row_size if num_ids is None else num_ids,
        tiles_per_split(batch, row_size), row_size, first_id,
        MAX_SPLITS=MAX_SPLITS, NUM_COLUMNS=NUM_ROW_COLUMNS, TILE=TILE, CHUNK=CHUNK,
        ALIGNED=row_size % CHUNK == 0 and first_id % CHUNK == 0 and (num_ids or 0) % CHUNK == 0,
        APPROXIMATE=not triton.knobs.runtime.interpret,  # the interpreter runs no assembly
        num_warps=NUM_WARPS, **workspace.launch_options,
    )  # fmt: skip
    return splits


@triton.jit
def take_turn(DEPENDENT: tl.constexpr):
    """Let the next kernel's programs start, and wait for the kernel before.

    It comes first in a kernel: one that ended before its wait would end before the kernel before
    it, and the next would not see that one's results. See `dependent_launch`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def mix(x, key, C1: tl.constexpr, C2: tl.constexpr):
    """lowbias32 with a key between its two multiplications."""
    x = (x ^ (x >> 16)) * C1
    x = (x ^ (x >> 15) ^ key) * C2
    return x ^ (x >> 16)


@triton.jit
def stream_key(low, high, index, START: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    """One 32-bit key of (seed, output index)."""
    return mix(mix(mix(low ^ START, 0, C1, C2) ^ high, 0, C1, C2) ^ index, 0, C1, C2)


@triton.jit
def log2(x, APPROXIMATE: tl.constexpr):
    """log2 of 0 and normal floats: one instruction (error below 2^-22) for the library's twenty."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def gumbel_base_2(ids, key_1, key_2, C1: tl.constexpr, C2: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Gumbel noise divided by ln 2, plus a constant, which moves no argmax.

    Working in base 2 saves two multiplications per element.
    """
    bits = mix(ids ^ key_1, key_2, C1, C2)
    signed = bits.to(tl.int32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10
    signed += 1.1641532182693481e-10
    t = tl.abs(signed)
    exponential = -log2(tl.where(signed < 0, t, 1.0 - t), APPROXIMATE)
    # Below t = 1/32 the logarithm of 1 - t would lose its digits: use the series.
    series = t * (1.4426950408889634 + t * (0.7213475 + t * (0.48089834 + t * 0.36067376)))
    exponential = tl.where(bits < 0x08000000, series, exponential)
    return -log2(exponential, APPROXIMATE)


@triton.jit
def noise_keys(seed_ptr, row, output_index):
    """The two keys of a row's noise for the token of this index."""
    seed = tl.load(seed_ptr + row)
    index = output_index.to(tl.uint32, bitcast=True)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    return stream_key(low, high, index, K1, C1, C2), stream_key(low, high, index, K2, C1, C2)


@triton.jit
def score_of(logits, ids, scale, key_1, key_2, APPROXIMATE: tl.constexpr):
    """The scores of ids at a temperature above 0; `scale` is log2(e) divided by it."""
    unsigned = ids.to(tl.uint32, bitcast=True)
    return logits * scale + gumbel_base_2(unsigned, key_1, key_2, C1, C2, APPROXIMATE)


@triton.jit
def read_logits(logits_ptr, columns, is_id, REPLACE_NAN: tl.constexpr):
    """Logits as float32; -inf outside the vocabulary, and with REPLACE_NAN for a NaN.

    A maximum of others drops a NaN on a GPU, and keeps it in the interpreter.
    """
    logits = tl.load(logits_ptr + columns, mask=is_id, other=float("-inf")).to(tl.float32)
    if REPLACE_NAN:
        logits = tl.where(logits == logits, logits, float("-inf"))
    return logits


@triton.jit
def bound_of(
    logits, starts, within, scale, key_1, key_2,
    C1: tl.constexpr, C2: tl.constexpr, ALIGNED: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """An upper bound of `score_of` of the ids `starts + within`, less BOUND_OFFSET.

    With v = 1 - u the noise -log2(-log2(1 - v)) is at most -log2(v) - log2(log2(e)). The hash
    without its last step, which changes the lower half alone, is at most 2^32 v (1 + 2^-16).
    """
    if ALIGNED:  # the ids of a chunk differ in their lowest bits alone
        x = starts.to(tl.uint32, bitcast=True) ^ key_1
        x = (x ^ (x >> 16)) ^ within.to(tl.uint32, bitcast=True)
    else:
        x = (starts + within).to(tl.uint32, bitcast=True) ^ key_1
        x = x ^ (x >> 16)
    x *= C1
    x = (x ^ (x >> 15) ^ key_2) * C2
    return logits * scale - log2(x.to(tl.float32), APPROXIMATE)


@triton.jit
def reaches(bound, score):
    """Whether a score of this bound may be as high, for all that the bound was rounded."""
    return bound + (BOUND_OFFSET + 1e-6 * tl.abs(bound)) >= score


@triton.jit
def best_score(
    logits_ptr, columns, num_ids, first_id, temperature, scale, key_1, key_2,
    APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """The best score of some columns and its id; of equal ones the lowest."""
    scores = read_logits(logits_ptr, columns, columns < num_ids, True)
    ids = first_id + columns
    if temperature != 0.0:
        scores = score_of(scores, ids, scale, key_1, key_2, APPROXIMATE)
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, ids, NONE), axis=0)


# One variant for every batch size: a graph's capture must not meet one that is not compiled yet.
@triton.jit(do_not_specialize=["num_tiles", "first_id"])
def sample_partial_kernel(
    logits_ptr, rows_ptr, temperature_ptr, seed_ptr, output_index_ptr, skip_ptr, asked_ptr,
    scores_ptr, ids_ptr, num_ids, num_tiles, row_size, first_id,
    MAX_SPLITS: tl.constexpr, NUM_COLUMNS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr, APPROXIMATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Bounds of all scores say which chunk of ids may have the best score, and it is scored.

    Where another chunk may have a better one, the best chunk of each lane is scored, and where
    that is not enough, all are. At temperature 0 a bound is a score.
    """
    take_turn(DEPENDENT)
    entry, split = tl.program_id(0), tl.program_id(1)
    if tl.load(skip_ptr) != 0:
        return
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    if asked_ptr is not None:  # noqa: SIM102 - decided when compiled
        if tl.load(asked_ptr + row.to(tl.int64) * NUM_COLUMNS) != 0:
            return
    temperature = tl.load(temperature_ptr + row)
    key_1, key_2 = noise_keys(seed_ptr, row, tl.load(output_index_ptr + entry))
    scale = tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature)) * 1.4426950408889634
    logits_ptr += entry.to(tl.int64) * row_size

    first = split * num_tiles * TILE
    within = tl.arange(0, CHUNK)[None, :]
    chunks = first + tl.arange(0, TILE // CHUNK) * CHUNK
    best = tl.full((TILE // CHUNK,), float("-inf"), tl.float32)
    best_chunks, others = chunks, best  # of each lane; `others`: the best bound of the others
    for _ in range(num_tiles):
        starts = chunks[:, None]
        is_id = (starts if ALIGNED else starts + within) < num_ids
        bounds = read_logits(logits_ptr, starts + within, is_id, not APPROXIMATE)
        if temperature != 0.0:
            bounds = bound_of(
                bounds, first_id + starts, within, scale, key_1, key_2, C1, C2, ALIGNED, APPROXIMATE
            )
        bound = tl.max(bounds, axis=1)
        better = bound > best
        others = tl.where(better, best, tl.maximum(others, bound))
        best = tl.where(better, bound, best)
        best_chunks = tl.where(better, chunks, best_chunks)
        chunks += TILE

    chunk = tl.min(tl.where(best == tl.max(best, axis=0), best_chunks, NONE), axis=0)
    score, token = best_score(
        logits_ptr, chunk + tl.arange(0, CHUNK), num_ids, first_id, temperature, scale,
        key_1, key_2, APPROXIMATE,
    )  # fmt: skip
    runner_up = tl.max(tl.where(best_chunks == chunk, others, best), axis=0)
    if (temperature != 0.0) & reaches(runner_up, score):
        columns = tl.reshape(best_chunks[:, None] + within, [TILE])
        score, token = best_score(
            logits_ptr, columns, num_ids, first_id, temperature, scale, key_1, key_2, APPROXIMATE
        )
        if reaches(tl.max(others, axis=0), score):
            score = tl.full((), float("-inf"), tl.float32)
            for tile in range(num_tiles):
                columns = first + tile * TILE + tl.arange(0, TILE)
                its_score, its_token = best_score(
                    logits_ptr, columns, num_ids, first_id, temperature, scale, key_1, key_2,
                    APPROXIMATE,
                )  # fmt: skip
                token = tl.where(its_score > score, its_token, token)
                score = tl.maximum(its_score, score)
    slot = entry * MAX_SPLITS + split
    tl.store(scores_ptr + slot, score)
    tl.store(ids_ptr + slot, token)


@triton.jit
def best_of(scores_ptr, ids_ptr, count, STEP: tl.constexpr, LANES: tl.constexpr):
    """The best of `count` scores and its id; of equal ones the lowest."""
    lanes = tl.arange(0, LANES)
    scores = tl.load(scores_ptr + lanes * STEP, mask=lanes < count, other=float("-inf"))
    ids = tl.load(ids_ptr + lanes * STEP, mask=lanes < count, other=NONE)
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, ids, NONE), axis=0)


@triton.jit(do_not_specialize=["count", "row_size"])
def sample_reduce_kernel(
    rows_ptr, skip_ptr, scores_ptr, ids_ptr, out_ptr, count, row_size,
    STEP: tl.constexpr, LANES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    take_turn(DEPENDENT)
    entry = tl.program_id(0)
    if tl.load(skip_ptr) != 0:
        return
    slots = entry * row_size
    _, token = best_of(scores_ptr + slots, ids_ptr + slots, count, STEP, LANES)
    tl.store(out_ptr + entry, tl.where(tl.load(rows_ptr + entry) < 0, -1, token))


@triton.jit(do_not_specialize=["count"])
def best_pair_kernel(
    skip_ptr, scores_ptr, ids_ptr, out_ptr, count, LANES: tl.constexpr, DEPENDENT: tl.constexpr
):
    take_turn(DEPENDENT)
    entry = tl.program_id(0)
    if tl.load(skip_ptr) != 0:
        return
    score, token = best_of(scores_ptr + entry * LANES, ids_ptr + entry * LANES, count, 1, LANES)
    tl.store(out_ptr + 2 * entry, score.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * entry + 1, token)
