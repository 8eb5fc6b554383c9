"""Linear layers split over the ranks of a tensor-parallel group (Megatron-LM, arXiv:1909.08053).

A column-parallel layer splits its outputs and needs no communication; the row-parallel layer behind
it splits its inputs and sums the ranks' results. Weights are [out, in], as in checkpoints.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm_core.interfaces.model import heads_per_rank
from nanovllm_core.interfaces.parallel import NormingParallel, TensorParallel
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.matrix import Piece, Pieces, make_split_parameter
from nanovllm_core.layers.module import Layer, ShardId, make_parameter
from nanovllm_core.layers.norm import RMSNorm


def _even_piece(context: LayerContext, full_size: int, what: str) -> Piece:
    size = context.share(full_size, what)
    return Piece(size, context.tp.rank * size, full_size)


class SumOverRanks:
    """The sum at the end of a block, and the norm that reads it next, if the block was told.

    A group that can norms the sum where it sums, and so does a kernel set of one rank: see
    `announce_norm`.
    """

    def __init__(self, tp: TensorParallel) -> None:
        self.tp = tp
        self.norm: RMSNorm | None = None
        self._norming = tp if isinstance(tp, NormingParallel) else None

    def add_to(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """The residual plus the sum of x. The residual is overwritten: use what is returned."""
        norm, norming = self.norm, self._norming
        if norm is not None and norming is not None:
            fused = norming.all_reduce_add_norm(x_TE, residual_TE, norm.factors, norm.eps)
            if fused is not None:
                norm.put(*fused)
                return fused[0]
        return self.tp.all_reduce_add(x_TE, residual_TE)


class ColumnParallelLinear(Layer):
    """x W^T + b with the rows of W, the outputs, split over ranks: [T, in] -> [T, out / ranks]."""

    def __init__(
        self, context: LayerContext, input_size: int, output_size: int, *, bias: bool = False
    ) -> None:
        piece = _even_piece(context, output_size, "output size")
        self._build(context, input_size, {None: piece}, bias)

    def _build(self, context: LayerContext, input_size: int, outputs: Pieces, bias: bool) -> None:
        super().__init__(context)
        self.matrix = context.make_matrix(self, outputs, Piece(input_size, 0, input_size))
        self.bias = make_split_parameter(context, outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> this rank's outputs [T, out / ranks], in the dtype of the weight."""
        return self.matrix.linear(x, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input as one GEMM; shards are numbered 0, 1, …

    The result holds this rank's part of each, side by side.
    """

    def __init__(
        self,
        context: LayerContext,
        input_size: int,
        output_sizes: tuple[int, ...],
        *,
        bias: bool = False,
    ) -> None:
        outputs: dict[ShardId, Piece] = {
            shard: _even_piece(context, output_size, f"output size {shard}")
            for shard, output_size in enumerate(output_sizes)
        }
        self._build(context, input_size, outputs, bias)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections as one GEMM; shards "q", "k", "v", split by heads.

    `num_heads` and `num_kv_heads` of the layer are this rank's. With fewer KV heads than ranks,
    neighbouring ranks hold the same KV head, the one their query heads belong to.
    """

    def __init__(
        self,
        context: LayerContext,
        input_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        bias: bool = False,
    ) -> None:
        tp = context.tp
        q_heads, kv_heads = heads_per_rank(num_heads, num_kv_heads, tp.size)
        first_kv_head = tp.rank * num_kv_heads // tp.size
        q_size, kv_size = q_heads * head_size, kv_heads * head_size
        q = Piece(q_size, tp.rank * q_size, num_heads * head_size)
        kv = Piece(kv_size, first_kv_head * head_size, num_kv_heads * head_size)
        self._build(context, input_size, {"q": q, "k": kv, "v": kv}, bias)
        self.num_heads, self.num_kv_heads, self.head_size = q_heads, kv_heads, head_size


class RowParallelLinear(Layer):
    """x W^T + b with the columns of W, the inputs, split over ranks: [T, in / ranks] -> [T, out].

    The ranks' products are summed; the first rank's has the bias in it.
    """

    def __init__(
        self, context: LayerContext, input_size: int, output_size: int, *, bias: bool = False
    ) -> None:
        super().__init__(context)
        outputs: Pieces = {None: Piece(output_size, 0, output_size)}
        inputs = _even_piece(context, input_size, "input size")
        self.matrix = context.make_matrix(self, outputs, inputs)
        self.bias = make_parameter(context, (output_size,)) if bias else None
        self.sum = SumOverRanks(context.tp)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's inputs [T, in / ranks] -> the sum over ranks [T, out], whole on each."""
        return self.context.tp.all_reduce(self._part(x))

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x W^T + b. The residual is overwritten: use only what is returned."""
        if self.context.tp.size > 1:
            return self.sum.add_to(self._part(x), residual)
        norm = self.sum.norm
        if norm is not None:
            fused = self.matrix.linear_add_norm(x, residual, norm.factors, norm.eps, self.bias)
            if fused is not None:
                norm.put(*fused)
                return fused[0]
        return self.matrix.linear_add(x, residual, self.bias)

    def _part(self, x: Tensor) -> Tensor:
        return self.matrix.linear(x, self.bias if self.context.tp.rank == 0 else None)
