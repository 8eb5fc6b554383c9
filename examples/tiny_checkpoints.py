"""Write a checkpoint of random weights and a few hundred KB, to try an architecture without a hub.

    python examples/tiny_checkpoints.py moe FOLDER    # Qwen3-MoE: 8 experts, 3 for each token
    python examples/tiny_checkpoints.py mla FOLDER    # DeepSeek-V2: latent attention and experts
    nanovllm generate --model FOLDER "Once upon a time"

Needs nanovllm-checkpoint-demo, whose tokenizer is written into the folder, and transformers. The
text that such a model writes means nothing, but it is the same on every machine.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nanovllm_checkpoint_demo.plugin import FOLDER as DEMO

SIZES: dict[str, Any] = {
    "vocab_size": 768,  # of the demo's tokenizer
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def qwen3_moe() -> PreTrainedConfig:
    """Grouped heads; a dense MLP in the second layer, mixtures in the others."""
    heads = {"num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}
    return Qwen3MoeConfig(**{**SIZES, **heads, **experts})


def deepseek_v2() -> PreTrainedConfig:
    """A cache row of 32 + 8 numbers; a dense first layer, then 8 routed experts and 2 shared."""
    heads = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    experts = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
    return DeepseekV2Config(**{**SIZES, **heads, **experts, "q_lora_rank": None})


MODELS = {"moe": (qwen3_moe, Qwen3MoeForCausalLM), "mla": (deepseek_v2, DeepseekV2ForCausalLM)}


def write(name: str, folder: Path) -> Any:
    """Write `config.json`, bfloat16 weights and the tokenizer; the model of transformers."""
    make_config, model_class = MODELS[name]
    model = model_class(make_config()).bfloat16().eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        # Deviations that are large for such widths: the best token is then no near tie.
        mean = 1.0 if weight.dim() == 1 else 0.0
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + mean)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / file, folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    model = write(args.model, args.folder)
    size = sum(file.stat().st_size for file in args.folder.iterdir())
    print(f"{args.folder}: {type(model).__name__}, {size / 1000:,.0f} KB")


if __name__ == "__main__":
    main()
