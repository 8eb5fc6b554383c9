"""One-shot all-reduce for few rows: every rank stores its part into the memory of all ranks.

The data is its own flag, as in the LL protocol of NCCL and in the Lamport kernels of TensorRT-LLM.
There is no barrier and no fence: a reader polls its own memory until no word holds the sentinel.

Memory. Each rank has three slots, used in turn. A slot has room for one part of each rank. Every
word of it holds the sentinel while it is not in use. In call c a rank stores its x into slot c of
all other ranks; fills slot c - 1 of its own memory with the sentinel; polls slot c of its own
memory; and stores the sum. Why three are enough: slot c - 1 is next written in call c + 2, by a
rank that has seen this rank's part of call c + 1, which it sends after call c has ended.

Programs. The grid has at most as many programs as are resident at once; each takes several blocks
of a large x. A program sends all its blocks before it polls the first.

Words. The unit is a word of 32 bits, because a GPU never tears one: a float32, or two numbers of 16
bits. The sentinel is two negative zeros of 16 bits (as a float32, a denormal of -4.6e-41). Where x
holds that word, zero is sent in its place.

Order. Each rank adds the parts of all ranks in the same order in float32 and rounds once, so the
result has equal bits on all ranks.

The number of the call lies in device memory and the kernel advances it: a captured graph replays.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from nanovllm_core.kernels import launch_options, supports_dependent_launch

NUM_SLOTS = 3
UNIT = 16
"""Bytes that a thread loads and stores at a time."""

BLOCK = 128
"""Words that a program sends at a time: 16 bytes of each thread."""

SENTINEL = -0x7FFF8000
"""0x80008000 as an int32."""

MAX_PROGRAMS = 4096
"""A call counts as this many arrivals, whatever its grid."""

_ARRIVALS, _LIMIT, _UNITS, _STATE_SIZE = 0, 1, 2, 8
"""Indices in the state: the programs that have arrived in all calls, the longest wait in
nanoseconds, and the units of the call that last wrote each slot."""

ARRIVALS, LIMIT, UNITS = map(tl.constexpr, (_ARRIVALS, _LIMIT, _UNITS))
PER_CALL = tl.constexpr(MAX_PROGRAMS)
SLOTS = tl.constexpr(NUM_SLOTS)
EMPTY = tl.constexpr(SENTINEL)


@triton.jit(do_not_specialize=["rank", "num_units"])
def one_shot_kernel(
    x_ptr, residual_ptr, slots_ptr, peers_ptr, state_ptr, failure_ptr, rank, num_units,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Blocks of words by programs of one warp, which needs no barrier of its own.

    x becomes the sum over ranks; with a residual, the residual becomes itself plus the sum. All
    programs must be resident at once. `num_units` counts 16 bytes; CAPACITY is in words.
    """
    if DEPENDENT:
        gdc_launch_dependents()  # the next kernel fetches its weights while this one polls
    ranks = tl.arange(0, PADDED_SIZE)
    peer_ptrs = ()
    for step in tl.static_range(SIZE - 1):  # fetched before the wait
        peer = tl.load(peers_ptr + (rank + 1 + step) % SIZE)
        peer_ptrs += (tl.multiple_of(peer.to(tl.pointer_type(tl.int32)), 16),)
    if DEPENDENT:
        gdc_wait()
    x_words_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    out_words_ptr = x_words_ptr
    if HAS_RESIDUAL:
        out_words_ptr = residual_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    first, stride = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    # Volatile: this multiprocessor's cache may hold what an earlier call has read.
    call = tl.load(state_ptr + ARRIVALS, volatile=True) // PER_CALL
    limit = tl.load(state_ptr + LIMIT, volatile=True)
    slot = (call % SLOTS).to(tl.int32)
    before = (slot + SLOTS - 1) % SLOTS
    num_old_units = tl.load(state_ptr + UNITS + before, volatile=True).to(tl.int32)
    part = (slot * SIZE + rank) * CAPACITY
    for start in range(first, num_units * 4, stride):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < num_units * 4
        words = mark_as_sent(tl.load(x_words_ptr + columns, mask=mask, other=0))
        for step in tl.static_range(SIZE - 1):
            tl.store(peer_ptrs[step] + part + columns, words, mask=mask)
    arrive(state_ptr, slot, num_units)
    is_peer = ((ranks < SIZE) & (ranks != rank))[:, None]
    parts_ptr = slots_ptr + ranks[:, None] * CAPACITY
    clear(parts_ptr + before * SIZE * CAPACITY, is_peer, num_old_units, PADDED_SIZE, BLOCK)
    for start in range(first, num_units * 4, stride):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < num_units * 4
        words = mark_as_sent(tl.load(x_words_ptr + columns, mask=mask, other=0))
        residual = words
        if HAS_RESIDUAL:
            residual = tl.load(out_words_ptr + columns, mask=mask, other=0)
        received_ptrs = parts_ptr + slot * SIZE * CAPACITY + columns[None, :]
        received, limit = poll(
            received_ptrs, is_peer & mask[None, :], limit, call, state_ptr, failure_ptr, ranks,
            SIZE, INTERPRETED,
        )  # fmt: skip
        every = tl.where((ranks == rank)[:, None], words[None, :], received)
        out = add(every, residual, HAS_RESIDUAL, x_ptr.dtype.element_ty)
        tl.store(out_words_ptr + columns, out, mask=mask)


