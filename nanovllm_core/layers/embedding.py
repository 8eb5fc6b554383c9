"""The vocabulary's two matrices, split over ranks by rows: embedding and output head."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import embedding, linear

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.module import Layer, ModelParameter, ShardId, make_parameter


class _VocabParallel(Layer):
    """Rows [first, first + rows) of a [vocab_size, size] matrix.

    All ranks hold as many rows, so that the last one's may end in rows of padding, which are zero.
    """

    def __init__(self, context: LayerContext, vocab_size: int, size: int) -> None:
        super().__init__(context)
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // context.tp.size)
        self.first = context.tp.rank * self.rows
        self.real_rows = min(max(vocab_size - self.first, 0), self.rows)

    def _make_weight(self, size: int) -> ModelParameter:
        shape, full_shape = (self.rows, size), (self.vocab_size, size)
        weight = make_parameter(self.context, shape, self._load, {None: full_shape})
        weight[self.real_rows :].zero_()
        return weight

    def _load(self, param: ModelParameter, tensor: Tensor, shard_id: ShardId) -> None:
        param[: self.real_rows].copy_(tensor[self.first : self.first + self.real_rows])


class VocabParallelEmbedding(_VocabParallel):
    """Token ids int32 or int64 [T] -> [T, size]. An id belongs to one rank; the others add zero."""

    def __init__(self, context: LayerContext, vocab_size: int, size: int) -> None:
        super().__init__(context, vocab_size, size)
        self.weight = self._make_weight(size)

    def forward(self, input_ids_T: Tensor) -> Tensor:
        """Ids below `vocab_size` [T] -> rows of the matrix [T, size], whole on every rank."""
        tp = self.context.tp
        if tp.size == 1:
            return self.context.kernels.embed(input_ids_T, self.weight)
        local_T = input_ids_T - self.first
        elsewhere_T = (local_T < 0) | (local_T >= self.rows)
        out_TE = embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return tp.all_reduce(out_TE.masked_fill(elsewhere_T.unsqueeze(-1), 0))


class ParallelLMHead(_VocabParallel):
    """Hidden states [T, size] -> logits [T, vocab_size], whole on every rank.

    With `tied_to`, it shares that embedding's weight, and the checkpoint has none for it.
    """

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        size: int,
        *,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(context, vocab_size, size)
        if tied_to is not None and tied_to.vocab_size != vocab_size:
            raise ArchitectureError(
                f"the head's vocabulary ({vocab_size}) is not that of the embedding it is tied to "
                f"({tied_to.vocab_size}); set tie_word_embeddings to false"
            )
        self.weight = self._make_weight(size) if tied_to is None else tied_to.weight

    def forward(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        """Hidden states [T, size] -> logits [T, vocab_size].

        `out_TV`: where the logits go; captured graphs share one buffer instead of one each.
        """
        if self.context.tp.size == 1:
            return self.context.kernels.linear(hidden_TE, self.weight, out_TV)
        gathered_TV = self.context.tp.all_gather(linear(hidden_TE, self.weight))
        logits_TV = gathered_TV[:, : self.vocab_size]
        return logits_TV if out_TV is None else out_TV.copy_(logits_TV)
