"""Checkpoints of a tiny model of latent attention, and its logits by the plainest computation.

Keys and values of every head are computed from the whole sequence, in float64, without a cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

NAME = "LatentForCausalLM"
PLUGIN = f'''
from nanovllm_core.api import ModelSpec, hookimpl

@hookimpl
def nanovllm_models():
    impl = "nanovllm_kit.latent_model:{NAME}"
    return [ModelSpec(name="{NAME}", impl=impl, summary="Latent attention.", contract=2)]
'''
CONFIG: dict[str, Any] = {
    "architectures": [NAME],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}


def install_latent(install: Callable[..., None]) -> None:
    """Install the model's plugin by the fixture `install`."""
    install("latent", {"nanovllm.models": {NAME: "latent_plugin"}}, {"latent_plugin": PLUGIN})


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights under DeepSeek's names, large enough that likely tokens stand out."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(1.5 * columns**-0.5)

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    hidden, inner, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    rank, nope, rope, value = _sizes(config)
    q_rank, q_size = config["q_lora_rank"], heads * (nope + rope)
    weights = {
        "embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator),
        "norm.weight": norm(hidden),
        "lm_head.weight": 2 * matrix(config["vocab_size"], hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer, attention = f"layers.{index}", f"layers.{index}.self_attn"
        if q_rank is None:
            weights[f"{attention}.q_proj.weight"] = 2 * matrix(q_size, hidden)
        else:
            weights[f"{attention}.q_a_proj.weight"] = matrix(q_rank, hidden)
            weights[f"{attention}.q_a_layernorm.weight"] = norm(q_rank)
            weights[f"{attention}.q_b_proj.weight"] = 2 * matrix(q_size, q_rank)
        weights |= {
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{attention}.kv_a_proj_with_mqa.weight": matrix(rank + rope, hidden),
            f"{attention}.kv_a_layernorm.weight": norm(rank),
            f"{attention}.kv_b_proj.weight": matrix(heads * (nope + value), rank),
            f"{attention}.o_proj.weight": matrix(hidden, heads * value),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
            f"{layer}.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.up_proj.weight": matrix(inner, hidden),
            f"{layer}.down_proj.weight": matrix(hidden, inner),
        }
    return weights


def write_latent(folder: Path, *, seed: int = 0, **changes: Any) -> tuple[Path, dict[str, Any]]:
    """A whole checkpoint without a tokenizer, and its configuration."""
    config = CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, seed), folder / "model.safetensors")
    return folder, config


def naive_logits(config: Mapping[str, Any], weights: Mapping[str, Tensor], ids_T: Tensor) -> Tensor:
    """Logits [T, vocab_size] of one sequence."""
    w = {name: weight.double() for name, weight in weights.items()}
    x_TE = w["embed_tokens.weight"][ids_T]
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        x_TE = x_TE + _attention(
            config, w, f"{layer}.self_attn", _normed(x_TE, w, f"{layer}.input_layernorm")
        )
        y_TE = _normed(x_TE, w, f"{layer}.post_attention_layernorm")
        gate, up = (y_TE @ w[f"{layer}.{name}_proj.weight"].T for name in ("gate", "up"))
        x_TE = x_TE + (silu(gate) * up) @ w[f"{layer}.down_proj.weight"].T
    return _normed(x_TE, w, "norm") @ w["lm_head.weight"].T


def _attention(
    config: Mapping[str, Any], w: Mapping[str, Tensor], name: str, x_TE: Tensor
) -> Tensor:
    rank, nope, rope, value = _sizes(config)
    if config["q_lora_rank"] is None:
        q = x_TE @ w[f"{name}.q_proj.weight"].T
    else:
        q = x_TE @ w[f"{name}.q_a_proj.weight"].T
        q = _normed(q, w, f"{name}.q_a_layernorm") @ w[f"{name}.q_b_proj.weight"].T
    row = x_TE @ w[f"{name}.kv_a_proj_with_mqa.weight"].T
    latent, rotated = row[:, :rank], row[:, rank:]
    kv = _normed(latent, w, f"{name}.kv_a_layernorm") @ w[f"{name}.kv_b_proj.weight"].T
    theta = config["rope_parameters"]["rope_theta"]
    outputs = []
    hidden = torch.ones(len(x_TE), len(x_TE)).triu(1).bool()
    for q_TD, kv_TD in zip(q.split(nope + rope, -1), kv.split(nope + value, -1), strict=True):
        scores = q_TD[:, :nope] @ kv_TD[:, :nope].T
        scores = scores + _rotated(q_TD[:, nope:], theta) @ _rotated(rotated, theta).T
        scores = (scores * (nope + rope) ** -0.5).masked_fill(hidden, float("-inf"))
        outputs.append(scores.softmax(-1) @ kv_TD[:, nope:])
    return torch.cat(outputs, dim=-1) @ w[f"{name}.o_proj.weight"].T


def _rotated(x_TR: Tensor, theta: float) -> Tensor:
    """Pairs 2i, 2i + 1 as complex numbers, turned by the position times theta ** (-2i / R)."""
    size = x_TR.shape[-1]
    frequencies = theta ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.outer(torch.arange(len(x_TR)).double(), frequencies)
    turned = torch.view_as_complex(x_TR.unflatten(-1, (-1, 2)).contiguous())
    turned = turned * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def _normed(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[f"{name}.weight"]


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, nope, rope, value = (config[name] for name in names)
    return rank, nope, rope, value
