"""The single-process executor: one worker, in the engine's own process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from pydantic import BaseModel

from nanovllm_core.config.settings import FIT
from nanovllm_core.errors import (
    EngineClosedError,
    ModelOutputError,
    NanoVLLMError,
    OutOfMemoryError,
)
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.plan import StepPlan, StepResult, WorkerInfo
from nanovllm_core.registry.checks import describe
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.worker.attention import PagedAttention
from nanovllm_core.worker.kv_cache import (
    DeviceMemory,
    check_one_sequence_fits,
    count_blocks,
    fitting_length,
)
from nanovllm_core.worker.model import load_model
from nanovllm_core.worker.progress import Laps
from nanovllm_core.worker.row_ops import require_triton
from nanovllm_core.worker.runner import ModelRunner

logger = logging.getLogger(__name__)

_CUT = "limits.max_model_len: fit: the KV cache holds %d of the %d tokens of the model's own limit"


class SingleProcessExecutor(Executor):
    """Holds one `ModelRunner` and calls it directly."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self._runner: ModelRunner | None = None
        self._on_device: AbstractContextManager[object] = nullcontext()
        """Makes the GPU the current one: kernels are launched there, whatever else is going on."""
        self._parts = ""
        """The plugins whose code runs in a step, but for processors, which name themselves."""

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        """Load the model, size the KV cache by a trial step, capture the graphs."""
        laps, limits, cache = Laps(), setup.config.limits, setup.config.cache
        attention_plugins = setup.prefill_attention, setup.decode_attention
        parts = setup.model, *attention_plugins, setup.kernels, setup.sampler
        self._parts = ", ".join(dict.fromkeys(map(describe, parts)))
        device, memory = torch.device(setup.device), None
        with _memory_for(
            device, "the model", "free it of others, or take a smaller model or dtype"
        ):
            require_triton(device)
            if device.type == "cuda":
                memory = DeviceMemory.open(device)
                self._on_device = torch.cuda.device(device)
            laps.end("device")
            kernels: KernelSet = make_plugin(setup.kernels, device)
            model = load_model(setup, kernels)
            laps.end("model")
        longest = setup.max_model_len
        if limits.max_model_len == FIT:
            # A bound, so that tables are not made for a longer sequence: the blocks beside the
            # weights alone. Workspaces and steps take their part when they can be measured.
            beside_weights = memory and memory.measure(device)
            setup = _within(setup, count_blocks(setup, model.shape, beside_weights))
        with _memory_for(
            device,
            "the largest step there can be",
            f"lower limits.max_num_seqs ({limits.max_num_seqs}), max_model_len "
            f"({setup.max_model_len}) or max_num_batched_tokens ({limits.max_num_batched_tokens})",
        ):
            attention = PagedAttention(setup, kernels, model)
            laps.end("attention")
            runner = self._runner = ModelRunner(setup, model, attention)
            num_blocks = _num_blocks(setup, runner, memory)
            setup = _within(setup, num_blocks)
            if setup.max_model_len < longest:
                logger.info(_CUT, setup.max_model_len, longest)
            runner.allocate_cache(num_blocks)
            laps.end("cache")
        load_seconds = sum(laps.seconds.values())
        if setup.cuda_graphs:
            with _memory_for(
                device,
                "CUDA graphs",
                f"lower cache.gpu_memory_utilization ({cache.gpu_memory_utilization}), "
                "shorten cuda_graphs.prompt_sizes, or set cuda_graphs: {enforce_eager: true}",
            ):
                runner.capture(laps)
        return WorkerInfo(
            num_blocks=num_blocks,
            block_size=setup.block_size,
            max_model_len=setup.max_model_len,
            vocab_size=model.shape.vocab_size,
            attention=attention.describe(),
            kernels=f"{setup.kernels.name} {setup.kernels.version}",
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
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
            self._runner.close()
            self._runner = None
        gc.collect()  # model, runner and cache refer to one another
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next engine, or the neighbours, find the memory free

    def _running(self) -> ModelRunner:
        if self._runner is None:
            raise EngineClosedError("the executor is closed; create a new LLM")
        return self._runner


@contextmanager
def _memory_for(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Say what there was no room for, and what helps."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not full and "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemoryError(f"no room on {device} for {what}: {error}; {remedy}") from error


def _within(setup: WorkerSetup, num_blocks: int) -> WorkerSetup:
    """The setup with a length that the blocks hold; OutOfMemoryError where it may not be cut."""
    if setup.config.limits.max_model_len != FIT:
        given = setup.config.cache.num_blocks is not None
        check_one_sequence_fits(num_blocks, setup.block_size, setup.max_model_len, given=given)
        return setup
    length = fitting_length(num_blocks, setup.block_size, setup.max_model_len)
    return replace(setup, max_model_len=length)


def _num_blocks(setup: WorkerSetup, runner: ModelRunner, memory: DeviceMemory | None) -> int:
    """The blocks of the cache, after trials of the largest steps on a GPU: its true peak is known.

    The trials run with a given number of blocks too: no request shall be the first to have these
    steps compiled. Captured steps keep what the largest keeps, for all share one pool.
    """
    if memory is not None:
        runner.allocate_cache(1)
        runner.trial_step(setup.config.limits.max_num_batched_tokens)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(runner.device)
        runner.trial_captured_step()
        kept = torch.cuda.memory_reserved(runner.device) - before
        torch.cuda.empty_cache()
        memory = memory.measure(runner.device, graphs=kept if setup.cuda_graphs else 0)
    return count_blocks(setup, runner.model.shape, memory)
