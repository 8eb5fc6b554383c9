"""Is the code that `impl` names there? Looked for without importing it, so listings stay quick."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from itertools import accumulate

# What may define a name without spelling it.
_DYNAMIC = re.compile(r"import \*|\b__getattr__\b|\bglobals\(\)")


def missing_code(impl: str) -> str | None:
    """Why `"package.module:Object"` cannot be loaded, as far as that shows without importing it.

    None where nothing is wrong, or where only an import would tell.
    """
    module, _, name = impl.partition(":")
    cannot = f"its code {impl!r} cannot be loaded: "
    lacks = f"{cannot}{module} has no {name!r}"
    try:
        if module in sys.modules:
            return None if _has(sys.modules[module], name) else lacks
        spec = _find(module)
        if spec is None:
            return f"{cannot}there is no module {module!r}"
        source = getattr(spec.loader, "get_source", lambda _: None)(module)
    except Exception:  # finders, loaders and modules are anybody's code; an import will tell
        return None
    first = name.partition(".")[0]
    if source is None or _DYNAMIC.search(source) or re.search(rf"\b{re.escape(first)}\b", source):
        return None
    return lacks


def _find(module: str) -> ModuleSpec | None:
    """As importlib finds it, but no package on the way there is imported."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    for name in accumulate(module.split("."), "{}.{}".format):
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next(filter(None, found), None)
        path = spec.submodule_search_locations if spec else None
        if path is None and name != module:
            return None
    return spec


def _has(found: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
