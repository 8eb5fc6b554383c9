"""In low precision the model is as near to float32 as transformers' own is, at any batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM as Reference

from nanovllm_kit.dense_attention import DenseRuntime
from nanovllm_kit.layers import layer_context, load_model
from nanovllm_model_qwen3.model import Qwen3ForCausalLM

SLACK = 1.1
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
# The widths of the published models. Fewer layers and ids than they have; these do not change how
# each operation rounds.
WIDTHS: dict[str, dict[str, Any]] = {
    name: {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 4,
        "vocab_size": 32768,
    }
    for name, hidden, intermediate, heads in (
        ("0.6B", 1024, 3072, 16),
        ("1.7B", 2048, 6144, 16),
        ("8B", 4096, 12288, 32),
    )
}


class Comparison:
    """A transformers model in float32 and in `dtype`, and ours in `dtype`, on the same weights."""

    def __init__(self, width: dict[str, Any], dtype: torch.dtype, device: str, folder: Path):
        torch.manual_seed(0)
        self.device = torch.device(device)
        config = Qwen3Config(**width, max_position_embeddings=1024)
        with self.device:
            self.low, self.exact = Reference(config), Reference(config)
        nn.Module.to(self.low, dtype)
        self.low.save_pretrained(folder)
        self.exact.load_state_dict(self.low.state_dict())
        context = layer_context(self.device, dtype)
        self.ours = load_model(Qwen3ForCausalLM, folder, context)
        self.vocab_size = config.vocab_size

    def rms_errors(self, batch: int, num_sequences: int, length: int) -> tuple[float, float]:
        """(ours, theirs): root mean square error of all logits; ours sees `batch` rows a time."""
        generator = torch.Generator().manual_seed(1)
        squares = torch.zeros(2, dtype=torch.float64)
        for _ in range(num_sequences):
            ids = torch.randint(0, self.vocab_size, (length,), generator=generator).to(self.device)
            exact = self.exact(ids[None]).logits[0]
            for i, logits in enumerate((self.run(ids, batch), self.low(ids[None]).logits[0])):
                squares[i] += (logits.float() - exact).square().mean(dtype=torch.float64).cpu()
        ours, theirs = (squares / num_sequences).sqrt().tolist()
        return ours, theirs

    def run(self, ids: Tensor, batch: int) -> Tensor:
        DenseRuntime(self.ours, len(ids))
        positions = torch.arange(len(ids), dtype=torch.int32, device=self.device)
        parts = zip(torch.split(ids, batch), torch.split(positions, batch), strict=True)
        return torch.cat([self.ours.compute_logits(self.ours(*part)) for part in parts])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_small_model_rounds_no_worse_than_transformers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """On a CPU: prompts of 64 tokens at once and in batches of 7."""
    comparison = Comparison(SMALL, dtype, "cpu", tmp_path)
    for batch in (64, 7):
        ours, theirs = comparison.rms_errors(batch, num_sequences=4, length=64)
        assert 0 < ours <= SLACK * theirs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.inference_mode()
@pytest.mark.parametrize("width", WIDTHS)
def test_the_published_widths_round_no_worse_than_transformers(width: str, tmp_path: Path) -> None:
    """In bfloat16 over 10,240 rows of logits, with the batch sizes that graphs are captured for."""
    comparison = Comparison(WIDTHS[width], torch.bfloat16, "cuda", tmp_path)
    for batch in (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512):
        num_sequences = 20 if batch >= 8 else 2
        ours, theirs = comparison.rms_errors(batch, num_sequences, length=512)
        assert 0 < ours <= SLACK * theirs, f"batch {batch}: {ours:.3e} against {theirs:.3e}"