@triton.jit
def mark_as_sent(words):
    """Replace words that equal the sentinel by zero. A rank adds its own part in this form too."""
    return tl.where(words == EMPTY, 0, words)


@triton.jit
def arrive(state_ptr, slot, num_units):
    """Count this program, which has read the number of the call.

    The arrivals of a call add up to PER_CALL, and while one is missing the number stays: no program
    waits for another. Nothing of this call reads the units of its slot.
    """
    arrivals = 1
    if tl.program_id(0) == 0:
        arrivals = PER_CALL + 1 - tl.num_programs(0)
        tl.store(state_ptr + UNITS + slot, num_units)
    tl.atomic_add(state_ptr + ARRIVALS, arrivals, sem="relaxed")


@triton.jit
def clear(parts_ptr, is_peer, num_units, PADDED_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Fill this program's share of what a call wrote with the sentinel, in whole blocks."""
    empty = tl.full((PADDED_SIZE, BLOCK), EMPTY, tl.int32)
    for start in range(tl.program_id(0) * BLOCK, num_units * 4, tl.num_programs(0) * BLOCK):
        tl.store(parts_ptr + start + tl.arange(0, BLOCK)[None, :], empty, mask=is_peer)


@triton.jit
def poll(
    ptrs, mask, limit, call, state_ptr, failure_ptr, ranks,
    SIZE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The words of all ranks, [ranks, BLOCK], and the limit of this program's next wait.

    After the longest wait it reports the call and a rank whose words are missing. Later waits then
    end at once, and what is computed is not the sum.
    """
    words = tl.load(ptrs, mask=mask, other=0, volatile=True)
    is_waiting = tl.max(tl.max((words == EMPTY).to(tl.int32), 0), 0)
    polls = limit * 0
    started = read_clock(polls, INTERPRETED)
    while (is_waiting != 0) & (read_clock(polls, INTERPRETED) - started < limit):
        words = tl.load(ptrs, mask=mask, other=0, volatile=True)
        is_waiting = tl.max(tl.max((words == EMPTY).to(tl.int32), 0), 0)
        polls += 1
    if is_waiting != 0:
        if limit > 0:  # otherwise an earlier call has reported
            missing = tl.min(tl.min(tl.where(words == EMPTY, ranks[:, None], SIZE), 0), 0)
            tl.store(failure_ptr, call * SIZE + missing + 1)
        limit *= 0
        tl.store(state_ptr + LIMIT, limit)
    return words, limit


@triton.jit
def read_clock(polls, INTERPRETED: tl.constexpr):
    """Nanoseconds; the interpreter has no clock and counts polls. One warp has one clock."""
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


class OneShotAllReduce:
    """The all-reduce of one rank.

    `slots` is this rank's memory, int32 [3, size, capacity / 4], filled with SENTINEL before any
    rank calls; `peers` are the addresses of all ranks' slots, int64 [size]. `capacity` is the
    largest x in bytes, in whole blocks. `seconds` bounds each wait on the device. `max_programs` of
    the kernel are resident at once, beside those of another. All calls must run in one stream, and
    all ranks must make the same calls in the same order.
    """

    def __init__(
        self, rank: int, slots: Tensor, peers: Tensor, seconds: float, max_programs: int
    ) -> None:
        _, self.size, words = slots.shape
        self.rank = rank
        self.max_programs = min(max_programs, MAX_PROGRAMS)
        self.capacity = 4 * words
        self._slots = slots
        self._peers = peers
        self._state = torch.zeros(_STATE_SIZE, dtype=torch.int64, device=slots.device)
        # The host reads it without a copy: pinned memory is the device's too.
        self._failure = torch.zeros(1, dtype=torch.int64, pin_memory=slots.is_cuda)
        self._options = launch_options(supports_dependent_launch(slots.device))
        self.bound(seconds)

    def __call__(self, x: Tensor, residual: Tensor | None = None, block: int = BLOCK) -> Tensor:
        """The sum over ranks, in place; added to the residual in place where there is one.

        Both are bfloat16, float16 or float32, contiguous, in whole units, and at multiples of a
        unit: see `symmetric.fits`. `block`: words that a program sends at a time, for benchmarks;
        the capacity is a multiple of it.
        """
        out = x if residual is None else residual
        num_units = x.nbytes // UNIT
        programs = min(triton.cdiv(num_units * 4, block), self.max_programs)
        one_shot_kernel[(programs,)](
            x, out, self._slots, self._peers, self._state, self._failure, self.rank, num_units,
            SIZE=self.size, PADDED_SIZE=triton.next_power_of_2(self.size),
            CAPACITY=self.capacity // 4, BLOCK=block, HAS_RESIDUAL=residual is not None,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=1, **self._options,
        )  # fmt: skip
        return out

    def bound(self, seconds: float) -> None:
        """Bound the waits of later calls."""
        self._state[_LIMIT] = int(seconds * 1e9)

    def missing(self) -> tuple[int, int] | None:
        """A rank that did not come, and the number of the call, from 0; None where all came.

        Of the calls that the device has run so far.
        """
        code = int(self._failure)
        return ((code - 1) % self.size, (code - 1) // self.size) if code else None
