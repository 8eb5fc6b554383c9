"""Compiles Triton kernels in parallel, ahead of the steps that run them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from triton import AsyncCompileMode, knobs


class CompileAhead(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """Within, threads compile and load every Triton kernel that is launched for the first time.

    Its launches do nothing within, so they must be of no effect anyway, as in a capture that is
    thrown away. Leaving waits until all are loaded. A kernel that fails to compile raises its error
    at its next launch. (Triton's own mode waits for a kernel at its first launch.)
    """

    def __init__(self) -> None:
        super().__init__(ThreadPoolExecutor())
        self._device = torch.cuda.current_device()
        self._is_over = False
        # It has what Triton reads of a compiled kernel when it launches one.
        self._left_out = SimpleNamespace(
            function=None,
            packed_metadata=None,
            launch_metadata=self._leave_out,
            run=self._leave_out,
        )

    def __enter__(self) -> Callable[[], bool]:
        self._compiled: list[str] = []
        self._listener, knobs.compilation.listener = knobs.compilation.listener, self._listen
        super().__enter__()
        return self._is_needed

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._is_over = True
            knobs.compilation.listener = self._listener
            self.executor.shutdown()
            for future in self.future_kernels.values():
                if future.kernel is None:  # It failed, or Ctrl-C came: Triton compiles it again.
                    future.finalize_compile(None)

    def submit(
        self, key: object, compile_kernel: Callable[[], Any], store: Callable[[Any], None]
    ) -> Any:
        """Triton calls it for a kernel that is not in its memory; `store` puts one there."""

        def load() -> Any:
            with suppress(Exception), torch.cuda.device(self._device):
                kernel = compile_kernel()
                kernel.run  # noqa: B018 - reading it loads the kernel
                return kernel

        store(self._left_out)  # else the next launch would come here, too
        super().submit((key, len(self.raw_futures)), load, store)
        return self._left_out

    def _leave_out(self, *_: object) -> None:
        if self._is_over:  # A second Ctrl-C came while the first was dealt with.
            raise RuntimeError("a kernel's compilation was interrupted; start a new process")

    def _is_needed(self) -> bool:
        """Whether one of the kernels so far was not in Triton's cache on disk."""
        return any(self._compiled for _ in as_completed(self.raw_futures))

    def _listen(self, *, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            self._compiled.append(src.name)
