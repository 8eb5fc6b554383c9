"""From `device` and `dtype` of a configuration to those that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_core.config.settings import check_device
from nanovllm_core.errors import ConfigError, DeviceError, shown


def resolve_device(device: str) -> str:
    """`auto` -> the first GPU, or the CPU; DeviceError for a GPU that is not there."""
    import torch

    try:
        check_device(device)
    except ValueError as error:
        raise DeviceError(f"device: {shown(device)} {error}") from None
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device: {shown(device)}, but torch {torch.__version__} sees no CUDA device; use "
            "device: "
            "cpu (or auto), or install a CUDA build of torch and the driver"
        )
    index = int(device.split(":")[1]) if ":" in device else 0
    count = torch.cuda.device_count()
    if index >= count:
        raise DeviceError(
            f"device: {shown(device)}, but there are {count} GPUs: cuda:0 to cuda:{count - 1}"
        )
    return f"cuda:{index}"


def resolve_dtype(dtype: str, device: str, model_config: Mapping[str, Any]) -> str:
    """`auto` -> float32 on a CPU, else as the checkpoint; ConfigError where that cannot be."""
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    stored = str(model_config.get("dtype") or model_config.get("torch_dtype") or "bfloat16")
    if stored not in ("float32", "float16", "bfloat16"):
        raise ConfigError(
            f"dtype: auto follows the checkpoint, which says {shown(stored)}; choose float32, "
            "float16 "
            "or bfloat16"
        )
    return stored


def compute_capability(device: str) -> tuple[int, int] | None:
    """That of a GPU ("cuda:0"); None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return torch.cuda.get_device_capability(device)
