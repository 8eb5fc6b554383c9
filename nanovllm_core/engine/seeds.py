"""Seeds for requests that name none, and for the samples of one request."""

from __future__ import annotations

import struct

import xxhash


def derive_seed(seed: int, index: int) -> int:
    """A seed from 0 to 2**63 - 1: the upper 63 bits of xxh3_64 over (seed, index), little-endian.

    The engine uses it twice: (engine seed, arrival index) where a request names no seed, and
    (request seed, sample index) for the second and later samples; sample 0 keeps its request's.
    """
    return xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, index)) >> 1


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request whose seed is `seed`."""
    return seed if index == 0 else derive_seed(seed, index)
