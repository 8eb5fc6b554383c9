"""The worker: one rank's whole, from the device to the results. Executors are topology only."""

from __future__ import annotations

import gc
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from nanovllm_core.config.settings import FIT
from nanovllm_core.errors import (
    DeviceError,
    EngineClosedError,
    ModelOutputError,
    NanoVLLMError,
    OutOfMemoryError,
    PluginLoadError,
)
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.kernels import CompilingKernels, KernelSet
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.interfaces.parallel import SINGLE, ParallelContext
from nanovllm_core.interfaces.plan import StepPlan, StepResult, TokenMasks, WorkerInfo
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.worker.attention import PagedAttention
from nanovllm_core.worker.graphs import compile_launches
from nanovllm_core.worker.kv_cache import DeviceMemory, size_cache
from nanovllm_core.worker.model import load_model
from nanovllm_core.worker.products import captured_products, wake_library
from nanovllm_core.worker.progress import Laps
from nanovllm_core.worker.runner import ModelRunner

logger = logging.getLogger(__name__)

_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Those of workers that have ended, for the next ones."""
_thread = threading.local()
"""`stream`: that of the worker which this thread started last, and on which it has been since."""
_THERE = nullcontext()
_MODEL_AND_REMEDY = "the model", "free it of others, or take a smaller model or dtype"
_CLOSED = "the worker has not started, or is closed; create a new LLM"
_CUT = (
    "limits.max_model_len: fit: the KV cache holds %d of the %d tokens of the model's own limit; "
    "for more, give the cache more memory%s"
)


class Worker:
    """Owns one rank's device, model, KV cache, graphs and model runner.

    An executor starts it in any process, passes it every plan, in order, and closes it. All ranks
    of an engine get the same `setup` and plans, and give the same results. `parallel` is this
    rank's place among them.
    """

    def __init__(self, setup: WorkerSetup, parallel: ParallelContext = SINGLE) -> None:
        self.setup = setup if parallel.device is None else replace(setup, device=parallel.device)
        self.parallel = parallel
        self._runner: ModelRunner | None = None
        self._on_device: AbstractContextManager[object] = nullcontext()
        """Makes the GPU and the worker's stream the current ones, whatever else is going on."""
        self._stream: torch.cuda.Stream | None = None
        """Of the start and of all steps: where kernels run on the default stream too, those of
        captured steps begin 0.3 to 0.7 us later."""
        self._streams_before: tuple[Any, ...] = ()
        attention = setup.prefill_attention, setup.decode_attention
        parts = setup.model, *attention, setup.kernels, setup.sampler
        self._parts = ", ".join(dict.fromkeys(map(str, parts)))
        """The plugins whose code runs in a step, but for processors, which name themselves."""

    def start(self) -> WorkerInfo:
        """Load the model, size the KV cache by a trial step, capture the graphs.

        The number of blocks, and so the longest sequence, is the smallest of all ranks. On a GPU,
        the thread that calls stays on the worker's stream until it closes the worker: to change
        streams for every step would take the host some 20 us. Raises WeightsError,
        OutOfMemoryError or whatever a plugin raises.
        """
        laps, device = Laps(), torch.device(self.setup.device)
        with _memory_for(device, *_MODEL_AND_REMEDY):
            memory = self._open_device(device)
        laps.end("device")
        try:
            with self._on_device:
                info = self._load(device, memory, laps)
            self._take_stream()
        except BaseException:
            self._return_stream()
            raise
        return info

    def _load(self, device: torch.device, memory: DeviceMemory | None, laps: Laps) -> WorkerInfo:
        """All of a start for which the device has to be open."""
        parallel = self.parallel
        wait_for_library = wake_library(device, self._stream, getattr(torch, self.setup.dtype))
        try:
            with _memory_for(device, *_MODEL_AND_REMEDY):
                kernels: KernelSet = make_plugin(self.setup.kernels, device)
                model = load_model(self.setup, kernels, parallel.tensor_parallel)
        finally:
            wait_for_library()
        laps.end("model")
        setup = self._with_bounded_length(model.shape, memory)
        with _memory_for(device, *_steps_and_remedy(setup)):
            attention = PagedAttention(setup, kernels, model)
            laps.end("attention")
            runner = self._runner = ModelRunner(
                setup, kernels, model, attention, parallel.tensor_parallel
            )
            is_captured_at_once = setup.cuda_graphs and not setup.needs_warm_up
            if is_captured_at_once and isinstance(kernels, CompilingKernels):
                attention.allocate_cache(1)
                # Prompts that are not captured may wait for the device.
                can_capture = runner.prompt_sizes and not attention.context_part
                most = setup.config.limits.max_num_batched_tokens if can_capture else 0
                smallest, *others = (partial(runner.run_captured, key) for key in runner.keys)
                first = chain(runner.trial_launches(most), [smallest])
                products = captured_products(model.module, runner.keys)
                compile_launches(kernels, device, first, others, products)
                laps.end("compile")
            if memory is not None:
                memory = _try_steps(setup, runner, memory)
            num_blocks, length = size_cache(setup, model.shape, memory, parallel.min_over_ranks)
            if length < self.setup.max_model_len:
                need = attention.layout.need(setup.config.limits.max_num_batched_tokens)
                remedy = need.or_smaller_chunks(length + 1)
                logger.info(_CUT, length, self.setup.max_model_len, remedy)
            attention.allocate_cache(num_blocks)
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
            cache_windows=attention.layout.windows,
            kernels=f"{setup.kernels.name} {setup.kernels.version}",
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            dtype=setup.dtype,
            cuda_graphs=setup.cuda_graphs,
            load_seconds=load_seconds,
            capture_seconds=sum(laps.seconds.values()) - load_seconds,
            bucket_sizes=runner.bucket_sizes,
            prompt_graph_sizes=runner.prompt_sizes if setup.cuda_graphs else (),
            row_padding=runner.row_padding,
            start_seconds=laps.seconds,
        )

    def _open_device(self, device: torch.device) -> DeviceMemory | None:
        """Make the device ready for work; its memory, None of a CPU."""
        require_triton(device)
        if device.type != "cuda":
            return None
        return DeviceMemory.open(device, self._connect)

    def _connect(self) -> None:
        """Create the CUDA context, the stream, and the connections to other ranks."""
        device = torch.device(self.setup.device)
        idle = _idle_streams[device]
        self._stream = idle.pop() if idle else torch.cuda.Stream(device)
        self._on_device = torch.cuda.stream(self._stream)
        with self._on_device:
            torch.zeros(1, device=device)
            self.parallel.connect()

    def _take_stream(self) -> None:
        if self._stream is not None:
            self._streams_before = torch.cuda.current_stream(), getattr(_thread, "stream", None)
            torch.cuda.set_stream(self._stream)
            _thread.stream = self._stream

    def _return_stream(self) -> None:
        if self._stream is not None:
            if self._is_there():
                current, _thread.stream = self._streams_before
                torch.cuda.set_stream(current)
            _idle_streams[torch.device(self.setup.device)].append(self._stream)
            self._stream = None

    def _is_there(self) -> bool:
        """Whether the calling thread is on the worker's stream."""
        return getattr(_thread, "stream", None) is self._stream

    def _with_bounded_length(self, shape: ModelShape, memory: DeviceMemory | None) -> WorkerSetup:
        """The set-up; where the length is to fit, with what the blocks beside the weights hold.

        A bound, so that tables are not made for a longer sequence. Workspaces and steps take their
        part when they can be measured.
        """
        setup = self.setup
        if setup.config.limits.max_model_len != FIT:
            return setup
        now = memory and memory.measure(torch.device(setup.device))
        _, length = size_cache(setup, shape, now, self.parallel.min_over_ranks)
        return replace(setup, max_model_len=length)

    def submit(self, plan: StepPlan) -> None:
        """Apply the plan and launch its step; never waits for the device, but in debug mode.

        Raises EngineClosedError before a start and after `close`, InconsistentStateError for a plan
        whose decoding rows it does not have and while the step before waits for masks, and in debug
        mode, for which it looks at the logits, ModelOutputError.
        """
        self._launch(ModelRunner.submit, plan)

    def sample(self, masks: TokenMasks) -> None:
        """Launch the sampling of the step submitted last; never waits, but in debug mode.

        Raises EngineClosedError as `submit` does, InconsistentStateError where that step does not
        wait for these masks, ModelOutputError in debug mode.
        """
        self._launch(ModelRunner.sample, masks)

    def _launch(self, launch: Callable[[ModelRunner, Any], None], part: object) -> None:
        """Launch a part of a step; an error says whose code ran in it."""
        if self._runner is None:
            raise EngineClosedError(_CLOSED)
        try:
            with _THERE if self._is_there() else self._on_device:
                launch(self._runner, part)
        except ModelOutputError as error:
            raise ModelOutputError(f"{error}; the step was of {self._parts}", error.rows) from None
        except Exception as error:
            if not isinstance(error, NanoVLLMError):
                error.add_note(f"in a step of {self._parts}")
            raise

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight; ExecutorError where none is."""
        if self._runner is None:
            raise EngineClosedError(_CLOSED)
        return self._runner.collect()

    @property
    def late_steps(self) -> tuple[int, int]:
        """Steps that the device waited for, and all that were launched with one in flight.

        The first is an upper bound: whether the device had finished the step before is looked at
        behind the launch.
        """
        if self._runner is None:
            return 0, 0
        results = self._runner.sampling.results
        return results.num_late, results.num_overlapped

    def close(self) -> None:
        """Free the device. May be called twice, and without a start."""
        if self._runner is None:
            return
        device = self._runner.device
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        finally:
            self._runner.close()
            self._runner = None
            self._return_stream()
        gc.collect()  # model, runner and cache refer to one another
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next engine, or the neighbours, find the memory free


def require_triton(device: torch.device) -> None:
    """DeviceError on CUDA where Triton, in which the worker's kernels are written, is missing."""
    if device.type != "cuda":
        return
    try:
        import triton  # noqa: F401 - the kernels' modules import it when they are first needed
    except ImportError as error:
        raise DeviceError(
            f"device {device} needs triton, which cannot be imported ({error}); "
            'run: pip install "triton>=3.6", or choose device: cpu'
        ) from error


