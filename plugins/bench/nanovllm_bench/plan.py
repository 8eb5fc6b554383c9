"""What a model takes on GPUs that need not be here: memory, sequences, and the floor of decoding.

Shapes, cache groups, blocks and the number of blocks come from the code that a start uses; the
weights are those of the model plugin, built without memory. Workspaces and graphs are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from nanovllm_bench.gpus import Gpu
from nanovllm_bench.rates import build_on_meta, costs_on_rank
from nanovllm_bench.roofline import ModelCosts, decode_step_seconds
from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import ArchitectureError, OutOfMemoryError
from nanovllm_core.interfaces.absorption import most_captured_tokens
from nanovllm_core.interfaces.attention import AttentionRequirements, Phase
from nanovllm_core.interfaces.cache_groups import SequenceNeed
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.layers import (
    ColumnParallelLinear,
    GatedMLP,
    RowParallelLinear,
    SparseMLP,
    VocabParallelEmbedding,
)
from nanovllm_core.selection import Decisions
from nanovllm_core.worker.kv_cache import CacheLayout, DeviceMemory, num_blocks_on_gpu
from nanovllm_core.worker.mixed import mixed_keys
from nanovllm_core.worker.rows import RowTables
from nanovllm_core.worker.sampler_tail import TRANSIENT_BYTES

CONTEXT_BYTES = 512 << 20
"""An estimate of what CUDA, its libraries and the kernels take of a GPU."""

LARGEST_SEARCH = 64
"""The most GPUs that are tried for the smallest number that fits."""

FIT = "fit"
_GIB = 2**30


class PlannedDecisions(Decisions):
    """The choices of a start on a GPU that need not be here; no kernel set is asked."""

    def __init__(self, config: EngineConfig, gpu: Gpu) -> None:
        super().__init__(config)
        self._gpu = gpu

    @property
    def device(self) -> str:
        """No device of this machine, so that none is asked for its facts."""
        return "planned"

    def requirements(self, phase: Phase) -> dict[AttentionRequirements, Sequence[int]]:
        """Those of a start, on the planned GPU."""
        captured = phase == "decode" and not self.config.cuda_graphs.enforce_eager
        capability = self._gpu.compute_capability
        return {
            replace(one, device="cuda", compute_capability=capability, cuda_graphs=captured): layers
            for one, layers in super().requirements(phase).items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU, and how many blocks are left. `workspaces` and `graphs` are estimates."""

    usable: int
    """The GPU's memory times `cache.gpu_memory_utilization`."""
    weights: int
    context: int
    workspaces: int
    graphs: int
    block_bytes: int
    num_blocks: int
    block_size: int

    @property
    def blocks(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """`sequences` of `tokens` each, prompt and output, that the blocks of an engine hold."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Decoding of `rows` sequences in each engine, each with blocks for `tokens` tokens.

    They attend to `context` tokens each, as on average of their outputs.

    Output tokens per second of all GPUs: at most `floor`, which leaves all-reduces out. With them
    after the other work it is `with_communication`, an estimate: work may hide a part of them.
    None where the links are unknown.
    """

    rows: int
    tokens: int
    context: int
    floor: float
    with_communication: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`data_parallel` engines of `tensor_parallel` GPUs each; `problem` is why it cannot run."""

    tensor_parallel: int
    data_parallel: int
    problem: str | None = None
    memory: Memory | None = None
    max_model_len: int | None = None
    rooms: tuple[Room, ...] = ()
    speeds: tuple[Speed, ...] = ()
    all_reduce_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The first of `tp_size` ranks of a configuration, and the sizes of its parts in bytes."""

    tp_size: int
    shape: ModelShape
    costs: ModelCosts
    layout: CacheLayout
    need: SequenceNeed
    max_model_len: int
    config: EngineConfig
    weights: int
    workspaces: int
    graphs: int
    num_all_reduces: int
    """In a step, of a hidden state per token."""

    @property
    def least_length(self) -> int:
        """Tokens of the sequence that must fit for a start, as a worker asks."""
        return 2 if self.config.limits.max_model_len == FIT else self.max_model_len

    @property
    def least_bytes(self) -> int:
        """Bytes of a GPU without which no start succeeds."""
        least = self.need.blocks(self.least_length)
        blocks = max(least, self.config.cache.num_blocks or 0)
        parts = self.weights, CONTEXT_BYTES, self.workspaces, self.graphs
        return sum(parts) + blocks * self.layout.block_bytes

    def short_by(self, gpu: Gpu) -> int:
        """The bytes that a GPU lacks; 0 where the rank fits."""
        return max(0, self.least_bytes - self.usable(gpu))

    def usable(self, gpu: Gpu) -> int:
        """The share of a GPU's memory that the engine may fill."""
        return int(gpu.memory_bytes * self.config.cache.gpu_memory_utilization)

    def memory(self, gpu: Gpu) -> Memory:
        """The blocks that a start would make on a GPU that holds nothing else.

        Raises OutOfMemoryError where a start would.
        """
        cache = self.config.cache
        measured = DeviceMemory(
            context=CONTEXT_BYTES,
            total=gpu.memory_bytes,
            free=gpu.memory_bytes - CONTEXT_BYTES,
            peak=self.weights + self.workspaces,
            graphs=self.graphs,
        )
        block_bytes = self.layout.block_bytes
        num_blocks = cache.num_blocks or num_blocks_on_gpu(
            measured, cache.gpu_memory_utilization, block_bytes
        )
        self.need.check_fits(num_blocks, self.least_length, given=cache.num_blocks is not None)
        return Memory(
            usable=self.usable(gpu),
            weights=self.weights,
            context=CONTEXT_BYTES,
            workspaces=self.workspaces,
            graphs=self.graphs,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            block_size=self.layout.block_size,
        )

    def step_seconds(self, rows: int, context: int, gpu: Gpu) -> tuple[float, float | None]:
        """(the floor of a decode step, its collectives one after another).

        The floor is that of `roofline.decode_step_seconds`. The collectives are the all-reduces:
        sampling exchanges about a KiB of each row and rank.
        """
        floor = decode_step_seconds(self.costs, rows, context, gpu.rates)
        num_bytes = rows * self.costs.itemsize * self.costs.hidden_size
        reduce = gpu.all_reduce_seconds(num_bytes, self.tp_size)
        return floor, None if reduce is None else self.num_all_reduces * reduce


def rank_of(config: EngineConfig, gpu: Gpu, tp_size: int) -> Rank:
    """The first rank of a tensor-parallel group, as a start on this GPU would make it.

    Raises what a start raises: ArchitectureError where the heads cannot be split, for one.
    """
    config = config.model_copy(update={"tensor_parallel_size": tp_size})
    decisions = PlannedDecisions(config, gpu)
    shape = decisions.shape.on_rank(tp_size)
    dtype = cast(torch.dtype, getattr(torch, decisions.dtype))
    module = build_on_meta(decisions.model, decisions.model_config, dtype, tp_size)
    layout = CacheLayout(shape, decisions.block_size, dtype)
    tensors = [*module.parameters(), *module.buffers()]
    limits = config.limits
    eager_bytes, captured_bytes = _step_bytes(module, shape, dtype)
    prompts = () if decisions.attention.eager_prefill_reasons else config.prompt_graph_sizes
    sizes = limits.max_num_seqs, decisions.max_model_len
    keys = mixed_keys(prompts, config.full_step_size, *sizes, most_captured_tokens(shape))
    captured = max((key.total_tokens for key in keys), default=limits.max_num_seqs)
    return Rank(
        tp_size=tp_size,
        shape=shape,
        costs=costs_on_rank(module, decisions.shape, dtype, tp_size),
        layout=layout,
        need=layout.need(limits.max_num_batched_tokens),
        max_model_len=decisions.max_model_len,
        config=config,
        weights=sum(one.numel() * one.element_size() for one in tensors),
        workspaces=_tables(layout, decisions)
        + max(TRANSIENT_BYTES, limits.max_num_batched_tokens * eager_bytes),
        graphs=0 if config.cuda_graphs.enforce_eager else captured * captured_bytes,
        num_all_reduces=_num_all_reduces(module),
    )


def _tables(layout: CacheLayout, decisions: Decisions) -> int:
    """Row tables, the logits of a full batch beside as many prompts, and counts for penalties."""
    rows, vocab_size = decisions.config.limits.max_num_seqs, decisions.shape.vocab_size
    arena = RowTables.allocate(
        rows,
        decisions.max_model_len,
        layout.block_size,
        torch.device("meta"),
        len(layout.groups),
    ).arena
    return arena.nbytes + 2 * rows * vocab_size * layout.dtype.itemsize + 2 * rows * vocab_size


def _num_all_reduces(module: torch.nn.Module) -> int:
    """One behind each layer that splits its inputs; a mixture and its shared experts have one."""
    modules = list(module.modules())
    mixtures = [one for one in modules if isinstance(one, SparseMLP)]
    with_mlp = [one for one in mixtures if isinstance(one.shared_experts, GatedMLP)]
    summed = RowParallelLinear | VocabParallelEmbedding | SparseMLP
    return sum(isinstance(one, summed) for one in modules) - len(with_mlp)


def _step_bytes(module: torch.nn.Module, shape: ModelShape, dtype: torch.dtype) -> tuple[int, int]:
    """Estimates of a token's part of an eager and of a captured step.

    Three hidden states, the widest product and half. Of latent attention eager prompts have keys
    and values of all heads, captured steps queries of rows and the latent parts that they find. A
    mixture has the hidden and the output numbers of each expert of a token.
    """
    latent = [(one, one.latent) for one in shape.attention_shapes if one.latent]
    expanded = (one.num_heads * (sizes.key_size + sizes.value_size) for one, sizes in latent)
    absorbed = (one.num_heads * (one.head_size + sizes.latent_size) for one, sizes in latent)
    products = [
        parameter.shape[0]
        for one in module.modules()
        if isinstance(one, ColumnParallelLinear)
        for parameter in one.parameters(recurse=False)
    ] or [shape.hidden_size]
    mixtures = (one for one in module.modules() if isinstance(one, SparseMLP))
    of_experts = [
        one.gate.routing.num_chosen * sum(one.experts.down.tensor.shape[1:]) for one in mixtures
    ]

    def with_widest(widest: int) -> int:
        return (3 * shape.hidden_size + max(3 * widest // 2, *of_experts, 0)) * dtype.itemsize

    return with_widest(max((*expanded, *products))), with_widest(max((*absorbed, *products)))


def plan_layouts(
    config: EngineConfig,
    gpu: Gpu,
    num_gpus: int,
    lengths: Sequence[int],
    input_len: int = 512,
    output_len: int = 512,
) -> list[Layout]:
    """Every split of the GPUs in engines of equal tensor parallelism, the smallest first.

    `lengths` are the tokens of sequences that are fitted in. Speeds are of sequences of `input_len`
    and `output_len` tokens, cut where the engine's longest is shorter: one in each engine, and as
    many as run at once and fit. Raises OutOfMemoryError where no layout fits, with the smallest
    number of GPUs that does.
    """
    PlannedDecisions(config, gpu).shape.on_rank(1)  # a model that nothing runs is no misfit
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    workload = input_len, output_len
    layouts = [_layout(config, gpu, size, num_gpus // size, lengths, workload) for size in sizes]
    if all(one.problem for one in layouts):
        raise OutOfMemoryError(_misfit(config, gpu, num_gpus, layouts))
    return layouts


def _layout(
    config: EngineConfig,
    gpu: Gpu,
    tp_size: int,
    num_engines: int,
    lengths: Sequence[int],
    workload: tuple[int, int],
) -> Layout:
    empty = Layout(tensor_parallel=tp_size, data_parallel=num_engines)
    try:
        rank = rank_of(config, gpu, tp_size)
        if short := rank.short_by(gpu):
            return replace(empty, problem=_short(rank, gpu, short))
        memory = rank.memory(gpu)
    except (ArchitectureError, OutOfMemoryError) as error:
        return replace(empty, problem=str(error))
    longest = rank.need.fitting_length(memory.num_blocks, rank.max_model_len)
    tokens = sorted({min(length, longest) for length in lengths} | {longest})
    input_len, output_len = workload
    whole = min(input_len + output_len, longest)
    fitting = memory.num_blocks // rank.need.blocks(whole)
    rows = sorted({1, min(fitting, config.limits.max_num_seqs)})
    context = min(input_len + output_len // 2, whole)
    return replace(
        empty,
        memory=memory,
        max_model_len=longest,
        rooms=tuple(
            Room(tokens=one, sequences=memory.num_blocks // rank.need.blocks(one)) for one in tokens
        ),
        speeds=tuple(_speed(rank, gpu, one, (whole, context), num_engines) for one in rows),
        all_reduce_measured=gpu.all_reduce_is_measured(tp_size),
    )


def _speed(rank: Rank, gpu: Gpu, rows: int, lengths: tuple[int, int], num_engines: int) -> Speed:
    whole, context = lengths
    floor, collectives = rank.step_seconds(rows, context, gpu)
    tokens = rows * num_engines
    return Speed(
        rows=rows,
        tokens=whole,
        context=context,
        floor=tokens / floor,
        with_communication=None if collectives is None else tokens / (floor + collectives),
    )


def _short(rank: Rank, gpu: Gpu, short: int) -> str:
    blocks = rank.least_bytes - rank.weights - CONTEXT_BYTES - rank.workspaces - rank.graphs
    return (
        f"short by {short / _GIB:.1f} GiB: weights {rank.weights / _GIB:.1f}, workspaces, graphs "
        f"and context {(rank.workspaces + rank.graphs + CONTEXT_BYTES) / _GIB:.1f}, blocks (a "
        f"sequence of {rank.least_length:,} tokens, or cache.num_blocks) {blocks / _GIB:.1f}, of "
        f"{_of_usable(rank, gpu)}"
    )


def _of_usable(rank: Rank, gpu: Gpu) -> str:
    share = rank.config.cache.gpu_memory_utilization
    usable, whole = rank.usable(gpu) / _GIB, gpu.memory_bytes / _GIB
    return f"{usable:.1f} GiB ({share:.0%} of a GPU's {whole:.1f})"


def _misfit(config: EngineConfig, gpu: Gpu, num_gpus: int, layouts: Sequence[Layout]) -> str:
    smallest = next(_sizes_that_fit(config, gpu), None)
    remedy = f"no number of GPUs up to {LARGEST_SEARCH} holds it"
    if smallest is not None:
        remedy = f"the smallest number that fits is {smallest}: --gpus {smallest}"
    return (
        f"{config.model} does not fit on {num_gpus} x {gpu.name}. Tensor parallel "
        + "; ".join(f"{one.tensor_parallel}: {one.problem}" for one in layouts)
        + f". {remedy}; or lower limits.max_model_len"
    )


def _sizes_that_fit(config: EngineConfig, gpu: Gpu) -> Iterator[int]:
    for size in range(1, LARGEST_SEARCH + 1):
        try:
            if not rank_of(config, gpu, size).short_by(gpu):
                yield size
        except ArchitectureError:
            continue
