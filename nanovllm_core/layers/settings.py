"""Settings of config.json, checked: with a wrong one a model would start and write nonsense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanovllm_core.errors import ArchitectureError, shown

FILE = "config.json"


def positive_int(
    settings: Mapping[str, Any], key: str, default: int | None = None, *, where: str = FILE
) -> int:
    """A size or a length of config.json, at least 1; absent and null mean `default`.

    Raises ArchitectureError, which names `where`, the key and the value: also where there is
    neither a value nor a default.
    """
    value = settings.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(where, key, "integer", value)
    return value


def positive_float(
    settings: Mapping[str, Any], key: str, default: float | None = None, *, where: str = FILE
) -> float:
    """A finite number above 0 of config.json, not NaN; otherwise as `positive_int`."""
    value = settings.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _wrong(where, key, "number", value)
    return float(value)


def true_or_false(settings: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A switch of config.json. Absent means `default`, null means False, as for transformers.

    Raises ArchitectureError for anything else: "false", a text, would count as true.
    """
    value = settings.get(key, default)
    if value not in (None, True, False):
        raise ArchitectureError(
            f"{FILE}: {key} must be true or false, not {shown(value)}; "
            "check the checkpoint's config.json"
        )
    return bool(value)


def _wrong(where: str, key: str, kind: str, value: Any) -> ArchitectureError:
    return ArchitectureError(
        f"{where}: {key} must be a positive {kind}, not {shown(value)}; "
        "check the checkpoint's config.json"
    )
