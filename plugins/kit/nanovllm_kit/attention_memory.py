"""Checks of the memory that an attention backend holds: its own, and no more as time goes on."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from nanovllm_core.interfaces.attention import AttentionBackend, Phase
from nanovllm_kit.attention_backend import AttentionSubject, BackendUnderTest
from nanovllm_kit.attention_state import (
    Step,
    backend_for,
    drawn_step,
    make_step,
    small_case,
    widened,
)

STEPS = 30
"""Steps of each phase in each of the parts between which growth is measured."""


class AttentionMemory(AttentionSubject):
    """A backend keeps what it allocated, and at most its last step besides."""

    def test_past_steps_are_let_go(self, subject: BackendUnderTest, draws: Random) -> None:
        """Of each phase the last step's tensors may be kept, for its layers; no earlier one's."""
        first = drawn_step(subject, draws, subject.phases[0], 3, 60)
        backend, _ = backend_for(subject, [first], 64)
        past: list[tuple[int, Phase, list[weakref.ref[Tensor]]]] = []
        for number in range(5):
            for phase in subject.phases:
                step = widened(drawn_step(subject, draws, phase, 3, 60), backend.config)
                step.plan(backend)
                step.check(backend, f"step {number}")
                past.append((number, phase, [weakref.ref(tensor) for tensor in step.tensors()]))
                del step
        gc.collect()
        for number, phase, tensors in past[: -len(subject.phases)]:
            if kept := sum(tensor() is not None for tensor in tensors):
                raise AssertionError(
                    f"{4 - number} {phase} steps later the backend still keeps {kept} tensors of a "
                    "step; it may keep those of its last plan, and no others"
                )

    def test_memory_does_not_grow_with_the_steps(
        self, subject: BackendUnderTest, draws: Random
    ) -> None:
        """Many steps, each of other lengths, leave no more behind than as many before them did."""
        largest = [
            make_step(phase, small_case(subject, draws, [48] * 3, queries))
            for phase, queries in (("decode", None), ("prefill", [12] * 3))
            if phase in subject.phases
        ]
        backend, largest = backend_for(subject, largest, 48)
        held = []
        for _ in range(3):
            for phase in subject.phases * STEPS:
                drawn = drawn_step(subject, draws, phase, draws.randint(1, 3), 48)
                _run(backend, [widened(drawn, backend.config)])
                del drawn
            # What is kept of the last step is the same in every part.
            _run(backend, largest)
            held.append(_held(backend))
        # A store that is full some time grows no more: what grows in each part does so for ever.
        for name, per_step, *counts in zip(HELD, PER_STEP, *held, strict=True):
            grown = [later - before for before, later in pairwise(counts)]
            if min(grown) >= per_step * STEPS:
                raise AssertionError(
                    f"{STEPS} steps of each phase left {grown[-1]} more {name} behind, and as many "
                    f"before them {grown[0]}: keep nothing of a step that is over"
                )

    def test_backends_write_to_no_memory_of_each_other(
        self, subject: BackendUnderTest, draws: Random
    ) -> None:
        """What one has used, another of the same process leaves as it is: engines run at once."""
        engines = []
        for _ in range(2):
            steps = [drawn_step(subject, draws, phase, 4, 80) for phase in subject.phases]
            engines.append(backend_for(subject, steps, 80))
        (backend, steps), other = engines
        with _storages() as used:
            _run(backend, steps)
        used += [tensor.untyped_storage() for tensor in backend.captured_tensors().values()]
        given = {_key(x.untyped_storage()) for step in steps for x in step.tensors()}
        mine = {_key(x): x for x in used if _key(x) not in given}
        before = {key: storage.clone() for key, storage in mine.items()}
        _run(*other)
        for key, storage in mine.items():
            if not torch.equal(_bytes(storage), _bytes(before[key])):
                raise AssertionError(
                    f"{storage.nbytes()} bytes that one backend uses were written to by another "
                    "of the same process: keep scratch memory on the instance, not on its class or "
                    "module, for two engines may run at once"
                )


def _run(backend: AttentionBackend, steps: list[Step]) -> None:
    for step in steps:
        step.plan(backend)
        step.run(backend)


HELD = ("tensors", "bytes of tensors", "objects of its own")
PER_STEP = (0.5, 2, 1)
"""How much of each in a step is no chance."""


def _held(backend: AttentionBackend) -> tuple[int, int, int]:
    """What HELD names, right now."""
    gc.collect()
    # By the type alone: some objects of modules warn when they are asked for their class.
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    size = sum(map(_nbytes, tensors))
    if backend.config.device.type == "cuda":
        size = torch.cuda.memory_allocated()
    return len(tensors), size, _reachable(backend)


def _nbytes(tensor: Tensor) -> int:
    """0 of a tensor without sizes, as a compiler traces with."""
    try:
        return tensor.nbytes
    except RuntimeError:
        return 0


def _reachable(backend: AttentionBackend) -> int:
    """How many objects a backend and the modules of its package hold."""
    package = type(backend).__module__.rpartition(".")[0] or type(backend).__module__

    def is_own(module: str) -> bool:
        return f"{module}.".startswith(f"{package}.")

    found: list[Any] = [backend, *(x for name, x in [*sys.modules.items()] if is_own(name))]
    seen = {id(x) for x in found}
    while found:
        one = found.pop()
        if isinstance(one, FunctionType):  # What it names globally is its module's.
            inside = [one.__closure__, one.__dict__, one.__defaults__]
        elif isinstance(one, (type, ModuleType)):
            home = one.__module__ if isinstance(one, type) else one.__name__
            inside = gc.get_referents(one) if is_own(home) else []
        else:
            inside = gc.get_referents(one)
        for x in inside:
            if id(x) not in seen:
                seen.add(id(x))
                found.append(x)
    return len(seen)


@contextmanager
def _storages() -> Iterator[list[torch.UntypedStorage]]:
    """The memory of every tensor that torch's functions see inside the block, kept alive."""
    seen: list[torch.UntypedStorage] = []

    # Not at the dispatcher, one level below: tensor subclasses cannot be made under such a mode.
    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            leaves = tree_flatten((args, kwargs, result))[0]
            seen.extend(x.untyped_storage() for x in leaves if isinstance(x, Tensor))
            return result

    with Functions():
        yield seen


def _key(storage: torch.UntypedStorage) -> int:
    """What tells one storage from another while both live."""
    return int(storage._cdata)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
