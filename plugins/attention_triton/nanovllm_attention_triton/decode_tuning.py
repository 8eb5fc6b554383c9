"""The constants of decode, by the size of a head, the group and the number of rows.

`attention_decode.py` and `attention_from_qkv.py` in `benchmarks/` sweep those of heads of 128.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanovllm_attention_triton.options import TritonOptions, given
from nanovllm_attention_triton.sizes import SMALL, WIDE, padded_head_size

MOST_HEADS = 64
"""Query heads of one decode program at most; larger groups take several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """How decode work is cut and compiled.

    A program handles `tile` tokens per loop round. The context of a row is cut into chunks; the
    device picks their length each step: long enough that the batch makes about `wave_programs`
    programs per multiprocessor, at most `max_chunk` tokens, and never so short that the batch makes
    more than `max_programs` per multiprocessor (which bounds the grid of a captured graph).

    A program takes at most `most_heads` query heads of a KV head, a power of two. Fewer make more
    programs, each of which prepares and merges less, and they read keys and values again.

    With `registers`, which a thread has at most, it is known how many programs are resident on a
    multiprocessor at once. Rows that are no more than those are cut so that all their programs are;
    or, with `second_wave`, into up to half as many more, where rows are so unequal that they end
    sooner though each start of one takes as long as so many tokens.
    """

    tile: int
    num_warps: int
    num_stages: int
    min_chunk: int = 64
    max_chunk: int = 512
    wave_programs: int = 3
    max_programs: int = 8
    most_heads: int = MOST_HEADS
    registers: int | None = None
    second_wave: int | None = None
    fixed_chunk: int | None = None

    def __str__(self) -> str:
        chunk = self.fixed_chunk or f"{self.min_chunk}..{self.max_chunk}"
        return f"chunk={chunk} tile={self.tile} warps={self.num_warps} stages={self.num_stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentTuning(DecodeTuning):
    """The same for latent rows.

    `persistent`: by the kernel for Hopper GPUs, one program on a multiprocessor, with `min_chunk`
    tokens of context at least; `num_warps` and `num_stages` are its own, and no other bound holds.
    """

    most_heads: int = 16
    persistent: bool = False

    def __str__(self) -> str:
        kind = "persistent, " if self.persistent else ""
        return f"latent rows, {kind}heads={self.most_heads} {DecodeTuning.__str__(self)}"


Limits = tuple[tuple[float, DecodeTuning], ...]
"""Constants and up to which number they hold, increasing."""

