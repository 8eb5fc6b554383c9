"""The single-process executor: one worker, in the engine's own process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from pydantic import BaseModel

from nanovllm_core.config.settings import FIT, EngineConfig
from nanovllm_core.errors import (
    EngineClosedError,
    ModelOutputError,
    NanoVLLMError,
    OutOfMemoryError,
    UnsupportedError,
)
from nanovllm_core.interfaces.attention import AttentionBackend, AttentionConfig
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.interfaces.plan import StepPlan, StepResult, WorkerInfo
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.layers import Attention
from nanovllm_core.registry.checks import describe
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.worker.attention import PagedAttention
from nanovllm_core.worker.graphs import StepGraphs
from nanovllm_core.worker.kv_cache import (
    DeviceMemory,
    KVCache,
    MemoryBefore,
    block_bytes,
    check_one_sequence_fits,
    fitting_length,
    most_blocks_on_cpu,
    num_blocks_on_cpu,
    num_blocks_on_gpu,
)
from nanovllm_core.worker.model import LoadedModel, load_model
from nanovllm_core.worker.plugins import make_kernels, make_processors, make_sampler
from nanovllm_core.worker.progress import Laps, track
from nanovllm_core.worker.row_ops import require_triton
from nanovllm_core.worker.runner import ModelRunner

logger = logging.getLogger(__name__)

CUT = "limits.max_model_len: fit: the KV cache holds %d of the %d tokens of the model's own limit"


class SingleProcessExecutor(Executor):
    """Holds one `ModelRunner` and calls it directly."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self._runner: ModelRunner | None = None
        self._on_device: AbstractContextManager[object] = nullcontext()
        """Makes the GPU the current one: kernels are launched there, whatever else is going on."""
        self._graphs: StepGraphs | None = None
        self._parts = ""

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        """Load the model, size the KV cache by a trial step, capture the graphs."""
        laps, longest = Laps(), setup.max_model_len
        self._parts = ", ".join(dict.fromkeys(map(describe, _parts_of_a_step(setup))))
        if setup.config.cache.num_blocks is not None:  # too few are known before anything is loaded
            setup = _within(setup, setup.config.cache.num_blocks)
        device = torch.device(setup.device)
        with _room(device, "the model", "free it of others, or take a smaller model or dtype"):
            require_triton(device)
            before = _open_device(device)
            if device.type == "cuda":
                self._on_device = torch.cuda.device(device)
            laps.end("device")
            kernels = make_kernels(setup, device)
            model = load_model(setup, kernels)
            laps.end("model")
        if setup.config.limits.max_model_len == FIT:
            setup = _within(setup, _most_blocks(setup, model, before))
        with _room(device, "the attention backends' workspaces", _smaller_steps(setup)):
            attention = _make_attention(setup, kernels, model)
            laps.end("attention")
        with _room(device, "the largest step there can be", _smaller_steps(setup)):
            runner = self._runner = _make_runner(setup, model, attention)
            num_blocks = _num_blocks(setup, model, runner, before)
            setup = _within(setup, num_blocks)
            if setup.max_model_len < longest:
                logger.info(CUT, setup.max_model_len, longest)
            size = num_blocks, setup.block_size
            cache = KVCache.allocate(model.shape, *size, model.dtype, model.device)
            attention.set_cache(cache)
            laps.end("cache")
        load_seconds = sum(laps.seconds.values())
        if setup.cuda_graphs:
            with _room(device, "CUDA graphs", _fewer_graphs(setup)):
                self._graphs = _capture(setup, runner, cache, laps)
        return WorkerInfo(
            num_blocks=cache.num_blocks,
            block_size=setup.block_size,
            max_model_len=setup.max_model_len,
            vocab_size=model.shape.vocab_size,
            attention=_describe(attention),
            kernels=f"{setup.kernels.name} {setup.kernels.version}",
            device=_device_name(device),
            dtype=setup.dtype,
            cuda_graphs=setup.cuda_graphs,
            load_seconds=load_seconds,
            capture_seconds=sum(laps.seconds.values()) - load_seconds,
            bucket_sizes=runner.bucket_sizes,
            prompt_graph_sizes=runner.prompt_sizes if setup.cuda_graphs else (),
            start_seconds=laps.seconds,
        )

    def submit(self, plan: StepPlan) -> None:
        runner = self._running()
        try:
            with self._on_device:
                runner.submit(plan)
        except ModelOutputError as error:
            raise ModelOutputError(f"{error}; the step was of {self._parts}", error.rows) from None
        except NanoVLLMError:
            raise
        except Exception as error:
            error.add_note(f"in a step of {self._parts}")
            raise

    def collect(self) -> StepResult:
        return self._running().collect()

    def close(self) -> None:
        if self._runner is None:
            return
        device = self._runner.device
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        finally:
            if self._graphs is not None:
                self._graphs.clear()
            self._runner = self._graphs = None
        gc.collect()  # model, runner and cache refer to one another
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next engine, or the neighbours, find the memory free

    def _running(self) -> ModelRunner:
        if self._runner is None:
            raise EngineClosedError("the executor is closed; create a new LLM")
        return self._runner


