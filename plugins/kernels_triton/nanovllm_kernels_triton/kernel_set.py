"""The kernel set for CUDA: Triton kernels, and cuBLAS for products of many rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.api import (
    AdaptingKernels,
    CapturedTail,
    FetchingKernels,
    GatedKernels,
    GeluKernels,
    LatentPrep,
    MixtureKernels,
    NormingKernels,
    PostNormKernels,
    Product,
    QKPrep,
    Routing,
    RoutingKernels,
    ShardedTail,
    TailTables,
    VocabShard,
)
from nanovllm_core.kernels import (
    TorchKernels,
    cdiv,
    launch_options,
    next_power_of_2,
    supports_dependent_launch,
)
from nanovllm_kernels_triton import experts_choice
from nanovllm_kernels_triton.captured_tail import TritonShardedTail, TritonTail
from nanovllm_kernels_triton.compilation import CompileAhead
from nanovllm_kernels_triton.elementwise import (
    add_norm_kernel,
    embed_kernel,
    rms_norm_kernel,
    run_activate_and_mul,
    run_norm_add_norm,
)
from nanovllm_kernels_triton.experts import choose_norm_experts, run_experts, run_norm_experts
from nanovllm_kernels_triton.few_rows import has_few_rows_kernel
from nanovllm_kernels_triton.linear import LinearLauncher
from nanovllm_kernels_triton.linear_choice import (
    FewRowsPlan,
    LinearPlan,
    VectorPlan,
    behind_experts,
    choose_parts,
    choose_plan,
)
from nanovllm_kernels_triton.loading import load_from_library
from nanovllm_kernels_triton.norm_route import choose_norm_route, empty_logits, run_norm_route
from nanovllm_kernels_triton.per_head import is_for_few_rows, run_linear_per_head
from nanovllm_kernels_triton.prepare_latent import prepare_latent
from nanovllm_kernels_triton.prepare_qkv import prepare_qkv
from nanovllm_kernels_triton.route import run_route

_EMBED_BLOCK = 1024


def make_kernels(_options: BaseModel, device: torch.device) -> TritonKernels:
    """The set for a CUDA device, with all that the device and the installed Triton have."""
    kernels = TritonKernels(
        dependent_launch=supports_dependent_launch(device), few_rows=has_few_rows_kernel(device)
    )
    kernels.allocate(device)
    return kernels


class TritonKernels(
    TorchKernels,
    RoutingKernels,
    MixtureKernels,
    FetchingKernels,
    GatedKernels,
    GeluKernels,
    NormingKernels,
    PostNormKernels,
    AdaptingKernels,
):
    """See `KernelSet` for what each operation promises, `TorchKernels` for the reference."""

    name = "triton"

    def __init__(self, *, dependent_launch: bool = False, few_rows: bool = False) -> None:
        """`few_rows`: products of some rows by a kernel in Gluon; see `has_few_rows_kernel`. It is
        for steps whose attention prepares q, k and v."""
        super().__init__()
        self._has_few_rows = few_rows
        self._prepared_rows = 0
        self._linears = LinearLauncher(dependent_launch=dependent_launch)
        self._options = launch_options(dependent_launch)
        self._logits: Tensor | None = None
        self._next_weights: dict[int, Tensor] = {}
        """By the address of a stack of gates and ups, the weight of the product behind it."""
        self._announced: set[int] = set()
        """The addresses of these weights."""

    def allocate(self, device: torch.device) -> None:
        """Make what the first call would make otherwise, so that a capture may be the first."""
        self._linears.allocate(device)
        self._logits = empty_logits(device)

    def compile_ahead(self) -> CompileAhead:
        """See `CompilingKernels`."""
        return CompileAhead()

    def load_products(self, products: Iterable[Product]) -> None:
        """See `LoadingKernels`."""
        load_from_library(products)

    def make_tail(self, tables: TailTables, vocab_size: int, max_entries: int) -> CapturedTail:
        return TritonTail(tables, vocab_size, max_entries)

    def make_sharded_tail(
        self, tables: TailTables, shard: VocabShard, max_entries: int
    ) -> ShardedTail:
        return TritonShardedTail(tables, shard, max_entries)

    def embed(self, ids_T: Tensor, weight_VE: Tensor) -> Tensor:
        num_tokens, size = ids_T.shape[0], weight_VE.shape[1]
        out_TE = weight_VE.new_empty((num_tokens, size))
        embed_kernel[(num_tokens, cdiv(size, _EMBED_BLOCK))](
            ids_T, weight_VE, out_TE, SIZE=size, BLOCK=_EMBED_BLOCK, num_warps=4, **self._options
        )
        return out_TE

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        num_tokens, size = x_TE.shape
        out_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
        block = next_power_of_2(size)
        rms_norm_kernel[(num_tokens,)](
            x_TE, weight_E, out_TE, x_TE.stride(0),
            EPS=eps, SIZE=size, BLOCK=block, num_warps=min(max(block // 256, 1), 16),
            **self._options,
        )  # fmt: skip
        return out_TE

    def silu_and_mul(self, gate_up_T2F: Tensor) -> Tensor:
        return run_activate_and_mul(gate_up_T2F, self._options)

    def linear(
        self,
        x_TE: Tensor,
        weight_XE: Tensor,
        bias_X: Tensor | None = None,
        out_TX: Tensor | None = None,
    ) -> Tensor:
        plan = self._choose(x_TE, weight_XE)
        if plan is None:
            return super().linear(x_TE, weight_XE, bias_X, out_TX)
        return self._linears.run(plan, x_TE, weight_XE, bias_N=bias_X, out_TN=out_TX)

    def norm_linear(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        weight_XE: Tensor,
        bias_X: Tensor | None = None,
    ) -> Tensor:
        plan = self._choose(x_TE, weight_XE)
        if len(x_TE) == 1 and weight_XE.data_ptr() in self._announced:
            plan = behind_experts(plan)
        if plan is None:
            return super().linear(self.rms_norm(x_TE, norm_weight_E, eps), weight_XE, bias_X)
        return self._after_norm(plan, x_TE, norm_weight_E, eps, weight_XE, bias_X, gated=False)

    def norm_gate_up(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        weight_2FE: Tensor,
        bias_2F: Tensor | None = None,
    ) -> Tensor:
        plan = self._choose(x_TE, weight_2FE, gated=True)
        if plan is None:
            normed_TE = self.rms_norm(x_TE, norm_weight_E, eps)
            return self.silu_and_mul(super().linear(normed_TE, weight_2FE, bias_2F))
        return self._after_norm(plan, x_TE, norm_weight_E, eps, weight_2FE, bias_2F, gated=True)

    def gate_up(self, x_TE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None = None) -> Tensor:
        return self._gate_up(x_TE, weight_2FE, bias_2F, gelu=False)

    def gelu_gate_up(
        self, x_TE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None = None
    ) -> Tensor:
        return self._gate_up(x_TE, weight_2FE, bias_2F, gelu=True)

    def linear_add(
        self,
        x_TF: Tensor,
        weight_EF: Tensor,
        residual_TE: Tensor,
        bias_E: Tensor | None = None,
    ) -> Tensor:
        plan = self._choose(x_TF, weight_EF)
        if plan is not None:
            return self._linears.run(plan, x_TF, weight_EF, bias_N=bias_E, residual_TN=residual_TE)
        residual_TE.addmm_(x_TF, weight_EF.t())
        return residual_TE if bias_E is None else residual_TE.add_(bias_E)

    def linear_add_norm(
        self,
        x_TF: Tensor,
        weight_EF: Tensor,
        residual_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        if isinstance(self._choose(x_TF, weight_EF), FewRowsPlan):
            return None
        plan = choose_parts(x_TF.shape[0], *weight_EF.shape, x_TF.dtype)
        if plan is None or bias_E is not None:
            return None
        parts_STE = self._linears.run_parts(plan, x_TF, weight_EF)
        num_parts, num_tokens, size = parts_STE.shape
        normed_TE = torch.empty_like(residual_TE, memory_format=torch.contiguous_format)
        block = next_power_of_2(size)
        add_norm_kernel[(num_tokens,)](
            parts_STE, residual_TE, norm_weight_E, normed_TE, num_tokens, residual_TE.stride(0),
            PARTS=num_parts, EPS=eps, SIZE=size, BLOCK=block,
            num_warps=min(max(block // 128, 1), 16), **self._options,
        )  # fmt: skip
        return residual_TE, normed_TE

    def norm_add_norm(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        residual_TE: Tensor,
        next_weight_E: Tensor,
        next_eps: float,
    ) -> tuple[Tensor, Tensor]:
        return run_norm_add_norm(
            x_TE, norm_weight_E, eps, residual_TE, next_weight_E, next_eps, self._options
        )

    def prepare_qkv(
        self,
        qkv_TX: Tensor,
        prep: QKPrep,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        k_cache_NPKD: Tensor,
        v_cache_NPKD: Tensor,
    ) -> Tensor:
        return prepare_qkv(
            qkv_TX, prep, positions_T, slot_mapping_T, k_cache_NPKD, v_cache_NPKD, self._options
        )

    def prepare_latent(
        self,
        q_THD: Tensor,
        rows_TR: Tensor,
        prep: LatentPrep,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        cache_NPR: Tensor,
    ) -> Tensor:
        return prepare_latent(
            q_THD, rows_TR, prep, positions_T, slot_mapping_T, cache_NPR, self._options
        )

    def linear_per_head(self, x_THX: Tensor, weight_HOI: Tensor) -> Tensor:
        if is_for_few_rows(x_THX, weight_HOI):
            return run_linear_per_head(x_THX, weight_HOI, self._options)
        return super().linear_per_head(x_THX, weight_HOI)

    def route(
        self, logits_TN: Tensor, routing: Routing, bias_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return run_route(logits_TN, routing, bias_N, self._options)

    def norm_route(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        weight_NE: Tensor,
        routing: Routing,
        bias_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        num_experts, hidden = weight_NE.shape
        plan = choose_norm_route(len(x_TE), num_experts, hidden, x_TE.dtype.itemsize)
        if plan is None:
            return None
        passed = self._passed_logits(x_TE.device)
        return run_norm_route(
            plan, x_TE, norm_weight_E, eps, weight_NE, routing, bias_N, passed, self._options
        )

    def norm_experts(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        weight_NE: Tensor,
        routing: Routing,
        bias_N: Tensor | None,
        gate_up_N2FE: Tensor,
        down_NEF: Tensor,
        residual_TE: Tensor | None = None,
    ) -> Tensor | None:
        plans = choose_norm_experts(x_TE, weight_NE, routing, down_NEF)
        if plans is None:
            return None
        return run_norm_experts(
            plans, x_TE, norm_weight_E, eps, weight_NE, routing, bias_N, gate_up_N2FE, down_NEF,
            self._passed_logits(x_TE.device), self._options, residual_TE,
            self._next_weights.get(gate_up_N2FE.data_ptr()),
        )  # fmt: skip

    def announce_weight(self, gate_up_N2FE: Tensor, weight_XE: Tensor) -> None:
        self._next_weights[gate_up_N2FE.data_ptr()] = weight_XE
        self._announced.add(weight_XE.data_ptr())

    def announce_prepared_decode(self, max_rows: int) -> None:
        self._prepared_rows = max_rows

    def _passed_logits(self, device: torch.device) -> Tensor:
        if self._logits is None:
            self._linears.tickets(device)  # refuses to be made in a capture, as this must
            self._logits = empty_logits(device)
        return self._logits

    def experts(
        self,
        x_TE: Tensor,
        weights_TC: Tensor,
        ids_TC: Tensor,
        gate_up_N2FE: Tensor,
        down_NEF: Tensor,
        num_shared: int = 0,
        residual_TE: Tensor | None = None,
    ) -> Tensor:
        if num_shared and len(x_TE) >= experts_choice.DENSE_SHARED_TOKENS:
            stacks = (gate_up_N2FE[-num_shared:], down_NEF[-num_shared:])
            residual_TE = self._add_shared_experts(x_TE, *stacks, residual_TE)
            weights_TC, ids_TC = weights_TC[:, :-num_shared], ids_TC[:, :-num_shared]
            gate_up_N2FE, down_NEF = gate_up_N2FE[:-num_shared], down_NEF[:-num_shared]
            num_shared = 0
        return run_experts(
            x_TE, weights_TC, ids_TC, gate_up_N2FE, down_NEF, self._options,
            num_shared=num_shared, residual_TE=residual_TE,
            next_weight=self._next_weights.get(gate_up_N2FE.data_ptr()),
        )  # fmt: skip

    def _add_shared_experts(
        self,
        x_TE: Tensor,
        gate_up_S2FE: Tensor,
        down_SEF: Tensor,
        residual_TE: Tensor | None,
    ) -> Tensor:
        """The residual and all tokens' sum over some experts, rounded once for each."""
        out_TE = torch.zeros_like(x_TE) if residual_TE is None else residual_TE
        for gate_up_2FE, down_EF in zip(gate_up_S2FE, down_SEF, strict=True):
            out_TE.addmm_(self.silu_and_mul(x_TE @ gate_up_2FE.t()), down_EF.t())
        return out_TE

    def _gate_up(
        self, x_TE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None, *, gelu: bool
    ) -> Tensor:
        """The gated product of what is normed already."""
        plan = self._choose(x_TE, weight_2FE, gated=True)
        if plan is None:
            gate_up_T2F = self.linear(x_TE, weight_2FE, bias_2F)
            if gelu:
                return run_activate_and_mul(gate_up_T2F, self._options, gelu=True)
            return self.silu_and_mul(gate_up_T2F)
        return self._linears.run(plan, x_TE, weight_2FE, gated=True, gelu=gelu, bias_N=bias_2F)

    def _choose(self, x_TE: Tensor, weight_XE: Tensor, gated: bool = False) -> LinearPlan | None:
        """The plan of a product; of gate and up, the weight is that of both."""
        asked = x_TE.shape[0], *weight_XE.shape, x_TE.dtype
        few_rows = self._has_few_rows and len(x_TE) <= self._prepared_rows
        return choose_plan(*asked, gated=gated, few_rows=few_rows)

    def _after_norm(
        self, plan: LinearPlan, x_TE: Tensor, norm_weight_E: Tensor, eps: float,
        weight_XE: Tensor, bias_X: Tensor | None, *, gated: bool,
    ) -> Tensor:  # fmt: skip
        """The product of the normed x: a vector program norms its rows itself."""
        if isinstance(plan, VectorPlan):
            return self._linears.run(
                plan, x_TE, weight_XE, norm_weight_K=norm_weight_E, eps=eps, gated=gated,
                bias_N=bias_X,
            )  # fmt: skip
        x_TE = self.rms_norm(x_TE, norm_weight_E, eps)
        return self._linears.run(plan, x_TE, weight_XE, gated=gated, bias_N=bias_X)
