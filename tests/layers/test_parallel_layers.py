"""A layer and its loader, split over simulated ranks, equals the unsplit layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from nanovllm_core.api import Routing
from nanovllm_core.errors import ArchitectureError
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    ColumnParallelLinear,
    LayerContext,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    SingleRank,
    SparseMLP,
    TensorParallel,
    VocabParallelEmbedding,
    gated_mlp,
    heads_per_rank,
    linear_add,
    norm_linear,
    vocab_per_rank,
)
from nanovllm_core.layers.module import Layer, ModelParameter, finalize_layers
from nanovllm_kit.kernel_watch import KernelWatch
from nanovllm_kit.numerics import assert_close_report
from nanovllm_kit.ranks import run_ranks

CPU = torch.device("cpu")
RANKS = [1, 2, 4]


def context(tp: TensorParallel) -> LayerContext:
    return LayerContext(CPU, torch.float32, tp, TorchKernels())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(layer: Layer, seed: int = 1) -> list[Tensor]:
    """Load whole checkpoint tensors, the same on every rank, into each parameter; return them."""
    tensors = []
    for parameter in layer.parameters():
        assert isinstance(parameter, ModelParameter)
        parameter.fill_(float("nan"))  # whatever is not loaded spoils the result
        for shard_id, shape in parameter.shard_shapes.items():
            seed += 1
            tensors.append(random(*shape, seed=seed))
            parameter.weight_loader(parameter, tensors[-1], shard_id)
    return tensors


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_column_parallel_linear_splits_its_outputs(size: int, bias: bool) -> None:
    """The ranks' results, side by side, are x W^T + b."""
    x_TE = random(3, 8)

    def on_rank(tp: TensorParallel) -> tuple[Tensor, list[Tensor]]:
        layer = ColumnParallelLinear(context(tp), 8, 12, bias=bias)
        tensors = fill(layer)
        return layer(x_TE), tensors

    results = run_ranks(size, on_rank)
    weight, *rest = results[0][1]
    expected = x_TE @ weight.T + (rest[0] if bias else 0)
    assert_close_report(torch.cat([out for out, _ in results], dim=-1), expected, rel_norm=1e-6)


