"""The constants of prompts: over a paged cache, over packed keys and over latent rows.

`attention_prefill.py`, `latent_prompts.py` and `latent_rows.py` in `benchmarks/` sweep them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from nanovllm_attention_triton.options import TritonOptions, given
from nanovllm_attention_triton.sizes import WIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuning:
    """The tile of rows and keys of one prefill program, and how it is compiled.

    A row is a query of one head; a block's rows share a KV head. `copy_engine` loads tiles by the
    GPU's copy engine, which spares the threads the addresses, where blocks hold whole tiles and the
    GPU has one; elsewhere each thread loads its part. `warp_roles` leaves to the kernel for Hopper,
    and to its own constants, what that kernel can attend. `resident` programs, one or two, have
    room on a multiprocessor at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int = 2
    copy_engine: bool = True
    warp_roles: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTuning:
    """The tile of queries and keys of one program over packed keys, and how it is compiled.

    `resident` as in `PrefillTuning`, for latent rows.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperTiles:
    """The tile of keys of a prompt kernel for Hopper, and the tiles that are loaded ahead."""

    block_n: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperPrefillTuning(HopperTiles):
    """`in_order` has the groups of warps issue their products in turn."""

    in_order: bool


# Two programs on a multiprocessor, one of which loads while the other multiplies.
PREFILL = {
    2: PrefillTuning(block_m=64, block_n=64, num_warps=4, num_stages=3),
    4: PrefillTuning(block_m=32, block_n=32, num_warps=8, num_stages=1, copy_engine=False),
}
# Heads above WIDE: twice the registers and shared memory for every token, so smaller tiles; but
# where the copy engine loads the tiles of a prompt, one program of large ones.
WIDE_PREFILL = {
    2: PrefillTuning(block_m=64, block_n=32, num_warps=8, num_stages=2),
    4: PrefillTuning(block_m=16, block_n=16, num_warps=8, num_stages=1, copy_engine=False),
}
LARGE_TILE = 64
LARGE_CAPABILITIES = (9, 10)
"""Compute capabilities (major) of 227 KiB of shared memory per program, of which large tiles take
192; 8 and 12 have 99 to 163."""
WIDE_LARGE_PREFILL = {
    2: PrefillTuning(block_m=128, block_n=LARGE_TILE, num_warps=8, num_stages=2, resident=1),
    4: WIDE_PREFILL[4],
}
# Prompts over packed keys of 192 columns and values of 128.
PACKED = {
    2: PackedTuning(block_m=128, block_n=64, num_warps=8, num_stages=3),
    4: PackedTuning(block_m=16, block_n=16, num_warps=8, num_stages=1),
}
# Wider keys or values, and GPUs with less shared memory.
NARROW_PACKED = {
    2: PackedTuning(block_m=64, block_n=32, num_warps=8, num_stages=2),
    4: PACKED[4],
}
# Prompts over latent rows of 576 columns.
LATENT_PREFILL = {
    2: PackedTuning(block_m=32, block_n=32, num_warps=8, num_stages=2),
    4: PackedTuning(block_m=16, block_n=16, num_warps=8, num_stages=1),
}
HOPPER_LATENT_PREFILL = (
    (64, PackedTuning(block_m=64, block_n=64, num_warps=8, num_stages=2)),
    (128, PackedTuning(block_m=64, block_n=32, num_warps=8, num_stages=3)),
)
"""Of half precision on Hopper, for rows with so many columns at most behind their value. Tiles of
64 keys take 10 to 25 % less time on an H200 than of 32, and those of the table above up to twice as
long. On Blackwell their results would not fit."""
START_TILES = 6
"""Tiles of keys that a program attends in the time in which it starts and ends."""
SPLIT_TILES = 6
"""The same of the time in which parts are stored and a second kernel begins to merge them."""
MERGE_TILES = 0.5
"""The same of the time in which that kernel merges one part."""
HOPPER_PREFILL = {128: HopperPrefillTuning(block_n=128, num_stages=2, in_order=True)}
"""By head size, of half precision. For heads of 64 the kernel was no faster than the plain one."""
HOPPER_BLOCKS = 4
HOPPER_QUERIES = 1024
"""A step runs the kernel for Hopper from this many blocks of rows per multiprocessor, and queries
per sequence in the mean, on. Below, the plain kernel's smaller programs share the GPU better: on an
H200 it was up to a third faster there, and 8 to 19 % slower on prompts of 4,096 tokens and more."""
HOPPER_PACKED = {(192, 128): HopperTiles(block_n=128, num_stages=2)}
"""By the sizes of a key and a value, of half precision, for prompts over packed keys."""
HOPPER_SCORES = 2**27
"""Heads times queries times the most keys of a sequence, in a packed call: from here on the kernel
for Hopper saves about as much time as its launch takes more of the host, 0.06 ms on an H200."""


@cache
def prefill_tuning(
    element_size: int, head_size: int, large: bool, options: TritonOptions
) -> PrefillTuning:
    """The prefill constants for a dtype of `element_size` bytes, with the user's overrides.

    `large` where the copy engine can load tiles of LARGE_TILE tokens and the GPU has the shared
    memory for those of wide heads. Overrides are not of these: they fit as they are or not at all.
    """
    overrides = given(num_warps=options.prefill_num_warps, num_stages=options.prefill_num_stages)
    table = PREFILL
    if head_size > WIDE:
        table = WIDE_LARGE_PREFILL if large and not overrides else WIDE_PREFILL
    return replace(table[element_size], warp_roles=not overrides, **overrides)


def packed_tuning(element_size: int, key_size: int, value_size: int, large: bool) -> PackedTuning:
    """The constants of prompts over packed keys; `large` where the GPU has the shared memory."""
    fits = large and key_size <= 2 * WIDE and value_size <= WIDE
    return (PACKED if fits else NARROW_PACKED)[element_size]


def latent_prefill_tuning(element_size: int, rest_size: int, hopper: bool) -> PackedTuning:
    """The constants of prompts over latent rows, with so many columns behind their value."""
    if hopper and element_size == 2:
        return next(one for most, one in HOPPER_LATENT_PREFILL if rest_size <= most)
    return LATENT_PREFILL[element_size]
