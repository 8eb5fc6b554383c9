"""A tiny random Qwen3 checkpoint, an engine on it, and its tokens by the plainest computation.

The reference recomputes the whole sequence for every token, in float64, without blocks, batches,
packed weights or any code of the engine's but the sampler's noise, which is a definition.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm_core import LLM
from nanovllm_core.kernels.sampling_reference import gumbel_noise

VOCAB_SIZE = 97

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def write_config(folder: Path, **changes: Any) -> Path:
    """config.json alone, which is all that `load_format: dummy` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def random_weights(seed: int = 0) -> dict[str, Tensor]:
    """Weights under the checkpoint's names, large enough that likely tokens stand out."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(1.5 * columns**-0.5)

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    head = CONFIG["head_dim"]
    num_q, num_kv = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB_SIZE, hidden, generator=generator),
        "model.norm.weight": norm(hidden),
        "lm_head.weight": 2 * matrix(VOCAB_SIZE, hidden),
    }
    for index in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        weights |= {
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{layer}.self_attn.q_proj.weight": matrix(num_q, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(num_kv, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(num_kv, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, num_q),
            f"{layer}.self_attn.q_norm.weight": 2 * norm(head),
            f"{layer}.self_attn.k_norm.weight": norm(head),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A whole checkpoint without a tokenizer: prompts are token ids."""
    save_file(random_weights(seed), write_config(folder, **changes) / "model.safetensors")
    return folder


def open_tiny(model: Path | str, **changes: Any) -> LLM:
    """An engine for a checkpoint of these or the demo, small, in debug mode, on the CPU."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "attention": "sdpa",
        "max_model_len": 320,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "debug": True,
    }
    return LLM(str(model), **{**settings, **changes})


@dataclass
class Reference:
    """The tokens that a checkpoint gives, recomputed from the first id for every token."""

    weights: dict[str, Tensor]

    @classmethod
    def of(cls, folder: Path) -> Reference:
        weights = load_file(folder / "model.safetensors")
        return cls({name: tensor.double() for name, tensor in weights.items()})

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [T, vocab_size] of a sequence, in float64."""
        hidden_TE = self.weights["model.embed_tokens.weight"][list(ids)]
        for index in range(CONFIG["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            normed = self._norm(hidden_TE, f"{layer}.input_layernorm")
            hidden_TE = hidden_TE + self._attention(normed, f"{layer}.self_attn")
            normed = self._norm(hidden_TE, f"{layer}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(normed, f"{layer}.mlp.gate_proj"))
            up = self._linear(normed, f"{layer}.mlp.up_proj")
            hidden_TE = hidden_TE + self._linear(gate * up, f"{layer}.mlp.down_proj")
        return self._linear(self._norm(hidden_TE, "model.norm"), "lm_head")

    def tokens(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        """The next `count` ids, greedy or with the sampler's noise."""
        ids = list(prompt)
        for index in range(count):
            ids.append(self.choose(self.logits(ids)[-1], temperature, seed, index))
        return ids[len(prompt) :]

    def choose(self, scores: Tensor, temperature: float, seed: int, index: int) -> int:
        """The id that logits give as output number `index`."""
        if temperature > 0:
            noise = gumbel_noise(torch.tensor([seed]), torch.tensor([index]), VOCAB_SIZE)[0]
            scores = scores / temperature + noise
        return int(scores.argmax())

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def _attention(self, x_TE: Tensor, name: str) -> Tensor:
        size, length = CONFIG["head_dim"], len(x_TE)
        q_THD, k_TKD, v_TKD = (
            self._linear(x_TE, f"{name}.{part}_proj").view(length, -1, size) for part in "qkv"
        )
        q_THD = _rotate(self._norm(q_THD, f"{name}.q_norm"))
        k_TKD = _rotate(self._norm(k_TKD, f"{name}.k_norm"))
        group = q_THD.shape[1] // k_TKD.shape[1]
        k_THD, v_THD = (t.repeat_interleave(group, dim=1) for t in (k_TKD, v_TKD))
        scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_THD) / size**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights_HTS = scores_HTS.masked_fill(future, -torch.inf).softmax(-1)
        out_THD = torch.einsum("hts,shd->thd", weights_HTS, v_THD)
        return self._linear(out_THD.reshape(length, -1), f"{name}.o_proj")


def _rotate(x_THD: Tensor) -> Tensor:
    """Rotary positions: the first half of a head's dimensions pairs with the second half."""
    length, _, size = x_THD.shape
    base = CONFIG["rope_parameters"]["rope_theta"]
    frequency = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = (torch.arange(length, dtype=torch.float64)[:, None] * frequency)[:, None, :]
    first, second = x_THD.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
