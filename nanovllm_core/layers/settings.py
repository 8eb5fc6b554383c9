"""Settings of config.json, checked: with a wrong one a model would start and write nonsense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nanovllm_core.errors import ArchitectureError, shown

FILE = "config.json"
T = TypeVar("T")


def positive_int(
    settings: Mapping[str, Any], key: str, default: int | None = None, *, where: str = FILE
) -> int:
    """A size or a length of config.json, at least 1; absent and null mean `default`.

    Raises ArchitectureError, which names `where`, the key and the value: also where there is
    neither a value nor a default.
    """
    value = default if (value := settings.get(key)) is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(where, key, "a positive integer", value)
    return value


def positive_float(
    settings: Mapping[str, Any], key: str, default: float | None = None, *, where: str = FILE
) -> float:
    """A finite number above 0 of config.json, not NaN; otherwise as `positive_int`."""
    value = default if (value := settings.get(key)) is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _wrong(where, key, "a positive number", value)
    return float(value)


def true_or_false(settings: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A switch of config.json. Absent means `default`, null means False, as for transformers.

    Raises ArchitectureError for anything else: "false", a text, would count as true.
    """
    value = settings.get(key, default)
    if value not in (None, True, False):
        raise _wrong(FILE, key, "true or false", value)
    return bool(value)


def mapping(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A group of settings of config.json; absent and null mean an empty one.

    Raises ArchitectureError for anything else.
    """
    value = settings.get(key)
    if not isinstance(value, Mapping | None):
        raise _wrong(FILE, key, "a mapping of settings", value)
    return value or {}


def list_of(settings: Mapping[str, Any], key: str, kind: type[T]) -> Sequence[T]:
    """A list of config.json whose entries are all int, or all str; otherwise as `mapping`."""
    value = settings.get(key)
    if not isinstance(value, list | tuple | None) or {*map(type, value or ())} - {kind}:
        raise _wrong(FILE, key, f"a list of {kind.__name__}", value)
    return value or ()


def _wrong(where: str, key: str, kind: str, value: Any) -> ArchitectureError:
    return ArchitectureError(
        f"{where}: {key} must be {kind}, not {shown(value)}; check the checkpoint's config.json"
    )
