"""nanovllm: a small LLM inference engine whose parts are plugins.

from nanovllm_core import LLM, SamplingParams

with LLM("demo") as llm:
    print(llm.generate("Once upon a time", SamplingParams(temperature=0))[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm_core.config.settings import EngineConfig
    from nanovllm_core.config.sources import load_config
    from nanovllm_core.engine import RequestOutput
    from nanovllm_core.errors import NanoVLLMError
    from nanovllm_core.frontend.llm import LLM
    from nanovllm_core.interfaces.sampling_params import SamplingParams
    from nanovllm_core.registry.hookspecs import hookimpl

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "EngineConfig",
    "NanoVLLMError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "hookimpl",
    "load_config",
]

_HOMES = {
    "EngineConfig": "config.settings",
    "LLM": "frontend.llm",
    "NanoVLLMError": "errors",
    "RequestOutput": "engine",
    "SamplingParams": "interfaces.sampling_params",
    "hookimpl": "registry.hookspecs",
    "load_config": "config.sources",
}


if not TYPE_CHECKING:  # A type checker would take any name to be there.

    def __getattr__(name: str) -> Any:
        """Import a public name on first use: a plugin's light module must not load torch."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
