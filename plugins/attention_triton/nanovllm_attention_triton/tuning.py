"""The constants of the kernels, one table per phase.

`benchmarks/attention_decode.py` sweeps them on a GPU; nothing else in the package names a number
that is a matter of speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanovllm_attention_triton.options import TritonOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """How decode work is cut and compiled.

    A program handles `tile` tokens per loop round. The context of a row is cut into chunks; the
    device picks their length each step: long enough that the batch makes about `wave_programs`
    programs per multiprocessor, at most `max_chunk` tokens, and never so short that the batch makes
    more than `max_programs` per multiprocessor (which bounds the grid of a captured graph).
    """

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3
    min_chunk: int = 64
    max_chunk: int = 512
    wave_programs: int = 3
    max_programs: int = 8
    fixed_chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuning:
    """The tile of queries and keys of one prefill program, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tuning(element_size: int, head_size: int, options: TritonOptions) -> DecodeTuning:
    """The decode constants for a dtype of `element_size` bytes, with the user's overrides."""
    base = DecodeTuning()
    if element_size == 4:
        base = DecodeTuning(tile=32, num_warps=8, num_stages=2)
    return replace(
        base,
        num_warps=options.decode_num_warps or base.num_warps,
        num_stages=options.decode_num_stages or base.num_stages,
        fixed_chunk=options.chunk_size,
    )


def prefill_tuning(
    element_size: int, head_size: int, max_query_len: int, options: TritonOptions
) -> PrefillTuning:
    """The prefill constants for the longest chunk of a step, with the user's overrides.

    fp32 uses plain multiply-adds (IEEE): small tiles, or its operands do not fit the registers.
    """
    if element_size == 4:
        base = PrefillTuning(block_m=32, block_n=32, num_warps=8, num_stages=1)
    elif max_query_len <= 64:
        base = PrefillTuning(block_m=64, block_n=64, num_warps=4, num_stages=3)
    else:
        base = PrefillTuning(block_m=128, block_n=64, num_warps=8, num_stages=3)
    return replace(
        base,
        num_warps=options.prefill_num_warps or base.num_warps,
        num_stages=options.prefill_num_stages or base.num_stages,
    )