@pytest.mark.parametrize("size", RANKS)
def test_a_merged_linear_splits_each_of_its_outputs(size: int) -> None:
    """Each rank holds its part of gate beside its part of up."""
    x_TE = random(3, 8)

    def on_rank(tp: TensorParallel) -> tuple[Tensor, list[Tensor]]:
        layer = MergedColumnParallelLinear(context(tp), 8, (12, 4), bias=True)
        return layer(x_TE) if fill(layer) else x_TE, fill(layer)

    results = run_ranks(size, on_rank)
    gate_weight, up_weight, gate_bias, up_bias = results[0][1]
    parts = [torch.split(out, [12 // size, 4 // size], dim=-1) for out, _ in results]
    gate, up = (torch.cat([part[i] for part in parts], dim=-1) for i in (0, 1))
    assert_close_report(gate, x_TE @ gate_weight.T + gate_bias, rel_norm=1e-6)
    assert_close_report(up, x_TE @ up_weight.T + up_bias, rel_norm=1e-6)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_qkv_replicates_kv_heads_where_there_are_fewer_than_ranks(
    size: int, num_kv_heads: int
) -> None:
    """Each rank holds the KV heads that its query heads belong to (bug 16 of the peers)."""
    head_size, num_heads = 4, 8
    x_TE = random(3, 8)

    def on_rank(tp: TensorParallel) -> tuple[Tensor, int, int, list[Tensor]]:
        layer = QKVParallelLinear(context(tp), 8, num_heads, num_kv_heads, head_size, bias=True)
        tensors = fill(layer)
        return layer(x_TE), layer.num_heads, layer.num_kv_heads, tensors

    results = run_ranks(size, on_rank)
    weights, biases = results[0][3][:3], results[0][3][3:]
    q, k, v = (
        (x_TE @ weight.T + bias).view(3, -1, head_size)
        for weight, bias in zip(weights, biases, strict=True)
    )
    group = num_heads // num_kv_heads
    for rank, (out, local_heads, local_kv_heads, _) in enumerate(results):
        assert (local_heads, local_kv_heads) == heads_per_rank(num_heads, num_kv_heads, size)
        heads = out.view(3, -1, head_size)
        first = rank * local_heads
        assert_close_report(
            heads[:, :local_heads], q[:, first : first + local_heads], rel_norm=1e-6
        )
        needed = slice(first // group, (first + local_heads - 1) // group + 1)
        kv = heads[:, local_heads:].chunk(2, dim=1)
        assert_close_report(kv[0], k[:, needed], rel_norm=1e-6)
        assert_close_report(kv[1], v[:, needed], rel_norm=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_the_sum_of_a_kernel_set_is_what_it_returns(bias: bool) -> None:
    """A set may give new memory: the contract promises nothing about the residual's."""

    class NewMemory(TorchKernels):
        def linear_add(
            self,
            x_TF: Tensor,
            weight_EF: Tensor,
            residual_TE: Tensor,
            bias_E: Tensor | None = None,
        ) -> Tensor:
            return super().linear_add(x_TF, weight_EF, residual_TE.clone(), bias_E)

    layer = RowParallelLinear(
        LayerContext(CPU, torch.float32, SingleRank(), NewMemory()), 8, 6, bias=bias
    )
    fill(layer)
    x_TF, residual_TE = random(3, 8), random(3, 6, seed=9)
    expected = residual_TE + layer(x_TF)
    assert_close_report(linear_add(x_TF, layer, residual_TE), expected, rel_norm=1e-6)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_parallel_linear_adds_its_bias_once(size: int, bias: bool) -> None:
    """On every rank, x W^T + b, and the residual variant adds it in place (bug 16 of the peers)."""
    x_TF, residual = random(3, 8), random(3, 6, seed=9)

    def on_rank(tp: TensorParallel) -> tuple[Tensor, Tensor, bool, list[Tensor]]:
        layer = RowParallelLinear(context(tp), 8, 6, bias=bias)
        tensors = fill(layer)
        part = x_TF.chunk(size, dim=-1)[tp.rank]
        stream = residual.clone()
        added = linear_add(part, layer, stream)
        return layer(part), added, added.data_ptr() == stream.data_ptr(), tensors

    for out, added, in_place, (weight, *rest) in run_ranks(size, on_rank):
        expected = x_TF @ weight.T + (rest[0] if bias else 0)
        assert_close_report(out, expected, rel_norm=1e-6)
        assert_close_report(added, residual + expected, rel_norm=1e-6)
        assert in_place


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("vocab_size", [16, 13, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_split_the_vocabulary(size: int, vocab_size: int, tied: bool) -> None:
    """Also one that the ranks do not divide, down to a rank with nothing but padding.

    The head gathers the logits of all ranks, or gives a rank its own.
    """
    ids_T = torch.arange(vocab_size, dtype=torch.int32)
    hidden_TE = random(3, 8)

    def on_rank(tp: TensorParallel) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        embedding = VocabParallelEmbedding(context(tp), vocab_size, 8)
        head = ParallelLMHead(context(tp), vocab_size, 8, tied_to=embedding if tied else None)
        tensors = fill(embedding, seed=1) + fill(head, seed=1 if tied else 2)
        given = torch.full((3, vocab_size), float("nan"))
        assert head(hidden_TE, given) is given
        own = torch.full((3, vocab_per_rank(vocab_size, size)), float("nan"))
        assert head(hidden_TE, own) is own
        return embedding(ids_T), head(hidden_TE), given, own, tensors

    results = run_ranks(size, on_rank)
    side_by_side = torch.cat([own for *_, own, _ in results], dim=1)
    assert not side_by_side[:, vocab_size:].any()
    for embedded, logits, given, _, (table, head_weight) in results:
        assert_close_report(embedded, table, rel_norm=1e-6)
        assert_close_report(logits, hidden_TE @ head_weight.T, rel_norm=1e-6)
        assert torch.equal(given, logits)
        assert torch.equal(side_by_side[:, :vocab_size], logits)


@pytest.mark.parametrize("size", RANKS)
def test_block_operations_equal_their_formulas(size: int) -> None:
    """norm_linear and gated_mlp, whatever is fused behind them."""
    x_TE = random(3, 8)

    def on_rank(tp: TensorParallel) -> tuple[Tensor, Tensor, list[Tensor]]:
        here = context(tp)
        norm, down = RMSNorm(here, 8, 1e-6), RowParallelLinear(here, 12, 8)
        gate_up = MergedColumnParallelLinear(here, 8, (12, 12))
        tensors = fill(norm) + fill(gate_up) + fill(down)
        projected = norm_linear(x_TE, norm, gate_up)
        return projected, gated_mlp(x_TE.clone(), norm, gate_up, down), tensors

    results = run_ranks(size, on_rank)
    norm_weight, gate, up, down = results[0][2]
    normed = x_TE / (x_TE.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight
    hidden = torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)
    for projected, out, _ in results:
        assert projected.shape == (3, 24 // size)
        assert_close_report(out, x_TE + hidden @ down.T, rel_norm=1e-6)


class FusedRank(SingleRank):
    """One of two ranks, with one kernel for the sum and the residual."""

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("the residual would take a kernel of its own")

    def all_reduce_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(x)


def test_blocks_leave_their_residual_to_the_all_reduce() -> None:
    """Dense MLPs and mixtures."""
    here = context(FusedRank(size=2))
    norm, x_TE = RMSNorm(here, 8, 1e-6), torch.ones(3, 8)
    gate_up = MergedColumnParallelLinear(here, 8, (12, 12))
    down = RowParallelLinear(here, 12, 8)
    mixture = SparseMLP(here, 8, 12, 4, Routing(top_k=2))
    for layer in (norm, gate_up, down, mixture.gate, mixture.experts):
        fill(layer)
    assert gated_mlp(x_TE, norm, gate_up, down) is x_TE
    assert mixture(x_TE, norm) is x_TE


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_layer_reads_its_matrix_through_the_kernel_set(size: int, bias: bool) -> None:
    """With a bias and without, alone and split, in every block operation."""
    ids_T, x_TE = torch.arange(5), random(5, 8)

    def on_rank(tp: TensorParallel) -> list[str]:
        watch = KernelWatch(TorchKernels())
        here = LayerContext(CPU, torch.float32, tp, watch.kernels)
        embedding, norm = VocabParallelEmbedding(here, 5, 8), RMSNorm(here, 8, 1e-6)
        qkv = QKVParallelLinear(here, 8, 4, 2, 4, bias=bias)
        gate_up = MergedColumnParallelLinear(here, 8, (12, 12), bias=bias)
        down = RowParallelLinear(here, 12, 8, bias=bias)
        head = ParallelLMHead(here, 5, 8)
        with watch.over(torch.nn.ModuleList([embedding, norm, qkv, gate_up, down, head])):
            embedding(ids_T)
            qkv(x_TE)
            norm_linear(x_TE, norm, qkv)
            gated_mlp(x_TE.clone(), norm, gate_up, down)
            down(gate_up(x_TE)[:, : 12 // size])
            head(x_TE)
        return watch.found

    assert run_ranks(size, on_rank) == [[]] * size


def test_a_product_outside_the_kernel_set_is_noted() -> None:
    """By the operation and the name of the weight; norms and biases are not matrices."""
    watch, x_TE = KernelWatch(TorchKernels()), random(3, 8)
    layer = ColumnParallelLinear(
        LayerContext(CPU, torch.float32, SingleRank(), watch.kernels), 8, 4, bias=True
    )
    with watch.over(layer):
        layer(x_TE).add_(layer.bias)
        assert not watch.found
        torch.mm(x_TE, layer.weight.t())
        layer.weight[torch.tensor([1])]
    assert watch.found == ["aten.t.default: weight", "aten.mm.default: weight",
                           "aten.index.Tensor: weight"]  # fmt: skip


def test_a_bias_of_a_gated_block_is_added_before_the_activation() -> None:
    here, x_TE = context(SingleRank()), random(3, 8)
    norm, down = RMSNorm(here, 8, 1e-6), RowParallelLinear(here, 12, 8)
    gate_up = MergedColumnParallelLinear(here, 8, (12, 12), bias=True)
    tensors = fill(norm) + fill(gate_up) + fill(down)
    norm_weight, gate, up, gate_bias, up_bias, down_weight = tensors
    normed = x_TE / (x_TE.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight
    hidden = silu(normed @ gate.T + gate_bias) * (normed @ up.T + up_bias)
    out = gated_mlp(x_TE.clone(), norm, gate_up, down)
    assert_close_report(out, x_TE + hidden @ down_weight.T, rel_norm=1e-6)


def test_norm_linear_leaves_its_input_as_it_is() -> None:
    """The residual stream is still needed."""
    here, x_TE = context(SingleRank()), random(3, 8)
    before = x_TE.clone()
    norm, linear = RMSNorm(here, 8, 1e-6), ColumnParallelLinear(here, 8, 4)
    fill(norm)
    fill(linear)
    norm_linear(x_TE, norm, linear)
    assert torch.equal(x_TE, before)


SPLITS: dict[str, Callable[[LayerContext], object]] = {
    r"output size \(9\).*tensor_parallel_size \(2\)": lambda c: ColumnParallelLinear(c, 8, 9),
    r"output size 1 \(9\)": lambda c: MergedColumnParallelLinear(c, 8, (8, 9)),
    r"input size \(9\)": lambda c: RowParallelLinear(c, 9, 8),
    r"tensor_parallel_size \(2\).*num_attention_heads \(3\)": lambda c: QKVParallelLinear(
        c, 8, 3, 3, 4
    ),
    r"num_attention_heads \(8\).*num_key_value_heads \(3\)": lambda c: QKVParallelLinear(
        c, 8, 8, 3, 4
    ),
    r"tensor_parallel_size \(2\).*num_key_value_heads \(3\) or be": lambda c: QKVParallelLinear(
        c, 8, 6, 3, 4
    ),
}


@pytest.mark.parametrize("message", SPLITS)
def test_sizes_that_cannot_be_split_evenly_are_refused(message: str) -> None:
    """The error names the value and the tensor-parallel size."""
    with pytest.raises(ArchitectureError, match=message):
        run_ranks(2, lambda tp: SPLITS[message](context(tp)))


def test_a_head_tied_to_another_vocabulary_is_refused() -> None:
    """The tied weight would have too many or too few rows."""
    embedding = VocabParallelEmbedding(context(SingleRank()), 8, 4)
    with pytest.raises(ArchitectureError, match=r"\(9\).*\(8\).*tie_word_embeddings"):
        ParallelLMHead(context(SingleRank()), 9, 4, tied_to=embedding)


def test_finalize_reaches_every_layer_once() -> None:
    """A layer may repack its weights there."""
    calls: list[str] = []

    class Recording(RMSNorm):
        def finalize(self) -> None:
            calls.append("finalized")

    here = context(SingleRank())
    finalize_layers(torch.nn.ModuleList([Recording(here, 4, 1e-6), RMSNorm(here, 4, 1e-6)]))
    assert calls == ["finalized"]
