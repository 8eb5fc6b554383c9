"""Checkpoints of random weights: what a start from files reads, without a download."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

DEVIATION = 0.02


def random_like(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """bf16 weights on the CPU of the shapes of `weights`, which hold nothing (`meta`)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        name: (torch.randn(weight.shape, dtype=torch.bfloat16, device=device) * DEVIATION).cpu()
        for name, weight in weights.items()
    }


def split(weights: dict[str, Tensor], num_files: int) -> list[dict[str, Tensor]]:
    """Parts of about the same number of elements, in the order of the model."""
    total, before = sum(weight.numel() for weight in weights.values()), 0
    parts: list[dict[str, Tensor]] = [{} for _ in range(num_files)]
    for name, weight in weights.items():
        parts[min(num_files - 1, before * num_files // total)][name] = weight
        before += weight.numel()
    return parts


def write_checkpoint(config: Path, folder: Path, num_files: int = 5) -> int:
    """Write the model of `config`, a folder, into `folder` as safetensors; returns their bytes.

    Names and shapes are those that transformers gives it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copy(config / "config.json", folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    weights = dict(model.named_parameters())
    files = [f"model-{n + 1:05d}-of-{num_files:05d}.safetensors" for n in range(num_files)]

    def write(file: str, part: dict[str, Tensor]) -> dict[str, str]:
        save_file(random_like(part), folder / file)
        return dict.fromkeys(part, file)

    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(num_files) as threads:
        for places in threads.map(write, files, split(weights, num_files)):
            weight_map.update(places)
    num_bytes = sum((folder / file).stat().st_size for file in files)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return num_bytes
