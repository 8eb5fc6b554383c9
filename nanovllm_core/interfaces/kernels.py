"""The contract of a kernel set: the fused operations that layers are built on.

A set is made once per worker, before the model. Every product and lookup of the core's layers is a
call of it, with a bias and on every rank: once per layer and step for most, once per step for
`embed`, the last norm and the head; on CUDA captured in decode steps and small steps with prompts,
else eagerly.

Shape suffixes: T tokens, E hidden size, F intermediate size (of this rank), H query heads, K KV
heads, D head size, X = (H + 2K)·D packed q, k, v (in products: any outputs), N KV blocks, P tokens
per block; in mixtures N experts, C experts of each token; in latent attention R numbers of
a cached row, of which the first L are the latent part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QKPrep:
    """The preparation of packed q, k, v before attention, as data: norm per head, then rotation.

    `q_norm_weight`, `k_norm_weight` [D]: RMS norm per head, None for none; in the dtype of q and k
    or float32. `cos_sin_cache` [max_position, R] float32, cos beside sin, rotates the first R <= D
    dimensions of each head in halves. Head counts are this rank's.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    cos_sin_cache: Tensor
    q_norm_weight: Tensor | None = None
    k_norm_weight: Tensor | None = None
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentPrep:
    """The preparation of latent attention's queries and rows, as data: norm, then rotation.

    `norm_weight` [L]: RMS norm of a row's latent part, with `eps`; in the dtype of rows or float32.
    `cos_sin_cache` [max_position, R - L] float32, cos beside sin, rotates the numbers behind the
    latent part of a row, and as many at the end of each head of q, in pairs: 2i with 2i + 1.
    """

    norm_weight: Tensor
    cos_sin_cache: Tensor
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token chooses its experts, from a score of each: the rule of a router, as data.

    The score is the softmax or the sigmoid of a logit. The `top_k` best are chosen, of equal ones
    the first. With `num_groups`, experts are divided into so many groups of equal size, and only
    the `top_groups` best groups can be chosen from: a group is as good as its best score
    ("max", DeepSeek-V2) or as the sum of its two best ("top2", DeepSeek-V3). A bias is added to the
    scores while choosing. The weight of a chosen expert is its score, without the bias; with
    `renormalize` divided by the sum of those chosen plus 1e-20, so that it is 0 where all of them
    underflow; times `scale`. `num_shared` further experts are chosen by every token with weight 1:
    nothing else is done to their weights. Their ids follow those that have logits, and they come
    behind the `top_k`. Logits are rounded to the model's dtype, as all products are, unless
    `exact_logits` keeps them in float32, as DeepSeek's models do.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scale: float = 1.0
    exact_logits: bool = False
    num_shared: int = 0

    @property
    def num_chosen(self) -> int:
        """Experts of each token: the `top_k` and the shared ones."""
        return self.top_k + self.num_shared


