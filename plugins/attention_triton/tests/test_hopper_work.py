"""The distribution of work over the programs of the prompt kernels for Hopper, on a CPU.

Triton's interpreter does not know Gluon. So the functions run as Python, with a `gl` of scalars.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from nanovllm_attention_triton import hopper_work

BLOCK_M, BLOCK_N = 128, 128
Work = tuple[int, ...]


class Pointer(NamedTuple):
    """To a place of a list of integers."""

    values: list[int]
    place: int = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.place + offset)


def add(pointer: Pointer, value: int) -> int:
    before = pointer.values[pointer.place]
    pointer.values[pointer.place] += value
    return before


@pytest.fixture
def work(monkeypatch) -> Any:
    """The functions, and `gl`, whose number of programs a test sets."""
    gl = SimpleNamespace(
        load=lambda pointer: pointer.values[pointer.place],
        store=lambda pointer, value: pointer.values.__setitem__(pointer.place, value),
        atomic_add=add,
        maximum=max,
        minimum=min,
        cdiv=lambda a, b: -(-a // b),
        where=lambda condition, a, b: a if condition else b,
        constexpr=int,
        programs=1,
    )
    gl.num_programs = lambda _axis: gl.programs
    monkeypatch.setattr(hopper_work, "gl", gl)
    names = ("next_work", "draw_ticket", "find_work", "find_row_block")
    functions = {name: getattr(hopper_work, name).fn for name in names}
    for name, function in functions.items():
        monkeypatch.setattr(hopper_work, name, function)
    for name in ("ROWS", "CONSUMERS", "HEADS_AT_ONCE"):
        monkeypatch.setattr(hopper_work, name, getattr(hopper_work, name).value)
    return SimpleNamespace(gl=gl, **functions)


def distribute(
    work: Any, query_lens: list[int], key_lens: list[int], heads: int, group: int, causal: bool,
    multiprocessors: int, draws: Random,
) -> tuple[list[Work], list[Work], list[int]]:  # fmt: skip
    """Items in the order in which they are attended, those that end a program, and the tickets.

    Programs end their items in any order.
    """
    starts = [0, *accumulate(query_lens)]
    row_blocks = starts[-1] * group // BLOCK_M + len(query_lens)
    work.gl.programs = min(row_blocks * heads, multiprocessors)
    tickets = [0]
    seqs = (Pointer(key_lens), Pointer(starts), len(query_lens), row_blocks, heads, causal)
    items = [
        work.next_work(program, seqs, Pointer(tickets), group, BLOCK_N)
        for program in range(work.gl.programs)
    ]
    attended, ended = [], []
    while items:
        item = items.pop(draws.randrange(len(items)))
        if item[5] == 0:
            ended.append(item)
            continue
        attended.append(item)
        drawn = work.draw_ticket(seqs, Pointer(tickets))
        items.append(work.next_work(drawn, seqs, Pointer(tickets), group, BLOCK_N))
    return attended, ended, tickets


@pytest.mark.parametrize("seed", range(150))
def test_each_block_of_rows_of_each_head_is_attended_once(work, seed):
    """Of drawn lengths, some of them 0; the counter of tickets is 0 again."""
    draws = Random(seed)
    query_lens = draws.choices([0, 1, 5, 127, 128, 129, 300, 777, 1000], k=draws.randint(1, 9))
    query_lens[0] += 1
    causal = draws.random() < 0.5
    key_lens = [draws.choice([0, 1, 50, 1000]) + n * draws.choice([0, 1]) for n in query_lens]
    heads = draws.choice([1, 2, 3, 7, 15, 16, 17, 20, 31, 32, 33, 40, 64, 128])
    group = draws.choice([1, 1, 2, 5, 8])
    multiprocessors = draws.choice([1, 4, 132])
    attended, ended, tickets = distribute(
        work, query_lens, key_lens, heads, group, causal, multiprocessors, draws
    )
    expected = [
        (head, seq, first_row)
        for head in range(heads)
        for seq, length in enumerate(query_lens)
        for first_row in range(0, length * group, BLOCK_M)
    ]
    assert sorted((item[0], item[6], item[1]) for item in attended) == expected
    assert tickets == [0]
    for head, first_row, _, queries, keys, tiles, _ in attended:
        last = min((first_row + BLOCK_M) // group, queries) if causal else 0
        seen = keys - queries + last if causal else keys
        assert max(seen, 1) <= tiles * BLOCK_N < max(seen, 1) + 2 * BLOCK_N
        assert head < heads
    # A program that is done copies queries of the last item that it drew: of a head that exists.
    assert all(0 <= item[0] < heads for item in ended)


def test_long_blocks_of_a_group_of_heads_come_first(work):
    """So that what is left at the end is short, and the keys of 16 heads are read at once."""
    attended, _, _ = distribute(work, [1024], [1024], 40, 1, True, 1, Random(0))
    order = [(item[0] // 16, -item[5]) for item in attended]
    assert order == sorted(order)
    assert [item[0] for item in attended[:17]] == [*range(16), 0]
