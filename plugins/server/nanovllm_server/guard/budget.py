"""The memory that the bodies of all requests of a process may take together."""

from __future__ import annotations

from types import TracebackType

from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import retry_after


class Budget:
    """Bytes that requests share. `taken` is what those under way hold."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.taken = 0


class Share:
    """The part of a budget that one request holds inside of `with`."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0

    def grow(self, size: int) -> None:
        """Hold at least `size` bytes. Raises ApiError (503) where the budget has too few left."""
        budget, more = self._budget, size - self._size
        if more <= 0:
            return
        if budget.taken + more > budget.max_bytes:
            raise ApiError(
                503,
                f"the bodies of the requests under way hold {budget.taken} bytes, and {more} more "
                f"would exceed the limit of {budget.max_bytes}; try again later, or raise "
                "serve.limits.max_total_body_bytes of the server",
                code="bodies_full",
                headers=retry_after(1),
            )
        budget.taken += more
        self._size = size

    def __enter__(self) -> Share:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._budget.taken -= self._size
        self._size = 0