def _parts_of_a_step(setup: WorkerSetup) -> tuple[ResolvedPlugin, ...]:
    """The plugins whose code runs in a step, but for logits processors, which name themselves."""
    attention = setup.prefill_attention, setup.decode_attention
    return setup.model, *attention, setup.kernels, setup.sampler


@contextmanager
def _room(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Say what there was no room for, and what helps."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not full and "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemoryError(f"no room on {device} for {what}: {error}; {remedy}") from error


def _open_device(device: torch.device) -> MemoryBefore:
    """Create the CUDA context, if there is none yet; return what this engine is not to count."""
    if device.type != "cuda":
        return MemoryBefore()
    torch.cuda.set_device(device)
    # Other processes may allocate between the two readings; the window is as short as it can be.
    torch.cuda.init()
    free_before, _ = torch.cuda.mem_get_info(device)
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    free_after, _ = torch.cuda.mem_get_info(device)
    # What is cached, and the peak so far, is of engines before or beside this one.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    context = max(0, free_before - free_after)
    return MemoryBefore(torch.cuda.memory_reserved(device), context)


def _smaller_steps(setup: WorkerSetup) -> str:
    limits = setup.config.limits
    return (
        f"lower limits.max_num_seqs ({limits.max_num_seqs}), max_model_len "
        f"({setup.max_model_len}) or max_num_batched_tokens ({limits.max_num_batched_tokens})"
    )


def _fewer_graphs(setup: WorkerSetup) -> str:
    return (
        f"lower cache.gpu_memory_utilization ({setup.config.cache.gpu_memory_utilization}), "
        "shorten cuda_graphs.prompt_sizes, or set cuda_graphs: {enforce_eager: true}"
    )


def _make_attention(setup: WorkerSetup, kernels: KernelSet, model: LoadedModel) -> PagedAttention:
    """The backends with their workspaces, known to every layer."""
    prefill, decode = _make_backends(setup, model)
    attention = PagedAttention(kernels, prefill, decode)
    for index, layer in enumerate(model.attention_layers()):
        layer.bind(attention, index)
    for backend in {id(b): b for b in (prefill, decode)}.values():
        backend.allocate()
    return attention


def _make_backends(
    setup: WorkerSetup, model: LoadedModel
) -> tuple[AttentionBackend, AttentionBackend]:
    """The prefill and the decode backend; one object where both are the same choice."""
    layers = model.attention_layers()
    _check_alike(layers, model.shape)
    config = AttentionConfig(
        device=model.device,
        dtype=model.dtype,
        num_heads=layers[0].prep.num_heads,
        num_kv_heads=layers[0].prep.num_kv_heads,
        head_size=model.shape.head_size,
        scale=layers[0].scale,
        block_size=setup.block_size,
        max_num_seqs=setup.config.limits.max_num_seqs,
        max_model_len=setup.max_model_len,
        max_num_batched_tokens=setup.config.limits.max_num_batched_tokens,
        sliding_window=layers[0].sliding_window,
        soft_cap=layers[0].soft_cap,
    )

    def make(resolved: ResolvedPlugin) -> AttentionBackend:
        return cast(AttentionBackend, make_plugin(resolved, config))

    prefill = make(setup.prefill_attention)
    same = setup.prefill_attention == setup.decode_attention
    return prefill, prefill if same else make(setup.decode_attention)


def _check_alike(layers: Sequence[Attention], shape: ModelShape) -> None:
    """One backend serves all layers; refuse what it would otherwise ignore in silence."""
    for name in ("sliding_window", "soft_cap"):
        for index, layer in enumerate(layers):
            # The backends were asked at start by the shape alone.
            if getattr(layer, name) != getattr(shape, name):
                raise UnsupportedError(
                    f"attention layer {index} has {name}={getattr(layer, name)}, the model's shape "
                    f"says {getattr(shape, name)}: this version needs one value for all layers, "
                    "the one that the model plugin's shape() gives; use a model whose layers do "
                    "not differ, or correct the model plugin"
                )
    first = _facts(layers[0])
    for index, layer in enumerate(layers):
        if _facts(layer) != first:
            raise UnsupportedError(
                f"attention layer {index} has (scale, heads, KV heads, head size) {_facts(layer)}, "
                f"layer 0 has {first}; this version needs all layers alike"
            )


def _facts(layer: Attention) -> tuple[float, int, int, int]:
    prep = layer.prep
    return layer.scale, prep.num_heads, prep.num_kv_heads, prep.head_size


def _make_runner(setup: WorkerSetup, model: LoadedModel, attention: PagedAttention) -> ModelRunner:
    config, vocab_size = setup.config, model.shape.vocab_size
    return ModelRunner(
        model,
        attention,
        make_sampler(setup, model.device, vocab_size),
        make_processors(setup, model.device, vocab_size),
        max_model_len=setup.max_model_len,
        block_size=setup.block_size,
        bucket_sizes=_decode_sizes(config, model.device),
        prompt_sizes=setup.prompt_graph_sizes,
        max_steps_in_flight=config.steps_ahead + 2,
        debug=config.debug,
    )


def _decode_sizes(config: EngineConfig, device: torch.device) -> tuple[int, ...]:
    """The batch sizes that decode steps are padded to: on a CPU, unless given, any is one."""
    if device.type == "cpu" and config.cuda_graphs.sizes is None:
        return tuple(range(1, config.limits.max_num_seqs + 1))
    return config.graph_sizes


def _within(setup: WorkerSetup, num_blocks: int) -> WorkerSetup:
    """The setup with a length that so many pages hold; OutOfMemoryError where it may not be cut."""
    if setup.config.limits.max_model_len != FIT:
        given = setup.config.cache.num_blocks is not None
        check_one_sequence_fits(num_blocks, setup.block_size, setup.max_model_len, given=given)
        return setup
    length = fitting_length(num_blocks, setup.block_size, setup.max_model_len)
    return replace(setup, max_model_len=length)


def _most_blocks(setup: WorkerSetup, model: LoadedModel, before: MemoryBefore) -> int:
    """Pages beside the weights alone: a bound, so that tables are not made for a longer sequence.

    Workspaces and steps take their part later, when they are there to be measured.
    """
    if setup.config.cache.num_blocks is not None:
        return setup.config.cache.num_blocks
    per_block = block_bytes(model.shape, setup.block_size, model.dtype)
    if model.device.type == "cpu":
        return most_blocks_on_cpu(per_block)
    memory = DeviceMemory.measure(model.device, before)
    return num_blocks_on_gpu(memory, setup.config.cache.gpu_memory_utilization, per_block)


def _num_blocks(
    setup: WorkerSetup, model: LoadedModel, runner: ModelRunner, before: MemoryBefore
) -> int:
    """The pages of the cache: an explicit number is honoured, else as many as there is room for."""
    block_size, shape = setup.block_size, model.shape
    per_block = block_bytes(shape, block_size, model.dtype)
    num_blocks = setup.config.cache.num_blocks
    if model.device.type == "cuda":
        runner.attention.set_cache(
            KVCache.allocate(shape, 1, block_size, model.dtype, model.device)
        )
        # A given number is honoured; but no request shall be the first to have these compiled.
        graph_bytes = _try_steps(setup, runner)
        if num_blocks is None:
            memory = DeviceMemory.measure(model.device, before, graph_bytes)
            share = setup.config.cache.gpu_memory_utilization
            return num_blocks_on_gpu(memory, share, per_block)
    if num_blocks is None:
        max_num_seqs = setup.config.limits.max_num_seqs
        return num_blocks_on_cpu(per_block, runner.max_blocks, max_num_seqs)
    return num_blocks


def _try_steps(setup: WorkerSetup, runner: ModelRunner) -> int:
    """Run the largest steps there can be, so that the allocator's peak is the true one.

    Returns the bytes that captured steps will keep: those of the largest, for all share one pool.
    """
    runner.trial_step(setup.config.limits.max_num_batched_tokens)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(runner.device)
    runner.trial_captured_step()
    kept = torch.cuda.memory_reserved(runner.device) - before
    torch.cuda.empty_cache()
    return kept if setup.cuda_graphs else 0


def _capture(setup: WorkerSetup, runner: ModelRunner, cache: KVCache, laps: Laps) -> StepGraphs:
    attention = runner.attention
    backends = {"prefill": attention.prefill_backend, "decode": attention.decode_backend}

    def watched() -> dict[str, torch.Tensor]:
        tensors = {"kv_cache": cache.pages, "row_tables": runner.tables.arena}
        for name, tensor in runner.sampler.captured_tensors().items():
            tensors[f"sampler.{name}"] = tensor
        for phase, backend in backends.items():
            for name, tensor in backend.captured_tensors().items():
                tensors[f"attention.{phase}.{name}"] = tensor
        return tensors

    graphs = StepGraphs(
        runner.device,
        watched,
        debug=setup.config.debug,
        progress=lambda keys: track(keys, "Capturing CUDA graphs"),
        laps=laps,
    )
    runner.capture(graphs)
    return graphs


def _describe(attention: PagedAttention) -> str:
    prefill, decode = attention.prefill_backend, attention.decode_backend
    if prefill is decode:
        return decode.describe()
    return f"prefill {prefill.describe()}, decode {decode.describe()}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
