"""The vocabulary's two matrices, split over ranks by rows: embedding and output head."""

from __future__ import annotations

from torch import Tensor

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.interfaces.model import vocab_per_rank
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.matrix import Piece, Pieces, WeightMatrix
from nanovllm_core.layers.module import Layer


class _VocabParallel(Layer):
    """Rows [first, first + rows) of a [vocab_size, size] matrix.

    All ranks hold as many rows, so that the last one's may end in rows of padding, which are zero.
    """

    def __init__(self, context: LayerContext, vocab_size: int) -> None:
        super().__init__(context)
        self.vocab_size = vocab_size
        self.rows = vocab_per_rank(vocab_size, context.tp.size)
        self.first = context.tp.rank * self.rows

    def _make_matrix(self, size: int) -> WeightMatrix:
        rows: Pieces = {None: Piece(self.rows, self.first, self.vocab_size)}
        return self.context.make_matrix(self, rows, Piece(size, 0, size))


class VocabParallelEmbedding(_VocabParallel):
    """Token ids int32 or int64 [T] -> [T, size]. An id belongs to one rank; the others add zero."""

    def __init__(self, context: LayerContext, vocab_size: int, size: int) -> None:
        super().__init__(context, vocab_size)
        self.matrix = self._make_matrix(size)

    def forward(self, input_ids_T: Tensor) -> Tensor:
        """Ids below `vocab_size` [T] -> rows of the matrix [T, size], whole on every rank."""
        tp = self.context.tp
        if tp.size == 1:
            return self.matrix.embed(input_ids_T)
        local_T = input_ids_T - self.first
        elsewhere_T = (local_T < 0) | (local_T >= self.rows)
        out_TE = self.matrix.embed(local_T.masked_fill_(elsewhere_T, 0))
        return tp.all_reduce(out_TE.masked_fill_(elsewhere_T.unsqueeze(-1), 0))


class ParallelLMHead(_VocabParallel):
    """Hidden states [T, size] -> logits [T, vocab_size], of all ids or of this rank's.

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
        super().__init__(context, vocab_size)
        if tied_to is None:
            self.matrix = self._make_matrix(size)
            return
        if tied_to.vocab_size != vocab_size:
            raise ArchitectureError(
                f"the head's vocabulary ({vocab_size}) is not that of the embedding it is tied to "
                f"({tied_to.vocab_size}); set tie_word_embeddings to false"
            )
        self.matrix = tied_to.matrix
        for name, parameter in tied_to.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        """Hidden states [T, size] -> logits [T, vocab_size], whole on every rank.

        `out_TV`: where the logits go; captured graphs share one buffer instead of one each. Where
        it has `rows` columns it gets this rank's alone, and nothing is gathered.
        """
        gets_own = out_TV is not None and out_TV.shape[1] == self.rows
        if gets_own or self.context.tp.size == 1:
            return self.matrix.linear(hidden_TE, out_TX=out_TV)
        gathered_TV = self.context.tp.all_gather(self.matrix.linear(hidden_TE))
        logits_TV = gathered_TV[:, : self.vocab_size]
        return logits_TV if out_TV is None else out_TV.copy_(logits_TV)
