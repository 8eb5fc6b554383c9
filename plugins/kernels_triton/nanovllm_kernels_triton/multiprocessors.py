"""The size of the GPU that plans of kernels are made for."""

from __future__ import annotations

MULTIPROCESSORS = 132
"""Of an H100 or H200: as many programs fill it. A guide, not a limit: all run on any GPU."""
