"""Settings of config.json, checked: with a wrong one a model would start and write nonsense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    value = default if (value := settings.get(key)) is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong(where, key, "a positive integer", value)
    return value


def positive_float(
    settings: Mapping[str, Any], key: str, default: float | None = None, *, where: str = FILE
) -> float:
    """A finite number above 0 of config.json, not NaN; otherwise as `positive_int`."""
    value = default if (value := settings.get(key)) is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise wrong(where, key, "a positive number", value)
    return float(value)


def true_or_false(settings: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A switch of config.json. Absent means `default`, null means False, as for transformers.

    Raises ArchitectureError for anything else: "false", a text, would count as true.
    """
    value = settings.get(key, default)
    if value not in (None, True, False):
        raise wrong(FILE, key, "true or false", value)
    return bool(value)


def nested(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Settings within config.json's; absent and null mean none, any other value is refused."""
    value = settings.get(key)
    if not isinstance(value, Mapping | None):
        raise wrong(FILE, key, "a mapping of settings", value)
    return value or {}


def list_of(settings: Mapping[str, Any], key: str, kind: type) -> Sequence[Any]:
    """A list of config.json whose entries are all int, or all str; otherwise as `nested`."""
    value = settings.get(key)
    if not isinstance(value, list | tuple | None) or {*map(type, value or ())} - {kind}:
        raise wrong(FILE, key, f"a list of {kind.__name__}", value)
    return value or ()


def wrong(where: str, key: str, kind: str, value: Any) -> ArchitectureError:
    """The error for a setting that is not what it must be."""
    return ArchitectureError(
        f"{where}: {key} must be {kind}, not {shown(value)}; check the checkpoint's config.json"
    )
