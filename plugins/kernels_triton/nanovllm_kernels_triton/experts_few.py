"""Mixtures of experts for few tokens: every (token, expert) pair reads its expert's weights.

Two kernels, both bound by the stream of weights. A fixed number of programs share all tiles of
outputs in equal, contiguous runs; a tile's steps over the inputs continue those of the tile before
it, so that loads never pause. Experts that several pairs chose are read by all of them at about the
same time, and from the L2 cache by all but the first.

Shapes: x [T, INPUTS], ids and weights [T, CHOSEN]; pair p belongs to token p // CHOSEN.

LANES: the partial sums of a weight row that stay apart between steps; with one for each thread of a
row, threads meet only behind a tile's last step. SIGNAL: the steps before its end with which a
program lets the next kernel start. DEPENDENT: see `nanovllm_core.kernels.launch_options`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels_triton.norm_route import take_out_logits


@triton.jit(do_not_specialize=["num_pairs"])
def few_gate_up_kernel(
    x_ptr, ids_ptr, weight_ptr, hidden_ptr, next_ptr, num_pairs, x_stride,
    NEXT: tl.constexpr, CHOSEN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr,
    SIGNAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of each pair -> `hidden_ptr` [pairs, OUTPUTS]; a tile has BLOCK_N of them.

    Weight [experts, 2·OUTPUTS, INPUTS], the gate's rows first. The first NEXT bytes behind
    `next_ptr`, a weight that is read after the mixture, are on their way to the L2 cache before the
    kernel waits: until the router has chosen, memory has nothing to do.
    """
    TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    if DEPENDENT:
        if NEXT > 0:
            _prefetch_to_stay(next_ptr, NEXT)
        gdc_wait()
    first, end = _run_of_program(num_pairs * TILES)
    signal = tl.maximum(end * STEPS - SIGNAL, first * STEPS)
    lanes, halves = tl.arange(0, BLOCK_K), tl.arange(0, 2 * BLOCK_N)
    y = tl.zeros((2 * BLOCK_N, LANES), tl.float32)
    for step in tl.range(first * STEPS, end * STEPS, num_stages=STAGES):
        if DEPENDENT:  # noqa: SIM102 - the one is the compiler's, the other the program's
            if step == signal:
                gdc_launch_dependents()
        tile = step // STEPS
        pair, columns = tile // TILES, step % STEPS * BLOCK_K + lanes
        outputs = tile % TILES * BLOCK_N + halves % BLOCK_N
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        row_ptrs = weight_ptr + expert * (2 * OUTPUTS * INPUTS)
        row_ptrs += (outputs + halves // BLOCK_N * OUTPUTS) * INPUTS
        inside = columns < INPUTS
        mask = (outputs < OUTPUTS)[:, None] & inside[None, :]
        weight = tl.load(row_ptrs[:, None] + columns[None, :], mask=mask, other=0.0)
        x_row_ptr = x_ptr + tl.cast(pair // CHOSEN, tl.int64) * x_stride
        x = tl.load(x_row_ptr + columns, mask=inside, other=0.0)
        y += _lane_sums(weight, x, LANES)
        if step % STEPS == STEPS - 1:
            dtype: tl.constexpr = hidden_ptr.dtype.element_ty
            gate, up = tl.split(tl.trans(tl.reshape(tl.sum(y, axis=1), (2, BLOCK_N))))
            hidden = gated(gate, up, dtype)
            places = tile % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
            tl.store(hidden_ptr + pair * OUTPUTS + places, hidden, mask=places < OUTPUTS)
            y = tl.zeros((2 * BLOCK_N, LANES), tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def few_down_kernel(
    hidden_ptr, weights_ptr, ids_ptr, weight_ptr, out_ptr, passed_ptr, num_tokens, out_stride,
    PASSED: tl.constexpr, SCALE: tl.constexpr, CHOSEN: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr,
    SIGNAL: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The weighted sum over a token's experts, in their order -> `out_ptr` [T, OUTPUTS].

    Weight [experts, OUTPUTS, INPUTS]. ADD: `out_ptr` holds the residual, which is in the sum, and
    is read while weights are on their way. SCALE: the weights are first divided by their sum, and
    multiplied by it; None: they are not. `passed_ptr` [PASSED], or None: logits that have passed
    and are taken out. The weights of the first AHEAD steps are on their way to the L2 cache before
    the kernel waits. The ids are known by then: `few_gate_up_kernel`, which is the kernel before,
    signals behind its own wait.
    """
    TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    CHUNKS: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = CHOSEN * CHUNKS
    first, end = _run_of_program(num_tokens * TILES)
    signal = tl.maximum(end * STEPS - SIGNAL, first * STEPS)
    lanes, rows = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    if DEPENDENT:
        for step in tl.static_range(min(AHEAD, STEPS)):
            if first < end:
                expert = tl.load(
                    ids_ptr + first // TILES * CHOSEN + step // CHUNKS, cache_modifier=".cg"
                )
                matrix_ptr = weight_ptr + expert.to(tl.int64) * (OUTPUTS * INPUTS)
                start = step % CHUNKS * BLOCK_K
                _prefetch(
                    matrix_ptr, first % TILES * BLOCK_N + rows, start, OUTPUTS, INPUTS, BLOCK_K
                )
        gdc_wait()
    if passed_ptr is not None:  # noqa: SIM102 - the one is the compiler's, the other the program's
        if tl.program_id(0) == 0:
            take_out_logits(passed_ptr, PASSED)
    y = tl.zeros((BLOCK_N, LANES), tl.float32)
    residual, factor = tl.zeros((BLOCK_N,), out_ptr.dtype.element_ty), 1.0
    for step in tl.range(first * STEPS, end * STEPS, num_stages=STAGES):
        if DEPENDENT:  # noqa: SIM102 - the one is the compiler's, the other the program's
            if step == signal:
                gdc_launch_dependents()
        tile, part = step // STEPS, step % STEPS
        token, outputs = tile // TILES, tile % TILES * BLOCK_N + rows
        out_ptrs = out_ptr + tl.cast(token, tl.int64) * out_stride + outputs
        if SCALE is not None:  # noqa: SIM102 - as above
            if part == 0:
                factor = _factor(weights_ptr + token * CHOSEN, CHOSEN, SCALE)
        if ADD:  # noqa: SIM102 - as above
            if part == 0:
                residual = tl.load(out_ptrs, mask=outputs < OUTPUTS, other=0.0)
        pair, columns = token * CHOSEN + part // CHUNKS, part % CHUNKS * BLOCK_K + lanes
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        row_ptrs = weight_ptr + expert * (OUTPUTS * INPUTS) + outputs * INPUTS
        inside = columns < INPUTS
        mask = (outputs < OUTPUTS)[:, None] & inside[None, :]
        weight = tl.load(row_ptrs[:, None] + columns[None, :], mask=mask, other=0.0)
        hidden = tl.load(hidden_ptr + pair * INPUTS + columns, mask=inside, other=0.0)
        y += _lane_sums(weight, hidden, LANES) * tl.load(weights_ptr + pair)
        if part == STEPS - 1:
            total = tl.sum(y, axis=1)
            if SCALE is not None:
                total *= factor
            total += residual.to(tl.float32)
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=outputs < OUTPUTS)
            y = tl.zeros((BLOCK_N, LANES), tl.float32)


@triton.jit
def _factor(weights_ptr, CHOSEN: tl.constexpr, SCALE: tl.constexpr):
    """What the weights of a token are multiplied by where their sum is to be SCALE."""
    BLOCK: tl.constexpr = triton.next_power_of_2(CHOSEN)
    places = tl.arange(0, BLOCK)
    weights = tl.load(weights_ptr + places, mask=places < CHOSEN, other=0.0)
    # As the reference: 0 and no NaN where all scores underflow.
    return SCALE / (tl.sum(weights, axis=0) + 1e-20)


@triton.jit
def _lane_sums(weight, x, LANES: tl.constexpr):
    """The products of each row [N, K] with x [K], summed in LANES equal parts -> [N, LANES]."""
    products = weight.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(products, (weight.shape[0], LANES, x.shape[0] // LANES)), axis=2)


@triton.jit
def _prefetch(
    matrix_ptr, outputs, start,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Start the way to the L2 cache of BLOCK_K inputs of some rows, in lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // matrix_ptr.dtype.element_ty.primitive_bitwidth
    columns = start + tl.arange(0, max(BLOCK_K // LINE, 1)) * LINE
    ptrs = matrix_ptr + outputs[:, None] * INPUTS + columns[None, :]
    mask = (outputs < OUTPUTS)[:, None] & (columns < INPUTS)[None, :]
    _prefetch_lines(ptrs, mask, _TO_L2)


@triton.jit
def _prefetch_to_stay(ptr, BYTES: tl.constexpr):
    """Start the way of some bytes to the L2 cache, where they stay when others stream through it.

    The programs take lines of 128 bytes in turn. All weights of a mixture come through the cache
    before these are read.
    """
    BLOCK: tl.constexpr = 128
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    for first in range(tl.program_id(0) * BLOCK, BYTES // 128, tl.num_programs(0) * BLOCK):
        lines = first + tl.arange(0, BLOCK)
        _prefetch_lines(ptr + lines.to(tl.int64) * LINE, lines < BYTES // 128, _TO_STAY_IN_L2)


_TO_L2 = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
)
_TO_STAY_IN_L2 = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2::evict_last [$1]; mov.u32 $0, 0; }"
)


@triton.jit
def _prefetch_lines(ptrs, mask, ASSEMBLY: tl.constexpr):
    """Of the lines at `ptrs` those with a true mask."""
    tl.inline_asm_elementwise(
        ASSEMBLY, "=r,l,r", [ptrs.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _run_of_program(num_tiles):
    """The first tile of this program's run, and the one behind its last."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    return num_tiles * program // num_programs, num_tiles * (program + 1) // num_programs


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up, of halves that are rounded before and behind: see `KernelSet.experts`."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(dtype)