# Half precision: few rows are cut into tiles of 32 for programs of two warps, as many as a row of
# few tokens has tiles. Many rows: larger tiles spend less on each. Below those, all programs are
# resident at once: four or six on a multiprocessor, and where that leaves each of them much, three
# or four of larger tiles. One program too many costs a wave; on an H200 that was 3 us of 20. fp32
# uses plain multiply-adds (IEEE): small tiles, or its operands do not fit the registers. Where a
# table has two entries, they are by the size of an element in bytes.
DECODE_FEW = {
    2: DecodeTuning(tile=32, num_warps=2, num_stages=3, min_chunk=32, max_chunk=256, registers=168),
    4: DecodeTuning(tile=32, num_warps=8, num_stages=2),
}
DECODE_FOUR_HEADS = replace(DECODE_FEW[2], min_chunk=64, most_heads=4)
DECODE_EIGHT_HEADS = replace(DECODE_FOUR_HEADS, most_heads=8)
DECODE_WHOLE = DecodeTuning(tile=128, num_warps=4, num_stages=3, registers=255, second_wave=512)
"""A multiprocessor for each program, and mostly a program for each pair: nothing is merged then."""
DECODE_SIX = replace(DECODE_FEW[2], num_stages=2)
DECODE_MANY = DecodeTuning(tile=64, num_warps=4, num_stages=3, max_chunk=4096)
"""Rows that are no longer than an equal share of a program are not cut: what a cut costs, the start
of a program and a merge, is more than what even ends gain, for the longest rows begin first. In
chunks of 1,024 tokens at most, 66 to 150 rows of 8 KV heads took up to 6 % longer on an H200, and
none 3 % less; in chunks of 2,048, rows of 2,000 to 4,000 tokens took up to 7 % longer."""
DECODE_THREE = replace(DECODE_MANY, registers=168, second_wave=224)
DECODE_FOUR = DecodeTuning(tile=64, num_warps=4, num_stages=2, registers=128, second_wave=224)
"""Without a second wave, 64 rows of 8 KV heads, four with 3,500 keys and the others with 350 in the
mean, took three times as long on an H200. Of 50 to 66 such rows those of about one length, which
are not cut, took 10 to 20 % less so than by DECODE_MANY with chunks of 1,024 tokens, and unequal
ones 5 to 10 % more. From 42 to 49, DECODE_THREE took 3 to 13 % less than DECODE_SIX for equal rows,
and 6 % less to 6 % more for others."""
DECODE_PAIRS: Limits = ((64, DECODE_FEW[2]),)
"""The constants for steps of so many (row, KV head) at most, each of which is a program if not cut.
"""
GROUPS_IN_PARTS: tuple[tuple[range, Limits], ...] = (
    (range(3, 5), ((8, DECODE_FOUR_HEADS),)),
    (range(5, 9), ((16, DECODE_FOUR_HEADS),)),
    (range(9, 17), ((8, DECODE_FOUR_HEADS), (32, DECODE_EIGHT_HEADS))),
)
"""The same for fewer, by the query heads of a group. A program of a part of a group has less to
prepare, and merges more parts of a row in a round; and it reads keys that others read too, so long
rows bound the pairs. On an H200, between its products, attention of 16 pairs takes 12 to 20 % less
time so with groups of 7 and 8 and 400 to 2,000 keys, as long with 8,000, and 13 to 16 % more with
16,000; of 32 pairs with groups of 16 23 % less with 600 keys, 4 % less with 8,000, 7 and 19 % more
with 16,000 and 32,000. Groups of 3 and 4 are whole, in longer chunks. Larger ones than 16 were not
measured."""
SMALL_HEADS_IN_PARTS: Limits = ((8, DECODE_FOUR_HEADS),)
"""Those of heads up to SMALL, for the same groups. A round merges twice as many of their parts, so
there is less to gain: 16 pairs with groups of 7 take as long with 600 keys, and a quarter more time
with 4,200."""
DECODE_RESIDENT: Limits = (
    (1, DECODE_WHOLE),
    (2.5, DECODE_SIX),
    (3, DECODE_THREE),
    (4, DECODE_FOUR),
)
"""The same for so many on each multiprocessor, where it has room for as many programs at once.
Beyond, DECODE_MANY took 8 to 12 % less on an H200 than tiles of 32 for 513 to 768 of them."""
SMALL_RESIDENT: Limits = (
    (2.5, replace(DECODE_SIX, tile=64, min_chunk=64)),
    (3, DECODE_THREE),
    (4, DECODE_MANY),
)
SMALL_MANY = replace(DECODE_MANY, tile=128, min_chunk=128)
"""The tables of heads up to SMALL, mostly with tiles of twice the keys, which take as much memory.
On an H200, between its products, attention of 80 to 316 pairs (14 / 2, 16 / 4 and 32 / 8 heads;
rows of 600 and 2,000 keys, and of 100 to 1,900) took 13 % less to 2 % more time so than in tiles of
32, of 475 pairs by DECODE_MANY 3 to 12 % less than by DECODE_FOUR. Of 560 to 800 pairs tiles of 128
keys took 17 % less to 1 % more than of 64, of 920 as long or 4 % more, of 1,300 to 2,000 as long.
"""
SMALL_PROGRAMS = 3
"""SMALL_MANY is used where a multiprocessor has room for so many programs, as on an H200."""
SMALL_GROUP = 16
"""Results of more query heads, in tiles of 32 and 64, spill the registers of such programs."""
OTHER_SHARED_MEMORY, WIDE_OTHER_SHARED_MEMORY = 9 * 1024, 11 * 1024
"""At most what a program of up to 16 query heads takes beside its tiles: queries, weights, and what
CUDA reserves."""
DECODE_REGISTERS = 168
"""Per thread, where masks of a window or of a padded head take some: as many as leave room for the
programs that shared memory has room for. Left alone, ptxas takes fewer and spills a few bytes."""
QKV_REGISTERS = 255
"""The same where a program prepares q, k and v too. Such steps have few programs."""
PREPARING_PROGRAMS, PREPARING_SHARE = 64, 2
"""Programs prepare q, k and v where those of one chunk of each row are so many at most, and one for
so many multiprocessors, which makes 8 rows of 8 KV heads. It gains most where the product before
lets them begin early: on an H200 steps of Qwen3-0.6B take 13 to 14 % less time at 8 rows with 512
and 3,000 keys, and 9 % with 16,000, behind the products of few rows of `kernels: triton`. Behind
its tiles they take as long with 512 keys, those of 8B 2 % less, and of Qwen3-30B-A3B at 16 rows of
4 KV heads 3 to 6 % less. 16 rows of 8 KV heads took 7 % more, for programs that prepare take more
registers, so fewer of them stream side by side. Other GPUs were not measured."""
MERGE_ELEMENTS = 4096
"""Partial results that a program merges at a time (fp32 in registers)."""
QKV_MERGE_ELEMENTS = 8192
"""The same where a program prepares q, k and v too: few rows, in many chunks each."""
MERGE_ROUND, QKV_MERGE_ROUND = 115, 60
"""Tokens that a program attends in the time of a round of merging, 2.5 us on an H100. Programs that
prepare merge twice as many parts in a round, and take about half as long for as many."""
WIDE_HEADS = 32
"""More heads of 256 would not fit 99 KiB."""
WIDE_DECODE = {
    2: DecodeTuning(tile=32, num_warps=4, num_stages=3, most_heads=WIDE_HEADS),
    4: DecodeTuning(tile=16, num_warps=8, num_stages=2, most_heads=WIDE_HEADS),
}
"""Of all numbers of rows in float32, and of chunks of a fixed length; by the size of an element."""


