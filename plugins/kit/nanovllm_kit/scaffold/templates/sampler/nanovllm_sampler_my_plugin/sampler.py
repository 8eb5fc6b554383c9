"""Greedy and temperature sampling in plain torch.

argmax(logit / temperature + g) with independent Gumbel noise g is a sample of
softmax(logit / temperature) (the Gumbel-max trick: Maddison, Tarlow and Minka, "A* Sampling",
2014). The noise is a function of (seed, output index, vocabulary id) and of nothing else, so that
a request's tokens do not depend on its neighbours.

Shape suffixes: B batch entries, V vocabulary, R rows of the tables.
"""

from __future__ import annotations

import torch
from nanovllm_core.api import Sampler, SamplerContext
from torch import Tensor

from nanovllm_sampler_my_plugin.plugin import MyPluginOptions

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: neighbouring ids get keys that are far apart."""


class MyPluginSampler(Sampler):
    """One instance serves all steps of an engine."""

    def __init__(self, options: MyPluginOptions, context: SamplerContext) -> None:
        super().__init__(options, context)
        self._salt = options.salt
        # What a captured call reads is made here, before the capture.
        self._ids_V = torch.arange(context.vocab_size, device=context.device)

    def sample(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        """Choose an id per entry. No branch on a tensor's value: that would wait for the device."""
        rows = rows_B.clamp(min=0)
        temperature_B1 = temperature_R[rows].unsqueeze(1)
        greedy_B1 = temperature_B1 == 0
        scores_BV = logits_BV.float()
        scores_BV = torch.where(scores_BV.isnan(), -torch.inf, scores_BV)
        scores_BV = scores_BV * torch.where(greedy_B1, 1.0, 1.0 / temperature_B1)
        noise_BV = self._gumbel_noise(seed_R[rows], output_index_B)
        scores_BV = scores_BV + noise_BV.masked_fill(greedy_B1, 0.0)
        # Of equal scores the lowest id is taken, written out; torch.argmax promises the same.
        best_B1 = scores_BV.amax(dim=1, keepdim=True)
        ids_BV = self._ids_V.expand_as(scores_BV).masked_fill(
            scores_BV != best_B1, self.context.vocab_size
        )
        out_B.copy_(torch.where(rows_B < 0, -1, ids_BV.amin(dim=1)))

    def captured_tensors(self) -> dict[str, Tensor]:
        return {"ids": self._ids_V}

    def _gumbel_noise(self, seed_B: Tensor, output_index_B: Tensor) -> Tensor:
        """Noise [B, V] in float32."""
        key_B = _mix(_mix(seed_B ^ self._salt) ^ output_index_B)
        bits_BV = _mix(key_B.unsqueeze(1) + self._ids_V * _signed(GOLDEN))
        # 23 bits and a half: exact in float32, and neither 0 nor 1.
        uniform_BV = (_shift_right(bits_BV, 41).float() + 0.5) * 2.0**-23
        return -torch.log(-torch.log(uniform_BV))


def _mix(x: Tensor) -> Tensor:
    """splitmix64's last steps (Steele, Lea and Flood, 2014), on int64, which wraps as uint64."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's own copies the sign bit down."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    """The int64 with the bits of a uint64 constant."""
    return constant - 2**64 if constant >= 2**63 else constant
