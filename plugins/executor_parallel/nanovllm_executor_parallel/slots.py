"""What the one-shot and the two-shot all-reduce share: slots, words that are flags, bounded waits.

The data is its own flag, as in the LL protocol of NCCL and in the Lamport kernels of TensorRT-LLM.
There is no barrier and no fence: a reader polls its own memory until no word holds the sentinel.

Memory. Each rank has three slots, used in turn. A slot has a row for each rank, or several such
areas. Every word of it holds the sentinel while it is not in use. In call c a rank stores into slot
c of all other ranks; fills slot c - 1 of its own memory with the sentinel; and polls slot c of its
own memory until all rows are there. Why three are enough: slot c - 1 is next written in call c + 2,
by a rank that has seen this rank's rows of call c + 1, which it sends after call c has ended.

Programs. The grid has at most as many programs as are resident at once; each takes several blocks
of a large x. A program sends AHEAD blocks before it polls the first, and one more before each next:
the links are busy while it adds. All ranks make the same steps in the same order, and each step
waits for earlier ones alone, so none waits for ever.

Words. The unit is a word of 32 bits, because a GPU never tears one: a float32, or two numbers of 16
bits. The sentinel is two negative zeros of 16 bits (as a float32, a denormal of -4.6e-41). Where
that word would be sent, zero is sent in its place.

The number of the call lies in device memory and the kernel advances it: a captured graph replays.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from nanovllm_core.kernels import cdiv, launch_options, next_power_of_2, supports_dependent_launch

NUM_SLOTS = 3
UNIT = 16
"""Bytes that a thread loads and stores at a time."""

BLOCK = 128
"""Words that a program sends at a time: 16 bytes of each thread."""

SENTINEL = -0x7FFF8000
"""0x80008000 as an int32."""

AHEAD = tl.constexpr(4)
"""Blocks that a program has sent before it polls the first of them."""

WAVES_AHEAD = tl.constexpr(2)
"""The same, of the kernels of whole rows: see `row_norm.py`."""

MAX_WORDS = 32768
"""Of the rows of all ranks that a program has in its registers: with 4 ranks, 16,384 numbers of 16
bits of each."""

_WARP_WORDS = 256
"""Of a row, up to _MAX_WARPS."""
_MAX_WARPS = 8

MAX_REGISTERS = 120
"""Of a thread, so that 16 warps fit on a multiprocessor beside another kernel's."""

MAX_PROGRAMS = 4096
"""A call counts as this many arrivals, whatever its grid."""

_ARRIVALS, _UNITS, _STATE_SIZE = 0, 1, 4
"""Indices in the state: the programs that have arrived in all calls, and the units in a row of the
call that last wrote each slot."""

ARRIVALS, UNITS = map(tl.constexpr, (_ARRIVALS, _UNITS))
PER_CALL = tl.constexpr(MAX_PROGRAMS)
POLLS_PER_LOOK = tl.constexpr(64)
"""Between two looks at the clock."""
SLOTS = tl.constexpr(NUM_SLOTS)
EMPTY = tl.constexpr(SENTINEL)


@triton.jit
def find_peers(peers_ptr, rank, SIZE: tl.constexpr):
    """The slots of the other ranks, from the next one on: all ranks begin with different ones."""
    peer_ptrs = ()
    for step in tl.static_range(SIZE - 1):
        peer = tl.load(peers_ptr + (rank + 1 + step) % SIZE)
        peer_ptrs += (tl.multiple_of(peer.to(tl.pointer_type(tl.int32)), 16),)
    return peer_ptrs


@triton.jit
def begin(state_ptr):
    """The number of the call, its slot, the slot before, and the units in a row of that one.

    Volatile: this multiprocessor's cache may hold what an earlier call has read.
    """
    call = tl.load(state_ptr + ARRIVALS, volatile=True) // PER_CALL
    slot = (call % SLOTS).to(tl.int32)
    before = (slot + SLOTS - 1) % SLOTS
    return call, slot, before, tl.load(state_ptr + UNITS + before, volatile=True).to(tl.int32)


@triton.jit
def mark_as_sent(words):
    """Replace words that equal the sentinel by zero. A rank adds its own part in this form too."""
    return tl.where(words == EMPTY, 0, words)


@triton.jit
def arrive(state_ptr, slot, row_units):
    """Count this program, which has read the number of the call.

    The arrivals of a call add up to PER_CALL, and while one is missing the number stays: no program
    waits for another. Nothing of this call reads the units of its slot.
    """
    arrivals = 1
    if tl.program_id(0) == 0:
        arrivals = PER_CALL + 1 - tl.num_programs(0)
        tl.store(state_ptr + UNITS + slot, row_units)
    tl.atomic_add(state_ptr + ARRIVALS, arrivals, sem="relaxed")