def half_tiles(tuning: DecodeTuning) -> DecodeTuning:
    """The same constants for heads above WIDE, in as much shared memory."""
    return replace(tuning, tile=tuning.tile // 2, most_heads=min(tuning.most_heads, WIDE_HEADS))


WIDE_ONE = DecodeTuning(
    tile=32, num_warps=4, num_stages=2, min_chunk=32, max_chunk=256, most_heads=WIDE_HEADS,
    registers=168,
)  # fmt: skip
"""On an H200 attention of a row of 512 to 4,096 keys takes 10 to 25 % less time so than in tiles of
16, and steps of Gemma 3 4B take 3 % less at four rows. Eight rows of 4,096 keys take 10 % more."""
WIDE_PAIRS: Limits = ((16, WIDE_ONE), (64, half_tiles(DECODE_FEW[2])))
WIDE_RESIDENT: Limits = (
    *((most, half_tiles(tuning)) for most, tuning in DECODE_RESIDENT[:-1]),
    (4, WIDE_DECODE[2]),
)
WIDE_MANY = half_tiles(DECODE_MANY)
"""The tables of narrow heads, but for four programs on a multiprocessor: their registers leave room
for three. On an H200 4 to 256 rows of 600 and 2,560 keys, of 1, 4 and 8 KV heads of 256, took up to
25 % less time so than by WIDE_DECODE alone, and 6 % more at most."""
TWO_WARP_GROUP = 4
"""Results of more query heads of 256 numbers spill the registers of programs of two warps."""
# Rows of 576 columns: two programs on a multiprocessor, each with a tile that it multiplies and one
# that loads.
LATENT_DECODE = {
    2: LatentTuning(
        tile=32, num_warps=4, num_stages=3, max_chunk=4096, wave_programs=2, max_programs=4
    ),
    4: LatentTuning(
        tile=16, num_warps=8, num_stages=1, max_chunk=4096, wave_programs=2, max_programs=4
    ),
}
# More heads share a tile; each still has two programs on a multiprocessor.
LATENT_DECODE_MANY_HEADS = {
    2: replace(LATENT_DECODE[2], most_heads=32, wave_programs=4, max_programs=8),
    4: LATENT_DECODE[4],
}
HOPPER_LATENT = LatentTuning(
    tile=64, num_warps=4, num_stages=2, min_chunk=64, most_heads=32, persistent=True
)
MANY_HEADS = 16
"""Above as many heads of a latent row the second table holds."""


def decode_tunings(
    element_size: int,
    head_size: int,
    num_heads: int,
    num_kv_heads: int,
    max_num_rows: int,
    options: TritonOptions,
    *,
    num_multiprocessors: int,
    shared_memory: int,
) -> list[tuple[int, DecodeTuning]]:
    """The decode constants for a dtype of `element_size` bytes, with the user's overrides.

    Each for steps of so many rows at most, padding included, in increasing order. With chunks of a
    fixed length there is one for all, so that a row has the same bits in every batch.
    `shared_memory`: bytes of one multiprocessor.
    """
    wide = head_size > WIDE
    if options.chunk_size or element_size == 4:
        table = WIDE_DECODE if wide else DECODE_FEW
        return [(max_num_rows, _decode_tuning(table[element_size], options))]
    group = num_heads // num_kv_heads
    if wide:
        pairs, resident, many = _wide_tables(group)
    else:
        pairs, resident, many = _narrow_tables(group, head_size)

    def room_for(tuning: DecodeTuning) -> int:
        mine = _decode_tuning(tuning, options)
        return shared_memory // program_memory(mine, padded_head_size(head_size))

    limits = [*pairs]
    for most, tuning in resident:
        # What leaves no room for a second program is for one on each multiprocessor, and no other.
        fits = room_for(tuning) == 1 if most == 1 else room_for(tuning) >= most
        if fits or tuning.registers is None:
            limits.append((most * num_multiprocessors, tuning))
    if many is SMALL_MANY and room_for(many) < SMALL_PROGRAMS:
        many = DECODE_MANY
    limits.append((max_num_rows * num_kv_heads, many))
    tunings: dict[int, DecodeTuning] = {}
    for most, tuning in limits:
        rows = min(int(most) // num_kv_heads, max_num_rows)
        if rows > max(tunings, default=0):
            tunings[rows] = _decode_tuning(tuning, options)
    return list(tunings.items())


def prepares(
    num_rows: int, num_heads: int, num_kv_heads: int, head_size: int, num_multiprocessors: int
) -> bool:
    """Whether the programs of so many rows prepare q, k and v.

    Those of whole groups count, also where programs take parts of them: so with one more row there
    is never less to prepare.
    """
    most_heads = WIDE_HEADS if head_size > WIDE else MOST_HEADS
    programs = num_rows * num_kv_heads * -(-num_heads // num_kv_heads // most_heads)
    return programs <= min(num_multiprocessors // PREPARING_SHARE, PREPARING_PROGRAMS)


def _narrow_tables(group: int, head_size: int) -> tuple[Limits, Limits, DecodeTuning]:
    """Of few pairs, of so many programs on each multiprocessor, and of more."""
    parts = next((limits for groups, limits in GROUPS_IN_PARTS if group in groups), ())
    if head_size > SMALL:
        return (*parts, *DECODE_PAIRS), DECODE_RESIDENT, DECODE_MANY
    pairs = (*(SMALL_HEADS_IN_PARTS if parts else ()), *DECODE_PAIRS)
    if group > SMALL_GROUP:
        return pairs, DECODE_RESIDENT[1:], DECODE_MANY
    return pairs, SMALL_RESIDENT, SMALL_MANY


def _wide_tables(group: int) -> tuple[Limits, Limits, DecodeTuning]:
    """The same for heads above WIDE, without programs of two warps where they would spill."""
    if group <= TWO_WARP_GROUP:
        return WIDE_PAIRS, WIDE_RESIDENT, WIDE_MANY
    resident = tuple((most, tuning) for most, tuning in WIDE_RESIDENT if tuning.num_warps > 2)
    return ((WIDE_PAIRS[-1][0], WIDE_ONE),), resident, WIDE_MANY


def program_memory(tuning: DecodeTuning, block_d: int) -> int:
    """The bytes of shared memory of a program whose keys and values are of half precision."""
    other = WIDE_OTHER_SHARED_MEMORY if block_d > WIDE else OTHER_SHARED_MEMORY
    return 4 * tuning.tile * block_d * max(tuning.num_stages - 1, 1) + other


def _decode_tuning(tuning: DecodeTuning, options: TritonOptions) -> DecodeTuning:
    return replace(
        tuning,
        fixed_chunk=options.chunk_size,
        **given(num_warps=options.decode_num_warps, num_stages=options.decode_num_stages),
    )


def latent_tuning(element_size: int, num_heads: int, options: TritonOptions) -> LatentTuning:
    """The constants of decode over latent rows, with the user's overrides."""
    table = LATENT_DECODE if num_heads <= MANY_HEADS else LATENT_DECODE_MANY_HEADS
    return replace(
        table[element_size],
        fixed_chunk=options.chunk_size,
        **given(num_warps=options.decode_num_warps, num_stages=options.decode_num_stages),
    )
