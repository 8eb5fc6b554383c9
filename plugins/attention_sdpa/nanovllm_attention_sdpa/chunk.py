"""Causal attention of one chunk of a prompt to the keys gathered for it.

Shape suffixes as in `nanovllm_attention_sdpa.backend`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanovllm_attention_sdpa.kernels import SdpaKernel, causal_bias
from nanovllm_attention_sdpa.workspace import queries_per_slice


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """What is the same for every chunk of an engine.

    `group` query heads share a KV head. `window` None: none, or one that holds every sequence.
    `writes_scores`: the kernel puts scores in memory, as `SdpaKernel.writes_scores` says.
    """

    kernel: SdpaKernel
    group: int
    scale: float
    window: int | None
    writes_scores: bool

    def run(
        self, q_KGQD: Tensor, k_1KLD: Tensor, v_1KLD: Tensor, num_keys: int, out_KGQD: Tensor
    ) -> None:
        """Attend the queries of a chunk that ends at key `num_keys` of those gathered."""
        maskless = q_KGQD.shape[2] == num_keys or q_KGQD.device.type == "cuda"
        windowed = self.window is not None and self.window < num_keys
        if maskless and not windowed and not self.writes_scores:
            k_KGLD, v_KGLD = (
                x[0, :, None, :num_keys].expand(-1, self.group, -1, -1) for x in (k_1KLD, v_1KLD)
            )
            out_KGQD.copy_(self.kernel.causal(q_KGQD, k_KGLD, v_KGLD, self.scale))
            return
        self._run_masked(q_KGQD, k_1KLD, v_1KLD, num_keys, out_KGQD)

    def _run_masked(
        self, q_KGQD: Tensor, k_1KLD: Tensor, v_1KLD: Tensor, num_keys: int, out_KGQD: Tensor
    ) -> None:
        """The same with a mask in memory, for as many queries at a time as its limit allows."""
        num_heads, group, num_queries, _ = q_KGQD.shape
        context = num_keys - num_queries
        step = queries_per_slice(k_1KLD.shape[2], self._score_bytes(q_KGQD))
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            # Rounded up, since efficient attention reads masks 16 columns at a time.
            keys = -(-(context + stop) // 16) * 16
            skipped = 0
            if self.window is not None:
                skipped = max(0, context + start - self.window + 1) // 16 * 16
            bias_QL = causal_bias(
                context + start - skipped,
                context + stop - skipped,
                keys - skipped,
                self.window,
                q_KGQD,
            )
            out = self.kernel(
                q_KGQD[:, :, start:stop].flatten(1, 2)[None],
                k_1KLD[:, :, skipped:keys],
                v_1KLD[:, :, skipped:keys],
                bias_QL.repeat(group, 1),
                self.scale,
            )
            out_KGQD[:, :, start:stop] = out.view(num_heads, group, stop - start, -1)

    def _score_bytes(self, q_KGQD: Tensor) -> int:
        """Bytes per (query, key) pair: the mask, and float32 scores, biased and soft-maxed."""
        num_heads, group, _, _ = q_KGQD.shape
        scores = 3 * 4 * num_heads if self.writes_scores else 0
        return group * (2 * q_KGQD.element_size() + scores)
