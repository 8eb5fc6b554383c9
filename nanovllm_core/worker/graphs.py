"""CUDA graphs of whole steps, from the row tables to the sampled ids: one per padded size."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nanovllm_core.errors import GraphSafetyError
from nanovllm_core.interfaces.kernels import CompilingKernels, LoadingKernels, Product
from nanovllm_core.worker.progress import Laps, counting

_MIN_CHUNKS = 8
_TOKENS_PER_CHUNK = 16


class StepKey(NamedTuple):
    """The key of a captured step: its kind and its padded sizes.

    A decode step has as many tokens as rows. A mixed one has `num_tokens` of at most `num_chunks`
    prompts, beside `num_rows` decoding rows of one token each.
    """

    kind: Literal["decode", "mixed"]
    num_tokens: int
    num_rows: int

    @classmethod
    def decode(cls, bucket: int) -> StepKey:
        """The key of a decode step of `bucket` rows."""
        return cls("decode", bucket, bucket)

    @property
    def total_tokens(self) -> int:
        """The tokens of a forward pass of the step, padding included."""
        return self.num_tokens + (self.num_rows if self.kind == "mixed" else 0)

    @property
    def num_chunks(self) -> int:
        """The prompts for which a mixed step has room.

        Each of them, there or not, takes its part of the output head, of sampling and of
        attention's grid, so there is room for as many as fill the tokens with short prompts.
        """
        return min(self.num_rows, max(_MIN_CHUNKS, self.num_tokens // _TOKENS_PER_CHUNK))

    def __str__(self) -> str:
        prompts = f" beside {self.num_tokens} prompt tokens" if self.kind == "mixed" else ""
        return f"{self.num_rows} rows{prompts}"


class StepGraphs:
    """Captures steps into one memory pool, and replays them.

    `watched` returns the tensors that captured kernels read and that the graphs do not own, by
    name. In debug mode every replay compares their addresses with those at capture.
    """

    def __init__(
        self,
        device: torch.device,
        watched: Callable[[], Mapping[str, Tensor]],
        *,
        debug: bool = False,
    ) -> None:
        self._device = device
        self._watched = watched
        self._debug = debug
        self._graphs: dict[StepKey, torch.cuda.CUDAGraph] = {}
        self._addresses: dict[StepKey, dict[str, int]] = {}

    def capture(
        self,
        keys: Collection[StepKey],
        step: Callable[[StepKey], None],
        laps: Laps,
        *,
        warm_up: bool = True,
    ) -> None:
        """Capture `step(key)` for every key, those of the most tokens first: they lay out the pool.

        A run before each capture compiles kernels and creates handles, unless without `warm_up`.
        """
        largest_first = sorted(keys, key=lambda key: key.total_tokens, reverse=True)
        with _pool(self._device) as pool, counting("Capturing CUDA graphs") as progress:
            for done, key in enumerate(largest_first, start=1):
                if warm_up:
                    step(key)
                    torch.cuda.current_stream(self._device).synchronize()
                    laps.end("warm_up")
                self._graphs[key] = _capture(partial(step, key), pool)
                self._addresses[key] = _addresses(self._watched())
                progress(done, len(keys))
                laps.end("capture")
        laps.end("capture")

    def replay(self, key: StepKey) -> None:
        """Launch the captured step of `key` on the current stream."""
        if self._debug:
            self._check(key)
        self._graphs[key].replay()

    def clear(self) -> None:
        """Free the graphs; must come before the blocks, weights and process group go."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _check(self, key: StepKey) -> None:
        now = _addresses(self._watched())
        for name, captured in self._addresses[key].items():
            if now.get(name) != captured:
                raise GraphSafetyError(
                    f"the graph of {key} was captured with {name} at {captured:#x}, "
                    f"which is now at {now.get(name, 0):#x}: it was made anew after capture; "
                    "allocate it once, in allocate(), and write into it"
                )


def _addresses(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@contextmanager
def _pool(device: torch.device) -> Iterator[Any]:
    """A memory pool for graphs. They are captured on the current stream, not a default one.

    No garbage is collected: that could free device memory, which capture forbids.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        torch.cuda.empty_cache()
        torch.cuda.current_blas_handle()  # is made now, for no capture can
        yield torch.cuda.graph_pool_handle()
    finally:
        if was_enabled:
            gc.enable()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _capture(launch: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # `torch.cuda.graph` would empty the allocator's cache for each of them. Other threads may load
    # kernels meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="relaxed")
    try:
        launch()
    finally:
        graph.capture_end()
    return graph


@torch.inference_mode()
def compile_launches(
    kernels: CompilingKernels,
    device: torch.device,
    first: Iterable[Callable[[], object]],
    others: Iterable[Callable[[], object]],
    products: Iterable[Product] = (),
) -> None:
    """Compile the kernels of these launches in parallel, before any of them has run.

    They are captured, and the graphs thrown away. Where all kernels of the first were compiled by
    an earlier start, those of the others mostly were, too: they are loaded, or compiled one by one,
    when they are needed. Meanwhile a library loads what it needs for `products`.
    """
    graphs = []  # a pool without graphs cannot be used again
    with warnings.catch_warnings(), kernels.compile_ahead() as is_needed, _pool(device) as pool:
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # but for such kernels
        graphs += [_capture(launch, pool) for launch in first]
        if is_needed():
            graphs += [_capture(launch, pool) for launch in others]
        elif isinstance(kernels, LoadingKernels):
            kernels.load_products(products)
    del graphs
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)  # no step will need what all of them together did
