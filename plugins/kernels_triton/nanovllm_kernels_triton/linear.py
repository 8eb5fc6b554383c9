"""Matrix products for few rows, where the time is that of streaming the weight once.

Two kernels, each with an optional bias, and residual sum or gated activation, behind the product.
`vector_linear_kernel` holds whole weight rows in registers, and norms its rows itself where asked:
right for one row or two. `tile_linear_kernel` runs on the tensor cores, with the wider of the tile
and x as the first operand: right for up to 64 rows. Between the two is `few_rows_kernel`, in Gluon.
Which is used where is `linear_choice`'s decision.

Shapes: x [rows, INPUTS], weight [OUTPUTS, INPUTS], bias [OUTPUTS]; GATED: weight and bias of
2·OUTPUTS rows, the gate's first. BLOCK_N counts weight rows: a gated program holds as many of the
gate as of up. The activation is SiLU, or with GELU that one. A bias is added before the one
rounding.

DEPENDENT: see `nanovllm_core.kernels.launch_options`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_core.api import InconsistentStateError
from nanovllm_core.kernels import cdiv, launch_options, next_power_of_2
from nanovllm_kernels_triton.few_rows import run_few_rows
from nanovllm_kernels_triton.linear_choice import FewRowsPlan, LinearPlan, TilePlan, VectorPlan
from nanovllm_kernels_triton.strides import in_units

_MAX_SPLIT_TILES = 1024
LARGE_BYTES = tl.constexpr(2**24)
"""Of a weight that leaves the L2 cache first. On an H100 the products of a layer at one row took
1 % less so of Qwen3-1.7B, and 0.5 % less of 8B and 32B; those of 0.6B, of 12 MiB at most, 3 % more.
"""


@triton.jit
def vector_linear_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, out_stride,
    EPS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """BLOCK_N weight rows per program, whole: every load is in flight at once.

    A row is loaded as BLOCK_K inputs and REST more, or none, which hold all of it. ADD: `out_ptr`
    holds the residual, which is summed before the one rounding. A large weight leaves the L2 cache
    first: it will not be there when the next step reads it.
    """
    ROWS_OF_WEIGHT: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    ITEM_BITS: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth
    IS_LARGE: tl.constexpr = ROWS_OF_WEIGHT * INPUTS * ITEM_BITS // 8 >= LARGE_BYTES
    POLICY: tl.constexpr = "evict_first" if IS_LARGE else ""
    if DEPENDENT:
        gdc_launch_dependents()
    weight_ptrs, exists = _weight_rows(weight_ptr, BLOCK_N, OUTPUTS, INPUTS, GATED)
    weight = _columns_of(weight_ptrs, exists, 0, BLOCK_K, INPUTS, POLICY)
    if REST > 0:
        weight_rest = _columns_of(weight_ptrs, exists, BLOCK_K, REST, INPUTS, POLICY)
    if norm_weight_ptr is not None:
        norm_weight = _part_of(norm_weight_ptr, 0, BLOCK_K, INPUTS)
        if REST > 0:
            norm_weight_rest = _part_of(norm_weight_ptr, BLOCK_K, REST, INPUTS)
    if bias_ptr is not None:
        bias = _bias_of(bias_ptr, BLOCK_N, OUTPUTS, GATED)
    tl.debug_barrier()  # or the compiler would put off loads until others have been used
    if DEPENDENT:
        gdc_wait()
    for row in tl.static_range(ROWS):
        rows = row + tl.arange(0, 1)
        out_ptrs, mask = _outputs(out_ptr, rows, ROWS, out_stride, BLOCK_N, OUTPUTS, GATED)
        if ADD:
            residual = tl.load(out_ptrs, mask=mask, other=0.0)
        x = _part_of(x_ptr + row * x_stride, 0, BLOCK_K, INPUTS)
        if REST > 0:
            x_rest = _part_of(x_ptr + row * x_stride, BLOCK_K, REST, INPUTS)
        if norm_weight_ptr is not None:
            square = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=0)
            if REST > 0:
                square += tl.sum(x_rest.to(tl.float32) * x_rest.to(tl.float32), axis=0)
            scale = tl.rsqrt(square / INPUTS + EPS)
            x = normed(x, scale, norm_weight)
            if REST > 0:
                x_rest = normed(x_rest, scale, norm_weight_rest)
        y = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], axis=1, keep_dims=True)
        if REST > 0:
            products = weight_rest.to(tl.float32) * x_rest.to(tl.float32)[None, :]
            y += tl.sum(products, axis=1, keep_dims=True)
        if bias_ptr is not None:
            y += bias[:, None]
        if ADD:
            y += residual.to(tl.float32)
        _store(out_ptrs, y, mask, GATED, GELU)


@triton.jit(do_not_specialize=["num_rows"])
def tile_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
    num_rows, x_stride, out_stride,
    X_UNIT: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_N weight rows by one of SPLITS parts of the inputs; num_rows <= BLOCK_M.

    Parts differ by one step of BLOCK_K at most. `x_stride` is in units of X_UNIT numbers, see
    `in_units`.

    With SPLITS > 1, the last program of a tile to finish sums all parts in the order of the inputs,
    whoever is last, so that equal inputs give equal bits. `tickets_ptr` int32 [tiles] counts
    finished parts; zero before, zero after. Without tickets the parts are what is asked for:
    `partial_ptr` [SPLITS, num_rows, OUTPUTS] float32, without the bias, and `out_ptr` is not
    written.
    """
    STEPS: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    ROWS_FIRST: tl.constexpr = BLOCK_M > BLOCK_N  # Hopper's wide product takes a first one of 64
    first = tl.program_id(1) * STEPS // SPLITS
    end = (tl.program_id(1) + 1) * STEPS // SPLITS
    weight_ptrs, exists = _weight_rows(weight_ptr, BLOCK_N, OUTPUTS, INPUTS, GATED)
    if bias_ptr is not None:
        bias = _bias_of(bias_ptr, BLOCK_N, OUTPUTS, GATED)
    if DEPENDENT:
        gdc_wait()
    rows = tl.arange(0, BLOCK_M)
    row_ptrs = x_ptr + rows * (x_stride * X_UNIT)
    live = rows < num_rows
    out_ptrs, out_mask = _outputs(out_ptr, rows, num_rows, out_stride, BLOCK_N, OUTPUTS, GATED)
    if ADD:
        residual = tl.load(out_ptrs, mask=out_mask, other=0.0)

    y = tl.zeros((BLOCK_M, BLOCK_N) if ROWS_FIRST else (BLOCK_N, BLOCK_M), tl.float32)
    for step in range(end - first):
        columns = (first + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = columns < INPUTS
        mask = exists[:, None] & inside[None, :]
        weight = tl.load(weight_ptrs[:, None] + columns[None, :], mask=mask, other=0.0)
        mask = live[:, None] & inside[None, :]
        x = tl.load(row_ptrs[:, None] + columns[None, :], mask=mask, other=0.0)
        if ROWS_FIRST:
            y = tl.dot(x, tl.trans(weight), y, input_precision="ieee")
        else:
            y = tl.dot(weight, tl.trans(x), y, input_precision="ieee")
    if DEPENDENT:  # not earlier: programs that wait here would only be in the loop's way
        gdc_launch_dependents()
    if ROWS_FIRST:
        y = tl.trans(y)

    if SPLITS == 1:
        if bias_ptr is not None:
            y += bias[:, None]
        if ADD:
            y += residual.to(tl.float32)
        _store(out_ptrs, y, out_mask, GATED, GELU)
    elif tickets_ptr is None:
        part_ptr = partial_ptr + tl.program_id(1) * num_rows * OUTPUTS
        ptrs, mask = _outputs(part_ptr, rows, num_rows, OUTPUTS, BLOCK_N, OUTPUTS, GATED)
        tl.store(ptrs, y, mask=mask)
    else:
        tile = tl.program_id(0)
        part_ptrs = partial_ptr + tile * SPLITS * BLOCK_N * BLOCK_M
        part_ptrs += tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + rows[None, :]
        tl.store(part_ptrs + tl.program_id(1) * BLOCK_N * BLOCK_M, y)
        tl.debug_barrier()  # the whole part is written before its ticket is drawn
        if tl.atomic_add(tickets_ptr + tile, 1) == SPLITS - 1:
            y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in tl.static_range(SPLITS):
                y += tl.load(part_ptrs + part * BLOCK_N * BLOCK_M, cache_modifier=".cg")
            if bias_ptr is not None:
                y += bias[:, None]
            if ADD:
                y += residual.to(tl.float32)
            _store(out_ptrs, y, out_mask, GATED, GELU)
            tl.store(tickets_ptr + tile, 0)


@triton.jit
def _weight_rows(
    weight_ptr, BLOCK_N: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Where each weight row of this program begins, and whether there is one."""
    index = tl.arange(0, BLOCK_N)
    SPAN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    offset = (index % SPAN) * INPUTS + (index // SPAN) * (OUTPUTS * INPUTS)
    first = tl.program_id(0) * SPAN
    return weight_ptr + first.to(tl.int64) * INPUTS + offset, first + index % SPAN < OUTPUTS


@triton.jit
def _bias_of(bias_ptr, BLOCK_N: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """What is added to this program's outputs, float32 [BLOCK_N]."""
    index = tl.arange(0, BLOCK_N)
    SPAN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    output = tl.program_id(0) * SPAN + index % SPAN
    ptrs = bias_ptr + output + (index // SPAN) * OUTPUTS
    return tl.load(ptrs, mask=output < OUTPUTS, other=0.0).to(tl.float32)


@triton.jit
def _columns_of(
    row_ptrs, exists, FIRST: tl.constexpr, SIZE: tl.constexpr, INPUTS: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """SIZE numbers of each row [rows, SIZE], zeros beyond INPUTS and where there is no row."""
    columns = FIRST + tl.arange(0, SIZE)
    mask = exists[:, None]
    if FIRST + SIZE > INPUTS:
        mask = mask & (columns < INPUTS)[None, :]
    ptrs = row_ptrs[:, None] + columns[None, :]
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def _part_of(row_ptr, FIRST: tl.constexpr, SIZE: tl.constexpr, INPUTS: tl.constexpr):
    """SIZE numbers of a row, zeros beyond INPUTS."""
    columns = FIRST + tl.arange(0, SIZE)
    return tl.load(row_ptr + columns, mask=columns < INPUTS, other=0.0)


@triton.jit
def normed(x, scale, norm_weight):
    """Scaled and rounded, then weighted and rounded: the two roundings of `KernelSet.rms_norm`."""
    scaled = x.to(tl.float32) * scale
    if norm_weight.dtype == x.dtype:
        scaled = scaled.to(x.dtype).to(tl.float32)
    return (scaled * norm_weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _outputs(
    out_ptr, rows, num_rows, out_stride,
    BLOCK_N: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Where this program's outputs go [BLOCK_N (half of it if GATED), len(rows)], and a mask."""
    SPAN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    outputs = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    mask = (outputs < OUTPUTS)[:, None] & (rows < num_rows)[None, :]
    return out_ptr + rows[None, :] * out_stride + outputs[:, None], mask


@triton.jit
def _store(out_ptrs, y, mask, GATED: tl.constexpr, GELU: tl.constexpr):
    """Activate, round and store. Gate and up are rounded, as where they pass between kernels."""
    dtype: tl.constexpr = out_ptrs.dtype.element_ty
    if GATED:
        halves = tl.reshape(y.to(dtype).to(tl.float32), (2, y.shape[0] // 2, y.shape[1]))
        gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
        y = activated(gate, GELU) * up
    tl.store(out_ptrs, y.to(dtype), mask=mask)


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """gate times the sigmoid of itself (SiLU), or of a polynomial of itself (GELU by tanh).

    (1 + tanh(z)) / 2 is the sigmoid of 2z, and z is sqrt(2 / pi) (gate + 0.044715 gate^3).
    """
    z = gate
    if GELU:
        z = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    return gate / (1.0 + tl.exp(-z))


class LinearLauncher:
    """Runs a product by its plan, and owns the tickets of split tiles: one per stream of work.

    `dependent_launch` compiles and launches with programmatic dependent launch (sm_90 and newer):
    a kernel starts, and fetches weights, while the one before it ends.
    """

    def __init__(self, *, dependent_launch: bool = False) -> None:
        self.dependent_launch = dependent_launch
        self._tickets: Tensor | None = None

    def allocate(self, device: torch.device) -> Tensor:
        """Make the tickets; without this the first kernel that draws some does, not captured."""
        self._tickets = tickets = torch.zeros(_MAX_SPLIT_TILES, dtype=torch.int32, device=device)
        return tickets

    def tickets(self, device: torch.device) -> Tensor:
        """Zeros, which every kernel that draws some of them leaves as zeros again."""
        if self._tickets is not None:
            return self._tickets
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InconsistentStateError(
                "the first kernel of a launcher that draws tickets allocates them and cannot be "
                "captured; call allocate before the capture"
            )
        return self.allocate(device)

    def run(
        self,
        plan: LinearPlan,
        x_TK: Tensor,
        weight_NK: Tensor,
        *,
        norm_weight_K: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        gelu: bool = False,
        bias_N: Tensor | None = None,
        residual_TN: Tensor | None = None,
        out_TN: Tensor | None = None,
    ) -> Tensor:
        """x W^T + b into `out_TN`, or `residual_TN`, which the sum overwrites, or a new tensor.

        Weight and bias are contiguous and on x's device; a plan is for the rows that `choose` was
        told.
        """
        outputs = weight_NK.shape[0] // 2 if gated else weight_NK.shape[0]
        out = out_TN if residual_TN is None else residual_TN
        if out is None:
            out = x_TK.new_empty((x_TK.shape[0], outputs))
        tiles = cdiv(outputs, plan.block_n // 2 if gated else plan.block_n)
        kind = {"GATED": gated, "GELU": gelu, "ADD": residual_TN is not None}
        if isinstance(plan, VectorPlan):
            padded = next_power_of_2(weight_NK.shape[1])
            vector_linear_kernel[(tiles,)](
                x_TK, norm_weight_K, weight_NK, bias_N, out, x_TK.stride(0), out.stride(0),
                EPS=eps,
                ROWS=x_TK.shape[0],
                OUTPUTS=outputs,
                INPUTS=weight_NK.shape[1],
                BLOCK_N=plan.block_n,
                BLOCK_K=padded // 2 if plan.rest else padded,
                REST=plan.rest,
                num_warps=plan.num_warps,
                **kind, **launch_options(self.dependent_launch),
            )  # fmt: skip
            return out
        if norm_weight_K is not None:
            raise ValueError(f"a {type(plan).__name__} takes rows that are normed already")
        if isinstance(plan, FewRowsPlan):
            options = launch_options(self.dependent_launch)
            run_few_rows(plan, x_TK, weight_NK, bias_N, out, **kind, **options)
        else:
            buffers = self._split_buffers(plan, tiles, _block_m(x_TK), out)
            self._launch_tiles(plan, tiles, x_TK, weight_NK, bias_N, out, outputs, buffers, kind)
        return out

    def run_parts(self, plan: TilePlan, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        """The parts of x W^T [splits, T, N] in float32, whose sum in this order is the product."""
        outputs = weight_NK.shape[0]
        parts_STN = x_TK.new_empty((plan.splits, len(x_TK), outputs), dtype=torch.float32)
        tiles = cdiv(outputs, plan.block_n)
        self._launch_tiles(
            plan, tiles, x_TK, weight_NK, None, x_TK, outputs, (parts_STN, None),
            {"GATED": False, "GELU": False, "ADD": False},
        )  # fmt: skip
        return parts_STN

    def _launch_tiles(
        self, plan: TilePlan, tiles: int, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None,
        out: Tensor, outputs: int, buffers: tuple[Tensor | None, Tensor | None],
        kind: dict[str, bool],
    ) -> None:  # fmt: skip
        """See `tile_linear_kernel`; without tickets `out` is not written, and may be any tensor."""
        x_units, x_unit = in_units(x_TK.stride(0))
        tile_linear_kernel[(tiles, plan.splits)](
            x_TK, weight_NK, bias_N, out, *buffers,
            x_TK.shape[0], x_units, out.stride(0),
            X_UNIT=x_unit,
            OUTPUTS=outputs,
            INPUTS=weight_NK.shape[1],
            BLOCK_M=_block_m(x_TK),
            BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k,
            SPLITS=plan.splits,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
            **kind, **launch_options(self.dependent_launch),
        )  # fmt: skip

    def _split_buffers(
        self, plan: TilePlan, tiles: int, block_m: int, out: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """(parts, tickets). The tickets outlive every captured graph; all calls share them."""
        if plan.splits == 1:
            return None, None
        if tiles > _MAX_SPLIT_TILES:
            raise ValueError(f"{tiles} tiles cannot be split, only up to {_MAX_SPLIT_TILES}")
        size = tiles * plan.splits * plan.block_n * block_m
        return out.new_empty(size, dtype=torch.float32), self.tickets(out.device)


def _block_m(x_TK: Tensor) -> int:
    """The rows of a tile of x, 16 at least."""
    return max(16, next_power_of_2(x_TK.shape[0]))
