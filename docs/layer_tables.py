"""Parts of docs/write/model.md: the signatures that models are built from, and all other names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from results_tables import table

from nanovllm_core import api, layers

BUILT_FROM = (
    *("QKPrep", "RopeConfig", "make_parameter", "ColumnParallelLinear"),
    *("MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear"),
    *("VocabParallelEmbedding", "ParallelLMHead", "RMSNorm", "ZeroCenteredRMSNorm", "Attention"),
    *("norm_linear", "linear_add", "gated_mlp", "gelu_gate_up", "norm_add", "build_cos_sin_cache"),
    *("positive_int", "positive_float", "true_or_false", "nested", "list_of"),
)


def signatures() -> str:
    """The signatures and docstrings of the names that models are built from."""
    return "\n\n".join(
        signature(name, getattr(layers if hasattr(layers, name) else api, name))
        for name in BUILT_FROM
    )


def signature(name: str, called: Any) -> str:
    """The call with a parameter a line, and the docstring below it."""
    found = inspect.signature(called)
    lines, starred = [], False
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        default = "" if one.default is one.empty else f" = {one.default!r}"
        lines.append(f"    {one.name}: {one.annotation}{default},")
    result = "" if inspect.isclass(called) else f" -> {found.return_annotation}"
    says = inspect.cleandoc(called.__doc__ or "")
    return "\n".join(
        [f"### {name}", "", "```text", f"{name}(", *lines, f"){result}", "```", "", says]
    )


def other_names() -> str:
    """The public names of `nanovllm_core.layers` that have no signature above, and their use."""
    rows = []
    for name in sorted(vars(layers), key=str.lower):
        found = getattr(layers, name)
        is_called = inspect.isclass(found) or inspect.isfunction(found)
        if name.startswith("_") or name in BUILT_FROM or not is_called:
            continue
        rows.append((f"`{name}{short_call(found)}`", first_sentence(found)))
    return table(("name", "purpose"), rows)


def short_call(found: Any) -> str:
    """The parameters by name alone; nothing for a protocol, which is not called."""
    if getattr(found, "_is_protocol", False):
        return ""
    return f"({', '.join(parameter_names(inspect.signature(found)))})"


def parameter_names(found: inspect.Signature) -> Iterator[str]:
    starred = False
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not starred:
            yield "*"
            starred = True
        name = f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name
        yield name if one.default is one.empty else f"{name}=…"


def first_sentence(found: Any) -> str:
    """Of the docstring, in one line."""
    text = " ".join(inspect.cleandoc(found.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s+(?=[A-Z])", text)[0].replace("|", "\\|")


LAYERS: Mapping[str, Callable[[], str]] = {"signatures": signatures, "other names": other_names}
