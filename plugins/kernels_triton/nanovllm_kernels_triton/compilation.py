"""Compiles Triton kernels in parallel, ahead of the steps that run them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from threading import Lock, local
from typing import Any

import torch
from triton import AsyncCompileMode, knobs
from triton.runtime._async_compile import active_mode


class CompileAhead(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """Within, threads compile and load every Triton kernel that is launched for the first time.

    Its launches do nothing within, so they must be of no effect anyway, as in a capture that is
    thrown away; other threads wait for the kernel and launch it. Leaving waits until all are
    loaded. A kernel that fails to compile raises its error at its next launch. (Triton's own mode
    waits for a kernel at its first launch.)
    """

    def __init__(self) -> None:
        super().__init__(ThreadPoolExecutor())
        self._device = torch.cuda.current_device()
        self._loading: defaultdict[object, Lock] = defaultdict(Lock)
        """By the Triton function that the kernels are variants of."""

    def __enter__(self) -> Callable[[], bool]:
        self._compiled: list[str] = []
        _listen()
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
            _end_listening()
            self.executor.shutdown(wait=False, cancel_futures=True)

    def submit(
        self, key: object, compile_kernel: Callable[[], Any], store: Callable[[Any], None]
    ) -> Any:
        """Triton calls it for a kernel that is not in its memory; `store` puts one there."""

        def load() -> Any:
            _compiling.names = self._compiled
            with suppress(Exception), torch.cuda.device(self._device):
                kernel = compile_kernel()
                # Variants mostly share a launcher, which the first has the C compiler make.
                with self._loading[kernel.src.fn]:
                    kernel.run  # noqa: B018 - reading it loads the kernel
                return kernel

        super().submit((key, len(self.raw_futures)), load, store)
        left_out = _LeftOut(self, self.raw_futures[-1])
        store(left_out)  # else the next launch would come here, too
        return left_out

    def _is_needed(self) -> bool:
        """Whether one of the kernels so far was not in Triton's cache on disk."""
        return any(self._compiled for _ in as_completed(self.raw_futures))


_compiling = local()
"""Of a thread that compiles: `names`, its mode's list of kernels that were not in the cache."""
_lock = Lock()
_num_entered = 0
_listener_before: Any = None


def _listen() -> None:
    """Have Triton say what it compiles; starts of several threads may overlap."""
    global _num_entered, _listener_before
    with _lock:
        if _num_entered == 0:
            _listener_before, knobs.compilation.listener = knobs.compilation.listener, _note
        _num_entered += 1


def _end_listening() -> None:
    global _num_entered
    with _lock:
        _num_entered -= 1
        if _num_entered == 0:
            knobs.compilation.listener = _listener_before


def _note(*, src: Any, cache_hit: bool, **_: object) -> None:
    if not cache_hit and hasattr(_compiling, "names"):
        _compiling.names.append(src.name)


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
