"""What computes: the operators of an attention plugin, and what they lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from nanovllm_core.api import PluginLoadError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Backend:
    """The operators of one plugin, and what they cannot do.

    `lacks`: parameters that are refused, each with its remedy. `check` refuses tensors q, k and v
    that the operators do not take; its first argument is the function's name.
    """

    name: str
    packed_attention: Callable[..., tuple[Tensor, Tensor]]
    paged_attention: Callable[..., tuple[Tensor, Tensor]]
    lacks: Mapping[str, str]
    check: Callable[[str, Tensor, Tensor, Tensor], None]

    def refuse_lacking(self, function: str, **parameters: object) -> None:
        """Refuse parameters that were given and that this backend lacks."""
        for parameter, value in parameters.items():
            if value is not None and parameter in self.lacks:
                refuse(function, parameter, value, f"{self.name} {self.lacks[parameter]}")


def refuse(function: str, parameter: str, value: object, reason: str) -> NoReturn:
    """Raise UnsupportedError with a function's parameter, its value, and limit and remedy."""
    if isinstance(value, Tensor):
        value = f"tensor {list(value.shape)}"
    raise UnsupportedError(f"{function}: {parameter}={value} is not supported: {reason}")


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient is asked of one of them here."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_installed(name: str) -> bool:
    """Whether the plugin of a backend is installed; nothing of it is imported."""
    return find_spec(f"nanovllm_attention_{name}") is not None


def load_operators(name: str) -> ModuleType:
    """The module of operators of a backend's plugin.

    Raises PluginLoadError with the line that installs the plugin where it is missing.
    """
    if not is_installed(name):
        raise PluginLoadError(
            f"flash-attn's functions on {name} need nanovllm-attention-{name}, which is not "
            f"installed: {install_line(name)}"
        )
    return import_module(f"nanovllm_attention_{name}.operators")


def install_line(name: str) -> str:
    """The command that installs a backend's plugin."""
    folder = f"plugins/attention_{name}"
    return f"pip install nanovllm-attention-{name} (from a checkout: pip install -e {folder})"
