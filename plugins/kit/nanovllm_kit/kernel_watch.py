"""Watches that a model's weights are read by its kernel set alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm_core.interfaces.kernels import KernelSet


class KernelWatch(TorchDispatchMode):
    """Notes each torch operation of this thread that reads a weight matrix outside a kernel set.

        watch = KernelWatch(TorchKernels())
        model = build_model(..., kernels=watch.kernels)
        with watch.over(model):
            run_model(model, ids)
        assert not watch.found

    Weight matrices are parameters of two dimensions and more. Those of one, such as norms and
    biases, may be read by anyone. Each rank needs a watch of its own.
    """

    def __init__(self, kernels: KernelSet) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = cast(KernelSet, _Watched(kernels, self))
        """The set to build the model with."""
        self.found: list[str] = []
        """What was read outside the set: "aten.mm.default: model.layers.0.mlp.down_proj.weight"."""
        self.inside = False
        self._names: dict[int, str] = {}

    def over(self, model: nn.Module) -> KernelWatch:
        """This watch, over a model's weights where they lie now."""
        self._names = {
            parameter.untyped_storage().data_ptr(): name
            for name, parameter in model.named_parameters()
            if parameter.dim() > 1
        }
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self.inside:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            places = [x.untyped_storage().data_ptr() for x in tensors]
            self.found += [f"{func}: {self._names[at]}" for at in places if at in self._names]
        return func(*args, **(kwargs or {}))


class _Watched:
    """A kernel set that tells its watch when it works."""

    def __init__(self, kernels: KernelSet, watch: KernelWatch) -> None:
        self._kernels, self._watch = kernels, watch

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._kernels, name)
        if not callable(operation):
            return operation

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._watch.inside = True
            try:
                return operation(*args, **kwargs)
            finally:
                self._watch.inside = False

        return watched
