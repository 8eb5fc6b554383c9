"""Facts as data: what is installed, what a configuration would choose, and what would fail."""

from nanovllm_core.diagnostics.explain import (
    Decisions as Decisions,
)
