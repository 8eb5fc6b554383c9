"""The gated MLP of decoders, dense: alone in a layer, or as the shared experts of a mixture."""

from __future__ import annotations

from torch import Tensor, nn

from nanovllm_core.layers.blocks import gated_mlp
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm_core.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """down(silu(gate) * up), with gate and up as one product."""

    def __init__(
        self, context: LayerContext, hidden_size: int, intermediate_size: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        sizes = (intermediate_size, intermediate_size)
        self.gate_up_proj = MergedColumnParallelLinear(context, hidden_size, sizes, bias=bias)
        self.down_proj = RowParallelLinear(context, intermediate_size, hidden_size, bias=bias)

    def announce(self, norm: RMSNorm) -> None:
        """`norm` is the next reader of the sum."""
        self.down_proj.sum.norm = norm

    def forward(self, residual_TE: Tensor, norm: RMSNorm) -> Tensor:
        """residual + MLP(norm(residual)). The residual is overwritten."""
        return gated_mlp(residual_TE, norm, self.gate_up_proj, self.down_proj)