@runtime_checkable
class KernelSet(Protocol):
    """Fused operations on one device. Inputs have their last dimension contiguous.

    An operation does not change its inputs and weights, because others read them after it. It
    writes only to `out_TX`, `residual_TE` and the caches, and returns no view of any other input.

    All compute in float32 and round once to the dtype of their input, unless said otherwise. On
    CUDA none waits for the device, so all may be captured in a graph. Weights are contiguous.
    Equal inputs give equal bits; another number of rows may be summed in another order.

    A product has a bias [X], in its weight's dtype, or None for none. Which products and biases
    share a kernel is the set's decision.
    """

    @property
    def name(self) -> str:
        """For listings and benchmarks: "torch" or "triton"."""

    def embed(self, ids_T: Tensor, weight_VE: Tensor) -> Tensor:
        """Rows `ids_T` (int32 or int64, below V) of a contiguous weight [V, E] -> [T, E].

        A copy, never a view of the weight: layers write to it.
        """

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """x / rms(x), rounded to x's dtype, then times the weight and rounded again.

        The double rounding is that of transformers' Qwen3RMSNorm. A float32 weight multiplies
        before the one rounding, as in its Gemma2RMSNorm; so do those of `norm_linear` and
        `norm_gate_up`. x is the residual: it is read again, and its squares overflow float16.
        """

    def silu_and_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """silu(gate) * up -> [T, F]; the gate is the first half."""

    def linear(
        self,
        x_TE: Tensor,
        weight_XE: Tensor,
        bias_X: Tensor | None = None,
        out_TX: Tensor | None = None,
    ) -> Tensor:
        """x W^T + b -> [T, X], rounded once. Written to `out_TX` and returned, if it is given.

        Where `out_TX` is float32 beside another dtype, as a router's logits, the sum is not rounded
        to x's dtype; there is no bias then.
        """

    def norm_linear(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        weight_XE: Tensor,
        bias_X: Tensor | None = None,
    ) -> Tensor:
        """linear(rms_norm(x)) -> [T, X]. The normed x is rounded as `rms_norm` rounds it."""

    def norm_gate_up(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        weight_2FE: Tensor,
        bias_2F: Tensor | None = None,
    ) -> Tensor:
        """silu_and_mul(norm_linear(x)) -> [T, F]. Gate and up are rounded before the activation."""

    def linear_add(
        self,
        x_TF: Tensor,
        weight_EF: Tensor,
        residual_TE: Tensor,
        bias_E: Tensor | None = None,
    ) -> Tensor:
        """residual + x W^T + b. The residual is overwritten: use what is returned.

        Rounded once; a bias may be added to the rounded sum, which rounds again.
        """

    def prepare_qkv(
        self,
        qkv_TX: Tensor,
        prep: QKPrep,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        k_cache_NPKD: Tensor,
        v_cache_NPKD: Tensor,
    ) -> Tensor:
        """Norm and rotate q and k, store k and v in their blocks, return contiguous q_THD.

        `positions_T` int32 or int64. `slot_mapping_T` int64: block · P + offset; -1 stores nothing.
        The caches may have any strides, as long as D is contiguous.
        """

    def prepare_latent(
        self,
        q_THD: Tensor,
        rows_TR: Tensor,
        prep: LatentPrep,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        cache_NPR: Tensor,
    ) -> Tensor:
        """Norm and rotate the rows, store them in their blocks; rotate q -> contiguous q_THD.

        The norm rounds as `rms_norm`; rotated numbers are rounded once and stay in their places.
        Slots and cache are as in `prepare_qkv`, with one row per token.
        """

    def linear_per_head(self, x_THX: Tensor, weight_HOI: Tensor) -> Tensor:
        """Each head's own product: the first I numbers of x by W_h^T -> [T, H, O + X - I].

        Rounded once. Numbers of x behind the first I are appended to the product as they are. Of
        the weight's last two dimensions one is contiguous; heads may lie apart. The result is
        contiguous.
        """

    def route(
        self, logits_TN: Tensor, routing: Routing, bias_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The weights [T, C] float32 and ids [T, C] int32 of each token's experts, the best first.

        Shared experts come last: weight 1 and ids N, N + 1 and so on, also of padding.
        Logits are in the model's dtype or in float32, scores are computed in float32; the bias is
        float32. A token's experts differ from one another, whatever its logits are: those of
        padding may be NaN.
        """

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
        """Each token's sum over its experts of weight * down(silu(gate) * up) -> [T, E].

        Gate and up lie as in `norm_gate_up`, and are rounded before and behind the activation;
        weights are float32, and the sum is rounded once. An expert's own result may be rounded
        before it is weighted. The residual, if it is given, is in the sum, and is overwritten: use
        what is returned. `num_shared` says what ids and weights say too: the last so many experts
        are the last ones of every token, with weight 1. A set may choose its kernels by it, and may
        round the sum behind each of them.
        """


@runtime_checkable
class GatedKernels(Protocol):
    """A kernel set that has a gated product of what is normed already as one operation."""

    def gate_up(self, x_TE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None = None) -> Tensor:
        """silu_and_mul(linear(x)) -> [T, F]. Gate and up are rounded before the activation."""


@runtime_checkable
class GeluKernels(Protocol):
    """A kernel set that has the gated product of models with GELU (GeGLU) as one operation."""

    def gelu_gate_up(
        self, x_TE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None = None
    ) -> Tensor:
        """gelu(gate) * up of linear(x) -> [T, F], by GELU's approximation with tanh, which
        transformers calls `gelu_pytorch_tanh`. Gate and up are rounded before the activation.
        """


@runtime_checkable
class PostNormKernels(Protocol):
    """A kernel set for models that norm a block's result too, before they add it, such as Gemma."""

    def norm_add_norm(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        residual_TE: Tensor,
        next_weight_E: Tensor,
        next_eps: float,
    ) -> tuple[Tensor, Tensor]:
        """residual + rms_norm(x), and the `rms_norm` of this sum [T, E], in other memory.

        Both norms round as `rms_norm`, and the sum is rounded. The residual is overwritten: use
        what is returned.
        """


@runtime_checkable
class NormingKernels(Protocol):
    """A kernel set that can norm the residual where it adds a product to it."""

    def linear_add_norm(
        self,
        x_TF: Tensor,
        weight_EF: Tensor,
        residual_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """The sum of `linear_add`, and its `rms_norm` [T, E], in other memory.

        The residual is overwritten: use what is returned. None, with nothing changed, where the set
        has no kernels for such rows and weights: then layers call the two one after the other.
        """


@runtime_checkable
class RoutingKernels(Protocol):
    """A kernel set that can norm the residual and choose experts in one operation."""

    def norm_route(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        weight_NE: Tensor,
        routing: Routing,
        bias_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The weights and ids of `route` for rms_norm(x) W^T, and rms_norm(x) [T, E] itself.

        Logits are rounded as `routing` says. None where the set has no kernel for such rows and
        weights: then the layer calls `rms_norm`, `linear` and `route`.
        """


@runtime_checkable
class MixtureKernels(Protocol):
    """A kernel set that can norm the residual, choose experts and run them in one operation."""

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
        """The result of `experts` for rms_norm(x), with the choice of `route` -> [T, E].

        `weight_NE` and `bias_N` are the router's. The stacks have the experts of
        `routing.num_shared` behind the others. The residual, if it is given, is in the sum, and is
        overwritten; it may be x. None, with nothing changed, where the set has no kernels for such
        rows and weights: then the layer calls the operations one by one.
        """


@runtime_checkable
class FetchingKernels(Protocol):
    """A kernel set whose mixtures fetch what is read next while memory waits for their routers."""

    def announce_weight(self, gate_up_N2FE: Tensor, weight_XE: Tensor) -> None:
        """Behind the mixture with this stack comes a product by this weight.

        The mixture's result stays the same to the bit; that product may be summed in another order.
        Called once for a stack, before its first step.
        """


@runtime_checkable
class AdaptingKernels(Protocol):
    """A kernel set whose kernel for a product depends on the kernels beside it."""

    def announce_prepared_decode(self, max_rows: int) -> None:
        """Attention prepares q, k and v itself, in every layer, in all decode steps of up to so
        many rows.

        There no kernel is between their product and attention. 0: in none, which a set expects that
        is not told. Results may be summed in another order. Called once, before the first step.
        """


@runtime_checkable
class CompilingKernels(Protocol):
    """A kernel set that can compile its kernels, and others in its language, in parallel."""

    def compile_ahead(self) -> AbstractContextManager[Callable[[], bool]]:
        """Within, kernels that are launched for the first time are compiled by threads, not run.

        Leaving waits until all are loaded. Gives a function that says whether one of those so far
        was not compiled by an earlier process. Entered once, before any step has run, with the
        set's device as the current one.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """Products by one weight [X, E], as data: which operation, and with which numbers of rows.

    "gate_up" stands for both operations of that name, "add" for `linear_add`, and "add_norm" for
    `linear_add_norm`, or `linear_add` where the set declines that. Products have no bias, but for
    one that is added to the residual, which is left out here. More kinds may come.
    """

    kind: Literal["linear", "add", "add_norm", "gate_up"]
    weight: Tensor
    num_rows: tuple[int, ...]


@runtime_checkable
class LoadingKernels(Protocol):
    """A kernel set that leaves products to a library whose kernels are loaded when first needed."""

    def load_products(self, products: Iterable[Product]) -> None:
        """Have the library load its kernels for these products, and leave out unknown kinds.

        Called of a set that is also `CompilingKernels`, in a start whose kernels an earlier process
        has compiled: while these are loaded, so that no capture waits for the library. Nothing
        reads what is computed.
        """
