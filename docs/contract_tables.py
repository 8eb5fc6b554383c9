"""Tables of the contracts: fields and methods with their types, from the code that states them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from results_tables import table

from nanovllm_core.interfaces.attention import DecodeMetadata, PrefillMetadata
from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
    SchedulingPolicy,
)
from nanovllm_core.registry.kinds import DECLARATION, KINDS


@dataclass(frozen=True)
class Member:
    """A field, a property or a method, as it is written."""

    name: str
    type: str
    text: str
    is_method: bool = False


def members(cls: type) -> Iterator[Member]:
    """What a class states of itself, each with its docstring; ValueError where it has none."""
    [node] = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    for one, after in zip_longest(node.body, node.body[1:]):
        if isinstance(one, ast.AnnAssign):
            yield Member(ast.unparse(one.target), ast.unparse(one.annotation), docstring(after))
        elif isinstance(one, ast.FunctionDef):
            text = inspect.cleandoc(ast.get_docstring(one) or "").partition("\n\n")[0]
            is_property = any(ast.unparse(mark) == "property" for mark in one.decorator_list)
            assert one.returns is not None
            if is_property:
                yield Member(one.name, ast.unparse(one.returns), one_line(text))
            else:
                one.args.args = one.args.args[1:]
                call = f"{one.name}({ast.unparse(one.args)})"
                yield Member(call, ast.unparse(one.returns), one_line(text), is_method=True)


def docstring(node: ast.stmt | None) -> str:
    """The text that stands behind a field."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        raise ValueError("a field of a contract has no docstring")
    return one_line(inspect.cleandoc(str(node.value.value)))


def one_line(text: str) -> str:
    return " ".join(text.split())


def fields_of(cls: type) -> str:
    """A table of what is read of a class."""
    rows = [
        # A bar would end the cell.
        (f"`{one.name}`", f"`{one.type.replace(' | ', ' or ')}`", one.text)
        for one in members(cls)
        if not one.is_method
    ]
    return table((f"of a `{cls.__name__}`", "type", "meaning"), rows)


def methods_of(cls: type) -> str:
    """A table of what a plugin's class defines."""
    rows = [(f"`{one.name}`", f"`{one.type}`", one.text) for one in members(cls) if one.is_method]
    return table((f"method of a `{cls.__name__}`", "returns", "meaning"), rows)


def versions_table() -> str:
    """The current version of each kind's contract, and the oldest that is taken."""
    kinds = sorted([*KINDS.values(), DECLARATION], key=lambda kind: kind.name)
    rows = [(f"`{kind.name}`", str(kind.contract), str(kind.oldest_contract)) for kind in kinds]
    return table(("kind", "current contract", "oldest accepted"), rows)


PLUGINS: Mapping[str, Callable[[], str]] = {"versions": versions_table}

METADATA: Mapping[str, Callable[[], str]] = {
    "decode metadata": partial(fields_of, DecodeMetadata),
    "prefill metadata": partial(fields_of, PrefillMetadata),
}

_REQUEST = partial(fields_of, RequestView)

POLICY: Mapping[str, Callable[[], str]] = {
    "policy": partial(methods_of, SchedulingPolicy),
    "request": _REQUEST,
}

SCHEDULER: Mapping[str, Callable[[], str]] = {
    "scheduler": partial(methods_of, Scheduler),
    "state": partial(fields_of, SchedulerState),
    "share": partial(fields_of, PrefillShare),
    "request": _REQUEST,
}