@contextmanager
def _memory_for(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Say what there was no room for, and what helps."""
    try:
        yield
    except (RuntimeError, MemoryError, PluginLoadError) as error:
        cause = error.__cause__ or error  # `make_plugin` wraps what a plugin's code raises
        full = isinstance(cause, torch.OutOfMemoryError | MemoryError)
        if not full and "DefaultCPUAllocator" not in str(cause):
            raise
        raise OutOfMemoryError(f"no room on {device} for {what}: {cause}; {remedy}") from error


def _steps_and_remedy(setup: WorkerSetup) -> tuple[str, str]:
    """What needs memory behind the weights, and what helps where there is too little."""
    limits = setup.config.limits
    remedy = (
        f"lower limits.max_num_seqs ({limits.max_num_seqs}), max_model_len ({setup.max_model_len}) "
        f"or max_num_batched_tokens ({limits.max_num_batched_tokens})"
    )
    if not setup.cuda_graphs:
        return "steps", remedy
    remedy += (
        f", or cache.gpu_memory_utilization ({setup.config.cache.gpu_memory_utilization}), "
        "shorten cuda_graphs.prompt_sizes, or set cuda_graphs: {enforce_eager: true}"
    )
    return "steps and their CUDA graphs", remedy


def _try_steps(setup: WorkerSetup, runner: ModelRunner, memory: DeviceMemory) -> DeviceMemory:
    """Run the largest steps there can be, so that the allocator's peak is the true one.

    They run on a given number of blocks too: no request shall be the first to have them compiled.
    So do shorter steps with prompts, which may have kernels of their own, if none is captured, or
    if those with a long context never are.
    Captured steps keep the bytes of the largest, for all share one pool.
    """
    runner.attention.allocate_cache(1)
    most = setup.config.limits.max_num_batched_tokens
    is_eager = setup.cuda_graphs and (not runner.prompt_sizes or runner.attention.context_part > 0)
    for num_tokens in (most, *(2**power for power in range((most - 1).bit_length() * is_eager))):
        runner.trial_step(num_tokens)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(runner.device)
    runner.trial_captured_step()
    kept = torch.cuda.memory_reserved(runner.device) - before
    torch.cuda.empty_cache()
    return memory.measure(runner.device, graphs=kept if setup.cuda_graphs else 0)
