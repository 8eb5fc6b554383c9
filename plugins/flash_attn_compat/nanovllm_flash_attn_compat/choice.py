"""Which backend serves tensors of a device."""

from __future__ import annotations

import logging
from importlib import import_module

import torch

from nanovllm_core.api import PluginLoadError
from nanovllm_flash_attn_compat.backend import Backend, install_line, is_installed

OLDEST_CAPABILITY = (8, 0)
"""Of GPUs that Triton's kernels run on."""

_log = logging.getLogger("nanovllm.flash_attn_compat")


def chosen_backend(device: torch.device | str) -> tuple[str, str]:
    """The name of the backend that serves tensors of this device, and the reason.

    Raises PluginLoadError with the line that installs the backend where it is missing: another one
    would compute the same, but at another speed.
    """
    device = torch.device(device)
    name, reason = "sdpa", f"torch's attention runs on every device, {device.type} too"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name, reason = "triton", "its kernels are the faster ones on a GPU"
        if capability < OLDEST_CAPABILITY:
            name = "sdpa"
            reason = f"compute capability {capability} is below triton's {OLDEST_CAPABILITY}"
    if not is_installed(name):
        raise PluginLoadError(
            f"flash-attn's functions on {device.type} take {name} ({reason}), which is not "
            f"installed: {install_line(name)}, or import another backend's functions by name "
            "(nanovllm_flash_attn_compat.sdpa or .triton)"
        )
    return name, reason


_backends: dict[str, Backend] = {}
_names: dict[torch.device, str] = {}


def backend_for(device: torch.device) -> Backend:
    """The backend that serves tensors of a device."""
    return _backends[_name(device)]


def _name(device: torch.device) -> str:
    """The chosen backend's name; at a device's first call it is imported, and the log says why."""
    if device not in _names:
        name, reason = chosen_backend(device)
        _log.info("tensors on %s are served by %s: %s", device, name, reason)
        _backends[name] = import_module(f"nanovllm_flash_attn_compat.{name}").BACKEND
        _names[device] = name
    return _names[device]


# The compiler runs it instead of tracing it. `torch.compiler.assume_constant_result` sets this too,
# but imports the compiler, which takes as long as importing torch.
setattr(_name, "_dynamo_marked_constant", True)  # noqa: B010
