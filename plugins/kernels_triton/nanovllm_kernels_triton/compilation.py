"""Compiles Triton kernels in parallel, ahead of the steps that run them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from inspect import getclosurevars
from threading import Lock
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager

from nanovllm_kernels_triton.compilers import (
    NUM_HERE,
    CompileJob,
    Compilers,
    count_processes,
    take,
)

logger = logging.getLogger(__name__)


class CompileAhead(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """Within, every Triton kernel that is launched for the first time is compiled and loaded.

    Threads do it, with kernels from Triton's cache on disk. What is not there is compiled by other
    processes but for the first kernels: at most `num_processes` at once, by default one for each
    processor if there are more than a few, up to MOST.

    Its launches do nothing within, so they must be of no effect anyway, as in a capture that is
    thrown away; other threads wait for the kernel and launch it. Leaving waits until all are
    loaded. A kernel that fails to compile raises its error at its next launch. (Triton's own mode
    waits for a kernel at its first launch.)
    """

    def __init__(self, num_processes: int | None = None) -> None:
        if num_processes is None:
            num_processes = count_processes()
        super().__init__(ThreadPoolExecutor(NUM_HERE + num_processes))
        self._has_processes = num_processes > 0
        self._device = torch.cuda.current_device()
        self._loading: defaultdict[object, Lock] = defaultdict(Lock)
        """By the Triton function that the kernels are variants of."""

    def __enter__(self) -> Callable[[], bool]:
        self._num_missing = 0
        self._compilers: Compilers | None = None
        super().__enter__()
        return self._is_needed

    def __exit__(self, error_type: type[BaseException] | None, *error: Any) -> None:
        try:
            if error_type is None:
                super().__exit__(error_type, *error)
        finally:
            # Nothing waits here: Ctrl-C comes again and again until the start has ended.
            active_mode.set(None)
            for future in self.future_kernels.values():
                if future.kernel is None:  # It failed, or Ctrl-C came: Triton compiles it again.
                    future.finalize_compile(None)
            self.executor.shutdown(wait=False, cancel_futures=True)
            if self._compilers is not None:
                self._compilers.close()

    def submit(
        self, key: str, compile_kernel: Callable[[], Any], store: Callable[[Any], None]
    ) -> Any:
        """Triton calls it for a kernel that is not in its memory; `store` puts one there."""
        job = _job(compile_kernel)
        compilers = None if _is_cached(key, job.source.name) else self._compilers_for_next()

        def load() -> Any:
            with suppress(Exception), torch.cuda.device(self._device):
                if compilers is not None:
                    compilers.compile(job)
                kernel = compile_kernel()  # which finds it in the cache then
                # Variants mostly share a launcher, which the first has the C compiler make.
                with self._loading[kernel.src.fn]:
                    kernel.run  # noqa: B018 - reading it loads the kernel
                return kernel

        super().submit((key, len(self.raw_futures)), load, store)
        left_out = _LeftOut(self, self.raw_futures[-1])
        store(left_out)  # else the next launch would come here, too
        return left_out

    def _compilers_for_next(self) -> Compilers | None:
        """For a kernel that is not in the cache; None of the first few, and without processes."""
        self._num_missing += 1
        if self._has_processes and self._compilers is None:
            try:
                self._compilers = take()
            except OSError as error:
                self._has_processes = False
                logger.warning("threads compile all kernels, for no process can: %s", error)
        return self._compilers if self._num_missing > NUM_HERE else None

    def _is_needed(self) -> bool:
        """Whether one of the kernels so far was not in Triton's cache on disk."""
        return self._num_missing > 0


def _job(compile_kernel: Callable[[], Any]) -> CompileJob:
    """From the variables that Triton's function closes over, for it takes no arguments."""
    outer = getclosurevars(compile_kernel).nonlocals
    return CompileJob(outer["src"], outer["target"], outer["options"].__dict__, outer["env_vars"])


def _is_cached(key: str, name: str) -> bool:
    """Whether `triton.compile` would find the kernel of this key on disk."""
    file_name = f"{name[:150]}.json"
    group = get_cache_manager(sha256(key.encode()).hexdigest()).get_group(file_name)
    return file_name in (group or {})


class _LeftOut:
    """Stands for a kernel while it is compiled: it has what Triton reads to launch one."""

    function = None
    packed_metadata = None

    def __init__(self, mode: CompileAhead, kernel: Future[Any]) -> None:
        self._mode = mode
        self._kernel = kernel

    def launch_metadata(self, *_: object) -> None:
        """None: it is for hooks, and the launch may be left out."""

    def run(self, x: int, y: int, z: int, stream: int, _: None, __: None, *arguments: Any) -> None:
        """Leave the launch out where the mode is entered; elsewhere wait for the kernel."""
        if active_mode.get() is self._mode:
            return
        kernel = None
        with suppress(CancelledError):
            kernel = self._kernel.result()
        if kernel is None:
            raise RuntimeError(
                "a kernel that another thread compiled is not there, for it failed or was "
                "interrupted; launch it again"
            )
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, *arguments)
