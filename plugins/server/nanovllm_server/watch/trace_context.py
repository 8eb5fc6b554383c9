"""The trace that the request at hand belongs to: set by tracing, carried by the engine's labels."""

from __future__ import annotations

from contextvars import ContextVar

LABEL = "traceparent"
"""The label, and the header of W3C's Trace Context, that names a span."""

current: ContextVar[str] = ContextVar("traceparent", default="")
"""The server's span of this request, as `traceparent` writes it; empty without tracing."""


def trace_labels() -> dict[str, str]:
    """The labels of a request to the engine by which its span belongs to the server's."""
    return {LABEL: current.get()} if current.get() else {}
