"""Products that this set leaves to cuBLAS, which loads a kernel by computing with it."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn.functional import linear

from nanovllm_core.api import Product
from nanovllm_kernels_triton.linear_choice import choose, choose_gated, choose_parts

_CHOICES = {
    "linear": (choose,),
    "add": (choose,),
    "add_norm": (choose, choose_parts),
    "gate_up": (choose_gated,),
}
"""By kind of product: the choices of which one has a kernel of the set for it."""


def load_from_library(products: Iterable[Product]) -> None:
    """See `LoadingKernels.load_products`."""
    for product in products:
        weight_XE = product.weight
        outputs, inputs = weight_XE.shape
        for num_rows in product.num_rows if product.kind in _CHOICES else ():
            asked = num_rows, outputs, inputs, weight_XE.dtype
            if any(choice(*asked) is not None for choice in _CHOICES[product.kind]):
                continue
            x_TE = weight_XE.new_empty((num_rows, inputs))
            if product.kind.startswith("add"):
                x_TE.new_empty((num_rows, outputs)).addmm_(x_TE, weight_XE.t())
            else:
                linear(x_TE, weight_XE)
