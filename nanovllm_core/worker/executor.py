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
from nanovllm_core.worker.kv_cache import DeviceMemory, size_cache
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
        laps, limits = Laps(), setup.config.limits
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
            _, length = size_cache(setup, model.shape, memory and memory.measure(device))
            setup = replace(setup, max_model_len=length)
        with _memory_for(
            device,
            "steps and their CUDA graphs",
            f"lower limits.max_num_seqs ({limits.max_num_seqs}), max_model_len "
            f"({setup.max_model_len}), max_num_batched_tokens ({limits.max_num_batched_tokens}) or "
            f"cache.gpu_memory_utilization ({setup.config.cache.gpu_memory_utilization}), shorten "
            "cuda_graphs.prompt_sizes, or set cuda_graphs: {enforce_eager: true}",
        ):
            attention = PagedAttention(setup, kernels, model)
            laps.end("attention")
            runner = self._runner = ModelRunner(setup, model, attention)
            if memory is not None:
                memory = _try_steps(setup, runner, memory)
            num_blocks, length = size_cache(setup, model.shape, memory)
            if length < longest:
                logger.info(_CUT, length, longest)
            runner.allocate_cache(num_blocks)
            laps.end("cache")
            load_seconds = sum(laps.seconds.values())
            if setup.cuda_graphs:
                runner.capture(laps)
        return WorkerInfo(
            num_blocks=num_blocks,
            block_size=setup.block_size,
            max_model_len=length,
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
        try:
            with self._on_device:
                self._running().submit(plan)
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


def _try_steps(setup: WorkerSetup, runner: ModelRunner, memory: DeviceMemory) -> DeviceMemory:
    """Run the largest steps there can be, so that the allocator's peak is the true one.

    They run on a given number of blocks too: no request shall be the first to have them compiled.
    Captured steps keep the bytes of the largest, for all share one pool.
    """
    runner.allocate_cache(1)
    runner.trial_step(setup.config.limits.max_num_batched_tokens)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(runner.device)
    runner.trial_captured_step()
    kept = torch.cuda.memory_reserved(runner.device) - before
    torch.cuda.empty_cache()
    return memory.measure(runner.device, graphs=kept if setup.cuda_graphs else 0)
