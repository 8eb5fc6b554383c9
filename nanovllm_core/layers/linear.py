"""Linear layers split over the ranks of a tensor-parallel group (Megatron-LM, arXiv:1909.08053).

A column-parallel layer splits its outputs and needs no communication; the row-parallel layer behind
it splits its inputs and sums the ranks' results. Weights are [out, in], as in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.module import Layer, ModelParameter, ShardId, make_parameter


@dataclass(frozen=True, slots=True)
class _Piece:
    """One shard of a packed layer: rows [start, start + size) here are rows [source, …) there."""

    start: int
    size: int
    source: int
    full_size: int


class ColumnParallelLinear(Layer):
    """x W^T + b with the rows of W, the outputs, split over ranks: [T, in] -> [T, out / ranks]."""

    def __init__(
        self, context: LayerContext, input_size: int, output_size: int, *, bias: bool = False
    ) -> None:
        size = context.share(output_size, "output size")
        piece = _Piece(0, size, context.tp.rank * size, output_size)
        self._build(context, input_size, {None: piece}, bias)

    def _build(
        self, context: LayerContext, input_size: int, pieces: Mapping[ShardId, _Piece], bias: bool
    ) -> None:
        super().__init__(context)
        self.pieces = pieces
        rows = sum(piece.size for piece in pieces.values())
        self.weight = make_parameter(
            context,
            (rows, input_size),
            self._load,
            {shard: (piece.full_size, input_size) for shard, piece in pieces.items()},
        )
        self.bias: ModelParameter | None = None
        if bias:
            shapes = {shard: (piece.full_size,) for shard, piece in pieces.items()}
            self.bias = make_parameter(context, (rows,), self._load, shapes)

    def _load(self, param: ModelParameter, tensor: Tensor, shard_id: ShardId) -> None:
        piece = self.pieces[shard_id]
        param.narrow(0, piece.start, piece.size).copy_(tensor.narrow(0, piece.source, piece.size))

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> this rank's outputs [T, out / ranks], in the dtype of the weight."""
        return linear(x, self.weight, self.bias)


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
        pieces: dict[ShardId, _Piece] = {}
        start = 0
        for shard, output_size in enumerate(output_sizes):
            size = context.share(output_size, f"output size {shard}")
            pieces[shard] = _Piece(start, size, context.tp.rank * size, output_size)
            start += size
        self._build(context, input_size, pieces, bias)


def heads_per_rank(num_heads: int, num_kv_heads: int, tp_size: int) -> tuple[int, int]:
    """(query heads, KV heads) of each rank. Fewer KV heads than ranks are replicated.

    Raises ArchitectureError for head counts that cannot be shared out evenly.
    """
    if num_heads % num_kv_heads != 0:
        raise ArchitectureError(
            f"num_attention_heads ({num_heads}) must be divisible by num_key_value_heads "
            f"({num_kv_heads}); check the checkpoint's config.json"
        )
    if num_heads % tp_size != 0:
        raise ArchitectureError(
            f"num_attention_heads ({num_heads}) must be divisible by tensor_parallel_size "
            f"({tp_size}); choose a size that divides it"
        )
    if num_kv_heads % tp_size != 0 and tp_size % num_kv_heads != 0:
        raise ArchitectureError(
            f"num_key_value_heads ({num_kv_heads}) must divide tensor_parallel_size ({tp_size}) "
            "or be divisible by it; choose another size"
        )
    return num_heads // tp_size, max(num_kv_heads // tp_size, 1)


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
        kv = (kv_size, first_kv_head * head_size, num_kv_heads * head_size)
        pieces: dict[ShardId, _Piece] = {
            "q": _Piece(0, q_size, tp.rank * q_size, num_heads * head_size),
            "k": _Piece(q_size, *kv),
            "v": _Piece(q_size + kv_size, *kv),
        }
        self._build(context, input_size, pieces, bias)
        self.num_heads, self.num_kv_heads, self.head_size = q_heads, kv_heads, head_size


class RowParallelLinear(Layer):
    """x W^T + b with the columns of W, the inputs, split over ranks: [T, in / ranks] -> [T, out].

    The ranks' products are summed; the bias is added once, after the sum.
    """

    def __init__(
        self, context: LayerContext, input_size: int, output_size: int, *, bias: bool = False
    ) -> None:
        super().__init__(context)
        size = context.share(input_size, "input size")
        self.weight = make_parameter(
            context, (output_size, size), self._load, {None: (output_size, input_size)}
        )
        self.bias: ModelParameter | None = None
        if bias:
            self.bias = make_parameter(context, (output_size,))

    def _load(self, param: ModelParameter, tensor: Tensor, shard_id: ShardId) -> None:
        size = param.shape[1]
        param.copy_(tensor.narrow(1, self.context.tp.rank * size, size))

    def forward(self, x: Tensor) -> Tensor:
        """This rank's inputs [T, in / ranks] -> the sum over ranks [T, out], whole on each."""
        if self.context.tp.size == 1:
            return linear(x, self.weight, self.bias)
        out = self.context.tp.all_reduce(linear(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x W^T + b. The residual is overwritten: use only what is returned."""
        if self.context.tp.size == 1:
            residual = self.context.kernels.linear_add(x, self.weight, residual)
        else:
            residual.add_(self.context.tp.all_reduce(linear(x, self.weight)))
        return residual if self.bias is None else residual.add_(self.bias)
