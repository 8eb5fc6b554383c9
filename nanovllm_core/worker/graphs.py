"""CUDA graphs of decode steps: one per bucket, from the row tables to the sampled ids."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from nanovllm_core.errors import GraphSafetyError
from nanovllm_core.worker.progress import Laps


class DecodeGraphs:
    """Captures a step at every bucket into one memory pool, and replays it.

    `watched` returns the tensors that captured kernels read and that the graphs do not own, by
    name. In debug mode every replay compares their addresses with those at capture.
    """

    def __init__(
        self,
        device: torch.device,
        watched: Callable[[], Mapping[str, Tensor]],
        *,
        debug: bool = False,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
        laps: Laps | None = None,
    ) -> None:
        self._device = device
        self._watched = watched
        self._debug = debug
        self._progress = progress
        self._laps = laps or Laps()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._addresses: dict[int, dict[str, int]] = {}

    def capture(self, buckets: Iterable[int], step: Callable[[int], None]) -> None:
        """Capture `step(bucket)` at every bucket, the largest first: it lays out the pool.

        A run before each capture compiles kernels and creates handles, which none can capture.
        """
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream), _no_collection():
            torch.cuda.empty_cache()
            for bucket in self._progress(sorted(buckets, reverse=True)):
                step(bucket)
                stream.synchronize()
                self._laps.end("warm_up")
                graph = torch.cuda.CUDAGraph()
                # `torch.cuda.graph` would empty the allocator's cache for each of them.
                graph.capture_begin(pool=pool)
                try:
                    step(bucket)
                finally:
                    graph.capture_end()
                self._graphs[bucket] = graph
                self._addresses[bucket] = _addresses(self._watched())
                self._laps.end("capture")
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        self._laps.end("capture")

    def replay(self, bucket: int) -> None:
        """Launch the captured step of `bucket` on the current stream."""
        if self._debug:
            self._check(bucket)
        self._graphs[bucket].replay()

    def clear(self) -> None:
        """Free the graphs; must come before the pages, weights and process group go."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _check(self, bucket: int) -> None:
        now = _addresses(self._watched())
        for name, captured in self._addresses[bucket].items():
            if now.get(name) != captured:
                raise GraphSafetyError(
                    f"the graph of bucket {bucket} was captured with {name} at {captured:#x}, "
                    f"which is now at {now.get(name, 0):#x}: it was made anew after capture; "
                    "allocate it once, in allocate(), and write into it"
                )


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection during capture could free device memory, which capture forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _addresses(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
