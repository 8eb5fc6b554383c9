"""Why a plugin cannot serve a device or a dtype: a sentence each, with the value and the limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nanovllm_core.errors import in_ranges

Capability = tuple[int, int]


def unmet_device(devices: Iterable[str], device: str) -> list[str]:
    """`device` is "cuda" or "cuda:0"; `devices` are types of torch devices."""
    kind = device.split(":")[0]
    return [] if kind in devices else [f"does not run on {kind}, only on {in_order(devices)}"]


def unmet_dtype(dtypes: Iterable[str], dtype: str) -> list[str]:
    """Names without "torch."."""
    return [] if dtype in dtypes else [f"does not compute in {dtype}, only in {in_order(dtypes)}"]


def unmet_capability(
    low: Capability | None, high: Capability | None, here: Capability | None
) -> list[str]:
    """Compute capabilities, both bounds included; None is no bound, or a GPU that is not known."""
    if low is None and high is None:
        return []
    if here is None:
        return ["depends on the GPU's compute capability, which is unknown"]
    reasons = []
    if low is not None and here < low:
        reasons.append(f"needs compute capability {_dots(low)}, and this GPU has {_dots(here)}")
    if high is not None and here > high:
        reasons.append(f"stops at compute capability {_dots(high)}, and this GPU has {_dots(here)}")
    return reasons


def in_order(values: Iterable[Any]) -> str:
    """All values in their order, whole numbers in a row as a range, for messages."""
    return ", ".join(map(str, in_ranges(values))) or "none"


def _dots(version: Capability) -> str:
    return f"{version[0]}.{version[1]}"
