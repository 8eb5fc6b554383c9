"""A second CUDA stream, for work that need not wait for what the current one does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Work inside `beside` runs at once with what the current stream gets after `fork`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def fork(self) -> None:
        """What follows on the side stream waits for the current stream as it is now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch on the side stream; at the end the current stream waits for it."""
        current = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)
