"""The public names of the core's five doors, with signatures and fields.

    python tests/api/listing.py     # writes tests/api/public_names.txt

A change of a contract shows as a change of that file; see docs/plugins.md for what it asks of the
contract version.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from nanovllm_core import api, frontend, kernels, layers, worker

FILE = Path(__file__).parent / "public_names.txt"


DOORS = (api, frontend, layers, kernels, worker)


def public_names(door: ModuleType) -> list[str]:
    """The names that a door re-exports, sorted; its submodules are none of them."""
    return sorted(
        name
        for name, value in vars(door).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    )


def listing() -> str:
    """Every public name, sorted within its door, one block each."""
    lines = []
    for door in DOORS:
        lines += ["", f"# {door.__name__}"]
        for name in public_names(door):
            lines += describe(name, getattr(door, name))
    return "\n".join(lines[1:]) + "\n"


def describe(name: str, value: Any) -> Iterator[str]:
    """The lines of one name."""
    if inspect.isclass(value):
        bases = [b.__name__ for b in value.__bases__ if b.__name__ not in ("object", "Generic")]
        yield f"class {name}" + (f"({', '.join(bases)})" if bases else "")
        if not issubclass(value, BaseException):
            yield from (f"    {line}" for line in [*fields(value), *methods(value)])
    elif inspect.isfunction(value):
        yield f"def {name}{signature(value)}"
    else:
        yield f"{name} = {value!r}" if not is_object(value) else f"{name}: {type(value).__name__}"


def is_object(value: Any) -> bool:
    """True for what would print its address."""
    return " at 0x" in repr(value)


def signature(function: Any) -> inspect.Signature:
    """The signature with annotations as they are written."""
    found = inspect.signature(function)
    parameters = [
        parameter
        if parameter.annotation is parameter.empty
        else parameter.replace(annotation=Written(parameter.annotation))
        for parameter in found.parameters.values()
    ]
    return found.replace(parameters=parameters, return_annotation=Written(found.return_annotation))


class Written(str):
    """A text that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def fields(cls: type) -> Iterator[str]:
    """The data of a class: of a dataclass with defaults, else what is annotated."""
    if dataclasses.is_dataclass(cls):
        yield from (f"{field.name}: {field.type}{default(field)}" for field in own_fields(cls))
    else:
        own = vars(cls).get("__annotations__", {})
        hidden = ("_", "model_config")
        yield from (f"{name}: {kind}" for name, kind in own.items() if not name.startswith(hidden))


def own_fields(cls: Any) -> Iterator[dataclasses.Field[Any]]:
    """The fields that a dataclass does not inherit."""
    inherited = {
        name for base in cls.__bases__ for name in getattr(base, "__dataclass_fields__", ())
    }
    yield from (field for field in dataclasses.fields(cls) if field.name not in inherited)


def default(field: dataclasses.Field[Any]) -> str:
    """` = value`, or nothing for a field that must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return f" = {getattr(field.default_factory, '__name__', 'made')}()"
    if field.default is dataclasses.MISSING:
        return ""
    value = field.default
    if isinstance(value, frozenset):
        return f" = {{{', '.join(sorted(map(repr, value)))}}}"
    name = getattr(value, "__name__", "")
    return f" = {name or repr(value)}"


def methods(cls: type) -> Iterator[str]:
    """The public methods that a class itself defines, and how it is made."""
    made = ("__init__",) if not dataclasses.is_dataclass(cls) else ()
    for name, value in vars(cls).items():
        if name.startswith("_") and name not in made:
            continue
        mark = "abstract " if getattr(value, "__isabstractmethod__", False) else ""
        if isinstance(value, property | cached_property):
            getter = value.fget if isinstance(value, property) else value.func
            yield f"{mark}property {name} -> {signature(getter).return_annotation}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{type(value).__name__} {name}{signature(value.__func__)}"
        elif inspect.isfunction(value) and value.__module__.startswith("nanovllm_core"):
            yield f"{mark}def {name}{signature(value)}"


if __name__ == "__main__":
    FILE.write_text(listing(), encoding="utf-8")
    print(f"wrote {FILE}")
