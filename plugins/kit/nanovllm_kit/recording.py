"""CUDA graphs for a CPU: record what a step does once, run it again over the same memory.

    with record() as recording:
        backend.plan_decode(metadata)
        backend.run_decode(q, k_cache, v_cache, metadata, out)
    seq_lens.copy_(others)
    recording.replay()

As in a captured graph, host code runs once: numbers that it worked out are frozen, and memory is
known by its address. Tensors that were made while recording belong to the recording; all others it
holds weakly: one that its owner has dropped is an error, where a graph would read freed memory.
Reading a tensor's value on the host is an error while recording, as it is in capture.

Recorded are torch's operations and launches of interpreted Triton kernels; work that neither sees
is not repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_READS = {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"}
"""Tensor methods that give the host a value."""


class ReplayError(AssertionError):
    """The step could not be captured, or a replay would read memory that is gone."""


class HostReadError(ReplayError):
    """The step read a tensor's value on the host."""


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """A tensor that the recording does not own: a view of memory that somebody else must keep."""

    storage: StorageWeakRef
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    user: str

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise ReplayError(
                f"{self.user} reads a tensor {tuple(self.size)} of {self.dtype} that nothing keeps "
                "any more: in a captured graph this is freed memory; allocate it once, in "
                "allocate(), and write into it"
            )
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Call:
    """One recorded operation: its arguments, tensors replaced by holders, and its own results."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]


class Recording:
    """The operations of one step. Make it with `record`."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._own: dict[int, torch.UntypedStorage] = {}

    def replay(self) -> None:
        """Run the recorded operations again, on the memory of the recording.

        Raises ReplayError where an operation reads a tensor that nothing keeps any more.
        """
        with torch.no_grad():
            for call in self._calls:
                result = call.function(*_lend(call.args), **_lend(call.kwargs))
                for old, new in zip(call.results, tree_flatten(result)[0], strict=False):
                    if isinstance(old, Tensor):
                        old.copy_(new)

    def add(
        self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, name: str
    ) -> None:
        """Append one operation, which gave `result` just now."""
        inputs = {_address(x) for x in _tensors((args, kwargs))}
        results = []
        for output in tree_flatten(result)[0]:
            new = isinstance(output, Tensor) and _address(output) not in inputs
            if new and output.numel():
                self.keep(output)
            # A view, or an argument that was written to, needs no copy when it is made again.
            results.append(output if new else None)
        self._calls.append(
            _Call(function, self._hold(args, name), self._hold(kwargs, name), tuple(results))
        )

    def keep(self, tensor: Tensor) -> None:
        """Own a tensor's memory, as a graph's pool does: made while recording, or a constant."""
        self._own[_address(tensor)] = tensor.untyped_storage()

    def _hold(self, value: Any, user: str) -> Any:
        def hold(leaf: Any) -> Any:
            if _is_descriptor(leaf):
                return replace(leaf, base=hold(leaf.base))
            if not isinstance(leaf, Tensor) or _address(leaf) in self._own:
                return leaf
            storage = StorageWeakRef(leaf.untyped_storage())
            offset = int(leaf.storage_offset())
            return _Borrowed(storage, leaf.dtype, leaf.shape, leaf.stride(), offset, user)

        return tree_map(hold, value)


@contextmanager
def record() -> Iterator[Recording]:
    """Record what runs inside the block, which also really runs. Not to be nested."""
    recording = Recording()
    operations = _Operations(recording)
    with torch.no_grad(), _launches(recording, operations), operations, _HostReads(operations):
        yield recording


class _Operations(TorchDispatchMode):
    """Sees every torch operation below autograd and composite operations."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.paused = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.lift_fresh.default:
            self.recording.keep(result)
        elif not self.paused:
            self.recording.add(function, args, kwargs or {}, result, str(function))
        return result


class _HostReads(TorchFunctionMode):
    """Refuses what would wait for a device: no value may reach the host."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _READS and not self._operations.paused:
            raise HostReadError(
                f"Tensor.{name} reads a tensor of shape {tuple(args[0].shape)} on the host: on a "
                "GPU this waits for the device, and cannot be captured; use what the metadata "
                "bounds (max_seq_len, shapes)"
            )
        return function(*args, **(kwargs or {}))


@contextmanager
def _launches(recording: Recording, operations: _Operations) -> Iterator[None]:
    """Record launches of interpreted Triton kernels, where Triton is loaded at all."""
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        operations.paused = True
        try:
            result = launch(kernel, *args, **kwargs)
        finally:
            operations.paused = False
        name = f"kernel {kernel.fn.__name__}"
        recording.add(launch, (kernel, *args), kwargs, None, name)
        return result

    with mock.patch.object(InterpretedFunction, "run", run):
        yield


def _lend(value: Any) -> Any:
    """Arguments with the borrowed tensors in place of their holders."""

    def lend(leaf: Any) -> Any:
        if _is_descriptor(leaf):
            return replace(leaf, base=lend(leaf.base))
        return leaf.tensor() if isinstance(leaf, _Borrowed) else leaf

    return tree_map(lend, value)


def _tensors(value: Any) -> list[Tensor]:
    leaves = tree_flatten(value)[0]
    leaves = [leaf.base if _is_descriptor(leaf) else leaf for leaf in leaves]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _is_descriptor(leaf: Any) -> bool:
    """Whether it is one of Triton's tensor descriptors, which hold a tensor as `base`."""
    return is_dataclass(leaf) and not isinstance(leaf, type) and hasattr(leaf, "base")


def _address(tensor: Tensor) -> int:
    """What tells one storage from another while both live."""
    return int(tensor.untyped_storage()._cdata)