@triton.jit
def clear(rows_ptr, is_peer, num_units, PADDED_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Fill this program's share of what a call wrote with the sentinel."""
    empty = tl.full((PADDED_SIZE, BLOCK), EMPTY, tl.int32)
    for start in range(tl.program_id(0) * BLOCK, num_units * 4, tl.num_programs(0) * BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        tl.store(rows_ptr + columns, empty, mask=is_peer & (columns < num_units * 4))


@triton.jit
def poll(
    ptrs, mask, limit, call, limit_ptr, failure_ptr, ranks,
    SIZE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The words of all ranks, [ranks, BLOCK], and the limit of this program's next wait.

    After the longest wait it reports the call and a rank whose words are missing. Later waits then
    end at once, and what is computed is not the sum.
    """
    words = tl.load(ptrs, mask=mask, other=0, volatile=True)
    is_waiting = any_is_empty(words)
    polls = limit * 0
    is_over = (limit <= 0).to(tl.int32)
    started = read_clock(polls, INTERPRETED)
    while (is_waiting != 0) & (is_over == 0):
        look = polls + (1 if INTERPRETED else POLLS_PER_LOOK)
        while (is_waiting != 0) & (polls < look):
            words = tl.load(ptrs, mask=mask, other=0, volatile=True)
            is_waiting = any_is_empty(words)
            polls += 1
        # Each warp has read a clock of its own, and all must end at once.
        is_over = (read_clock(polls, INTERPRETED) - started >= limit).to(tl.int32)
        is_over = tl.max(tl.max(words * 0 + is_over, 0), 0)
    if is_waiting != 0:
        if limit > 0:  # otherwise an earlier wait has reported
            missing = tl.min(tl.min(tl.where(words == EMPTY, ranks[:, None], SIZE), 0), 0)
            tl.store(failure_ptr, call * SIZE + missing + 1)
        limit *= 0
        tl.store(limit_ptr, limit)
    return words, limit


@triton.jit
def any_is_empty(words):
    """1 where a word of [ranks, BLOCK] is still the sentinel, else 0."""
    return tl.max(tl.max((words == EMPTY).to(tl.int32), 0), 0)


@triton.jit
def read_clock(polls, INTERPRETED: tl.constexpr):
    """Nanoseconds; the interpreter has no clock and counts polls."""
    if INTERPRETED:
        return polls
    else:
        return globaltimer().to(tl.int64)


@triton.jit
def add(received, residual, HAS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr):
    """The sum of words [ranks, BLOCK] over ranks, plus the residual's [BLOCK], as words [BLOCK]."""
    if DTYPE.is_fp32():
        total = tl.sum(received.to(tl.float32, bitcast=True), 0)
        if HAS_RESIDUAL:
            total += residual.to(tl.float32, bitcast=True)
        return total.to(tl.int32, bitcast=True)
    else:
        low = tl.sum(half(received, DTYPE), 0)
        high = tl.sum(half(received >> 16, DTYPE), 0)
        if HAS_RESIDUAL:
            low += half(residual, DTYPE)
            high += half(residual >> 16, DTYPE)
        return (bits(low, DTYPE) & 0xFFFF) | (bits(high, DTYPE) << 16)


@triton.jit
def half(words, DTYPE: tl.constexpr):
    """The numbers in the lower 16 bits of words, as float32."""
    return words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def bits(numbers, DTYPE: tl.constexpr):
    """Numbers rounded to 16 bits, as int32."""
    return numbers.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)


def warps_of_row(words: int) -> int:
    """Of a program that has a row of so many words in its registers."""
    padded: int = next_power_of_2(words)
    return min(max(padded // _WARP_WORDS, 1), _MAX_WARPS)


class Bound:
    """The longest wait of a rank's all-reduces on the device, in nanoseconds.

    The ways of a rank share it: once a wait has reached it, all later ones end at once.
    """

    def __init__(self, seconds: float, device: torch.device) -> None:
        self.nanoseconds = torch.empty(1, dtype=torch.int64, device=device)
        self.set(seconds)

    def set(self, seconds: float) -> None:
        """Bound the waits of later calls."""
        self.nanoseconds.fill_(int(seconds * 1e9))


class SlotAllReduce:
    """The all-reduce of one rank over slots; a derived class has the kernel.

    `slots` is this rank's memory, int32 of `slots_shape`, filled with SENTINEL before any rank
    calls; `peers` are the addresses of all ranks' slots, int64 [size]. `bound` is that of each wait
    on the device. `max_programs` of the kernel are resident at once, beside those of another. All
    calls must run in one stream, and all ranks must make the same calls in the same order.
    """

    name: ClassVar[str]
    kernel: ClassVar[Any]
    norm_kernel: ClassVar[Any]
    num_areas: ClassVar[int]
    """Areas of a slot, each with a row of every rank."""

    def __init__(
        self, rank: int, slots: Tensor, peers: Tensor, bound: Bound, max_programs: int
    ) -> None:
        *_, self.size, self._row = slots.shape
        self.rank = rank
        self.max_programs = min(max_programs, MAX_PROGRAMS)
        self.capacity = 4 * self._row * self.rows_of_x(self.size)
        """The largest x of a call of the kernel in bytes; a larger one goes in pieces."""
        self._slots = slots
        self._bound = bound
        self._state = torch.zeros(_STATE_SIZE, dtype=torch.int64, device=slots.device)
        # The host reads it without a copy: pinned memory is the device's too.
        self._failure = torch.zeros(1, dtype=torch.int64, pin_memory=slots.is_cuda)
        self._memory = (slots, peers, self._state, bound.nanoseconds, self._failure)
        self._sizes = {
            "SIZE": self.size, "PADDED_SIZE": next_power_of_2(self.size), "ROW": self._row,
            "INTERPRETED": triton.knobs.runtime.interpret,
        }  # fmt: skip
        self._options = {
            **launch_options(supports_dependent_launch(slots.device)), "maxnreg": MAX_REGISTERS,
        }  # fmt: skip

    @staticmethod
    def rows_of_x(size: int) -> int:
        """The number of rows into which x is divided."""
        raise NotImplementedError

    @classmethod
    def slots_shape(cls, size: int, limit: int) -> tuple[int, int, int, int]:
        """The memory for calls with an x of `limit` bytes: rows of whole blocks."""
        blocks = cdiv(cdiv(limit, 4 * BLOCK), cls.rows_of_x(size))
        return NUM_SLOTS, cls.num_areas, size, blocks * BLOCK

    def __call__(self, x: Tensor, residual: Tensor | None = None, block: int = BLOCK) -> Tensor:
        """The sum over ranks, in place; added to the residual in place where there is one.

        Both are bfloat16, float16 or float32, contiguous, in whole units, and at multiples of a
        unit: see `symmetric.fits`. All ranks have the same residual. `block`: words that a program
        sends at a time, for benchmarks; a row of the slots is a multiple of it.
        """
        out = x if residual is None else residual
        piece = self.capacity // x.element_size()
        for x_piece, out_piece in zip(
            x.view(-1).split(piece), out.view(-1).split(piece), strict=True
        ):
            num_units = x_piece.nbytes // UNIT
            blocks = cdiv(cdiv(num_units * 4, block), self.rows_of_x(self.size))
            self.kernel[(min(blocks, self.max_programs),)](
                x_piece, out_piece, *self._memory, self.rank, num_units, **self._sizes,
                BLOCK=block, HAS_RESIDUAL=residual is not None, num_warps=1, **self._options,
            )  # fmt: skip
        return out

    def takes_rows_of(self, row_bytes: int) -> bool:
        """True for whole units, and no more than a program's registers and a slot's row hold."""
        words = row_bytes // 4
        return (
            row_bytes % UNIT == 0
            and next_power_of_2(words) * next_power_of_2(self.size) <= MAX_WORDS
            and words <= self._row
        )

    def add_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """The norm [T, E] of the residual, to which the sum over ranks was added in place.

        As `KernelSet.rms_norm`; x and the residual are as in a call, in rows that `takes_rows_of`
        takes.
        """
        normed_TE = torch.empty_like(x_TE)
        words = x_TE.shape[1] * x_TE.element_size() // 4
        rows = self._row // words * self.rows_of_x(self.size)
        warps = warps_of_row(words)
        for x, residual, normed in zip(
            x_TE.split(rows), residual_TE.split(rows), normed_TE.split(rows), strict=True
        ):
            shares = cdiv(cdiv(x.nbytes, 4 * BLOCK), self.rows_of_x(self.size))
            programs = max(len(x), shares)
            self.norm_kernel[(min(programs, max(self.max_programs // warps, 1)),)](
                x, residual, weight_E, normed, *self._memory, self.rank, len(x), **self._sizes,
                WORDS=words, BLOCK=next_power_of_2(words), SEND=warps * BLOCK, EPS=eps,
                num_warps=warps,
                **self._options,
            )  # fmt: skip
        return normed_TE

    def missing(self) -> tuple[int, int] | None:
        """A rank that did not come, and the number of the call, from 0; None where all came.

        Of the calls that the device has run so far.
        """
        code = int(self._failure)
        return ((code - 1) % self.size, (code - 1) // self.size) if code else None
