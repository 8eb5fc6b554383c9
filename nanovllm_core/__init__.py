"""nanovllm: a small LLM inference engine whose parts are plugins.

from nanovllm_core import LLM, SamplingParams

with LLM("demo") as llm:
    print(llm.generate("Once upon a time", SamplingParams(temperature=0))[0].text)
"""

from __future__ import annotations

import ast
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm_core.config.settings import EngineConfig as EngineConfig
    from nanovllm_core.config.sources import load_config as load_config
    from nanovllm_core.engine import RequestOutput as RequestOutput
    from nanovllm_core.errors import NanoVLLMError as NanoVLLMError
    from nanovllm_core.frontend.llm import LLM as LLM
    from nanovllm_core.interfaces.sampling_params import SamplingParams as SamplingParams
    from nanovllm_core.registry.hookspecs import hookimpl as hookimpl

__version__ = "0.1.0"

if not TYPE_CHECKING:  # A type checker would take any name to be there.
    # The public names and their modules, as the imports above state them.
    _HOMES = {
        name.name: statement.module
        for statement in ast.walk(ast.parse(__loader__.get_data(__file__)))
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
        if name.name == name.asname
    }
    __all__ = ["__version__", *_HOMES]

    def __getattr__(name: str) -> Any:
        """Import a public name on first use: the command must watch for Ctrl-C before that."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
