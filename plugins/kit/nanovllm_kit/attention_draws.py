"""Random batches for the checks of attention backends: sizes, and queries that show what they saw.

Everything is drawn from a `Random` that a check gets as `draws`, so a seed names its cases.
Shape suffixes as in `nanovllm_core.interfaces.attention`; Q queries of one sequence, L its keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from nanovllm_kit.attention_backend import BackendUnderTest
from nanovllm_kit.paged_attention import PagedCase


@dataclass(frozen=True, slots=True)
class Limits:
    """How far each dimension is driven while the others stay small, and how many mixed batches.

    `keys`: of one sequence; `queries`: of one chunk; `rows`: of a batch; `heads`: KV heads, and
    query heads per KV head. `longest` and `total` bound the sequences of a mixed batch.
    """

    rows: int
    keys: int
    queries: int
    heads: int
    longest: int
    total: int
    mixed: int


LIMITS = {
    "cpu": Limits(rows=560, keys=12_288, queries=2_304, heads=72, longest=500, total=800, mixed=16),
    "cuda": Limits(
        rows=2_048, keys=40_960, queries=8_192, heads=128, longest=5_000, total=40_000, mixed=16
    ),
}
LARGEST = Limits(
    rows=4_096, keys=140_000, queries=8_400, heads=256, longest=20_000, total=40_000, mixed=64
)
"""At the level `full`."""
EVERY = 16
"""Every number of KV heads and every group size up to here is tried, not only drawn."""
TILES = (16, 32, 64, 100, 128, 256)
"""Sizes in whose multiples kernels and limits come."""


def size(draws: Random, low: int, high: int) -> int:
    """A size in [low, high], log-uniform; half of them at a multiple of a tile, or next to it."""
    drawn = round(math.exp(draws.uniform(math.log(low), math.log(high))))
    tiles = [tile for tile in TILES if tile <= drawn]
    if tiles and draws.random() < 0.5:
        tile = draws.choice(tiles)
        drawn = round(drawn / tile) * tile + draws.choice((-1, 0, 1))
    return min(max(drawn, low), high)


def near(draws: Random, most: int) -> int:
    """A size in the last sixteenth before `most`: beyond every threshold that is much lower."""
    return most - draws.randrange(max(1, most // 16))


def head_pairs(draws: Random, most: int, *, gqa: bool) -> list[tuple[int, int]]:
    """(query heads, KV heads): each number of KV heads and each group up to EVERY, and some beyond.

    Numbers and groups meet at random. A number near `most` has every head of a smaller one.
    """
    numbers = [*range(1, EVERY + 1)]
    groups = draws.sample(numbers, EVERY)
    # A large group beside few KV heads, and many KV heads beside a small group.
    numbers += [size(draws, 1, 3), 1, size(draws, EVERY + 1, most), near(draws, most)]
    groups += [size(draws, EVERY + 1, most), near(draws, most), draws.randint(1, 3), 1]
    return [
        (number * (group if gqa else 1), number)
        for number, group in zip(numbers, groups, strict=True)
    ]


def mixed_batch(subject: BackendUnderTest, draws: Random, limits: Limits, number: int) -> PagedCase:
    """A batch with everything drawn at once: heads, sizes, blocks, lengths, sharing.

    Of eight numbers in a row each has its own choice of phase, window and soft cap.
    """
    shape = drawn_shape(subject, draws)
    block_size = shape["block_size"]
    lens: list[int] = []
    for _ in range(size(draws, 1, 24)):
        drawn = size(draws, 1, limits.longest)
        if sum(lens) + drawn <= limits.total or not lens:
            # A prefix hit leaves whole blocks behind it, and sequences often end with a block.
            lens.append(-(-drawn // block_size) * block_size if draws.random() < 0.2 else drawn)
    queries = None
    if subject.phases[number % len(subject.phases)] == "prefill":
        queries = [_queries(draws, n, limits.total // 8) for n in lens]
    else:
        padding = [draws.random() < 0.15 for _ in lens]
        lens = [0 if row and padding[row] else keys for row, keys in enumerate(lens)]
        draws.shuffle(lens)
    window = size(draws, 1, limits.longest) if number % 4 >= 2 else None
    soft_cap = draws.uniform(1, 60) if number % 8 >= 4 else None
    stated = subject.capabilities
    bent: dict[str, Any] = {
        "sliding_window": window if stated.sliding_window else None,
        "soft_cap": soft_cap if stated.soft_cap else None,
    }
    asked = {name: value is not None for name, value in bent.items()}
    if not subject.reasons(subject.requirements(dtype=shape["dtype"], **asked)):
        shape |= bent
    case = subject.case(lens, queries, seed=draws.randrange(2**31), **shape)
    return pointed(with_stale_entries(with_shared_prefixes(case, draws), draws), draws)


def drawn_shape(subject: BackendUnderTest, draws: Random) -> dict[str, Any]:
    """Heads, head size, block size and dtype that the backend accepts together."""
    while True:
        num_kv_heads = size(draws, 1, 8)
        group = size(draws, 1, 32 // num_kv_heads) if subject.capabilities.gqa else 1
        shape: dict[str, Any] = {
            "num_heads": num_kv_heads * group,
            "num_kv_heads": num_kv_heads,
            "head_size": draws.choice(subject.head_sizes),
            "dtype": draws.choice(subject.dtypes),
        }
        if not subject.reasons(subject.requirements(**shape)):
            break
        if draws.random() < 0.05:  # The backend accepts few shapes: the usual one.
            shape = {"dtype": subject.dtype}
            break
    multiple = draws.choice(subject.block_multiples)
    return shape | {"block_size": multiple * size(draws, 1, max(1, 256 // multiple))}


def _queries(draws: Random, keys: int, most: int) -> int:
    """Of a chunk: none, a whole prompt, or the last positions of one."""
    if draws.random() < 0.1:
        return 0
    return min(keys if draws.random() < 0.3 else size(draws, 1, keys), max(1, most))


def with_shared_prefixes(case: PagedCase, draws: Random) -> PagedCase:
    """Some sequences begin with the blocks of the one before, as after a prefix hit."""
    table = case.block_table.clone()
    for row in range(1, len(case.seq_lens)):
        common = min(case.seq_lens[row - 1 : row + 1]) // case.block_size
        if common and draws.random() < 0.3:
            shared = draws.randint(1, common)
            table[row, :shared] = table[row - 1, :shared]
    return replace(case, block_table=table)


def with_stale_entries(case: PagedCase, draws: Random) -> PagedCase:
    """A table as wide as the longest sequence could need; behind a row's blocks it is stale."""
    rows, width = case.block_table.shape
    wider = width + draws.randrange(9)
    stale = [draws.randrange(case.k_cache.shape[0]) for _ in range(rows * wider)]
    table = case.block_table.new_tensor(stale).view(rows, wider)
    for row, keys in enumerate(case.seq_lens):
        own = -(-keys // case.block_size)
        table[row, :own] = case.block_table[row, :own]
    return replace(case, block_table=table)


def with_freed_blocks(case: PagedCase, held: float, draws: Random) -> PagedCase:
    """The same where blocks wholly before a sequence's window were freed: what it sees stays.

    Their table entries name any blocks, some of them of other sequences. Blocks that no sequence
    needs hold `held` in all places.
    """
    num_blocks, table, needed = len(case.k_cache), case.block_table.clone(), set[int]()
    for row, (queries, keys) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        first = max(0, keys - queries - (case.sliding_window or keys) + 1) // case.block_size
        needed.update(table[row, first : -(-keys // case.block_size)].tolist())
        freed = [draws.randrange(num_blocks) for _ in range(first)]
        table[row, :first] = table.new_tensor(freed)
    others = [block for block in range(num_blocks) if block not in needed]
    k_cache, v_cache = (cache.clone() for cache in (case.k_cache, case.v_cache))
    for cache in (k_cache, v_cache):
        cache[others] = held
    return replace(case, k_cache=k_cache, v_cache=v_cache, block_table=table)


def pointed(case: PagedCase, draws: Random) -> PagedCase:
    """The batch with half of its (query, head) pairs turned to one key each.

    That key outweighs all others that the query sees: its first, its last or any, so that a lost
    one shows. What lies next to the keys in sight (a later position, the end of the last block, the
    key before the window) would outweigh even that one, so that a wrong mask shows. The other
    pairs stay as they were, with many keys of like weight: every other head of each query.
    """
    generator = torch.Generator().manual_seed(draws.randrange(2**31))
    q_THD, start = case.q_THD.clone(), 0
    for row, (queries, keys) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        if queries and keys:
            where = slice(start, start + queries)
            q_THD[where] = _pointed_one(case, row, case.q_THD[where], keys, generator)
        start += queries
    return replace(case, q_THD=q_THD)


def _pointed_one(
    case: PagedCase, row: int, q_QHD: Tensor, keys: int, generator: torch.Generator
) -> Tensor:
    queries, num_heads, _ = q_QHD.shape
    blocks = case.block_table[row, : -(-keys // case.block_size)].long()
    k_LKD = case.k_cache[blocks].flatten(0, 1).float().nan_to_num()

    def random(high: int) -> Tensor:
        return torch.randint(high, (queries, num_heads), generator=generator)

    last_QH = torch.arange(keys - queries, keys)[:, None].expand(-1, num_heads)
    first_QH = torch.zeros_like(last_QH)
    if case.sliding_window is not None:
        first_QH = (last_QH - case.sliding_window + 1).clamp(min=0)
    seen_QH = first_QH + random(2**40) % (last_QH - first_QH + 1)
    kind_QH = random(4)
    seen_QH = torch.where(kind_QH == 0, first_QH, torch.where(kind_QH == 1, last_QH, seen_QH))
    hidden_QH = torch.where(random(2) == 0, last_QH + 1, first_QH - 1)
    inside_QH = (hidden_QH >= 0) & (hidden_QH < len(k_LKD))
    kv_heads = torch.arange(num_heads) // (num_heads // k_LKD.shape[1])
    score = math.log(keys) + 8
    device = q_QHD.device

    def towards(places_QH: Tensor, score: float) -> Tensor:
        k_QHD = k_LKD[places_QH.to(device), kv_heads.to(device)]
        size_QH1 = k_QHD.square().sum(-1, keepdim=True).clamp(min=1e-3)
        return k_QHD * (score / case.scale / size_QH1)

    aimed_QHD = towards(seen_QH, score)
    hidden_QHD = towards(hidden_QH.clamp(0, len(k_LKD) - 1), score + 3)
    aimed_QHD += hidden_QHD * inside_QH.to(device)[..., None]
    plain_QH = (torch.arange(queries)[:, None] + torch.arange(num_heads) + random(2)[0, 0]) % 2
    return torch.where(plain_QH.to(device)[..., None] == 0, q_QHD, aimed_QHD.to(q_QHD.dtype))
