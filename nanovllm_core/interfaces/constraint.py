"""The contract of a constraint: it says on the host which ids a request may choose next.

Grammars, choices and regular expressions over tokens are constraints. They need the ids that were
chosen before, so a step with such a row is submitted in two parts: while the device runs the
forward pass, the host takes in the last ids and fills the masks; then the sampling is launched.

Who calls what, and when:

    spec.arguments, spec.check           once per request that uses it, before it is queued
    Constraint(options, context)         once, at start, before the weights are loaded
    start(arguments, prompt_ids)         once per sample of such a request
    advance(state, token_id)             once per id that was chosen, in order
    fill(state, mask)                    once per id to choose, after `advance` for all before it

The first runs on the engine's thread, without a bound, so it must be quick: what takes long, such
as compiling a grammar, belongs in `start`. The last three run on another thread, one call at a
time. While one is slow, another thread goes on with samples of other requests, so calls for them
may overlap. For each mask the engine waits `limits.constraint_seconds` at most; then it leaves the
thread behind, and makes no further call for that sample.

The module imports no torch; W is ceil(V / 32) for a vocabulary of V ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.interfaces.specs import NoOptions, PluginSpec

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSpec(PluginSpec):
    """A constraint. `impl` is a `Constraint` class, called with options and `ConstraintContext`.

    `arguments` is the model of a request's arguments, `SamplingParams(constraints={name: {...}})`;
    it forbids unknown keys. `check` takes valid arguments and the vocabulary's size and returns
    reasons to refuse that request, such as a pattern that cannot be read; other requests continue.
    Both run on the engine's thread, which waits for them: they must be quick.
    """

    arguments: type[BaseModel] = NoOptions
    check: Callable[[Any, int], list[str]] = lambda _arguments, _vocab_size: []


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintContext:
    """The facts of the engine that a constraint is made with.

    `tokenizer` is the folder that holds the tokenizer's files, if the model has one.
    `eos_token_ids` end an answer: allow one of them where it may end. `max_model_len` is an upper
    bound: with `max_model_len: fit` the engine's own is known only when the weights are loaded.
    """

    vocab_size: int
    max_model_len: int
    tokenizer: str
    eos_token_ids: tuple[int, ...]


class Constraint(ABC):
    """Allows ids. One instance serves all requests of an engine; a request's facts are its state.

    A mask holds back every other id, after logit bias, processors, penalties and `min_tokens`, and
    before temperature, min_p, top_k and top_p; log-probabilities are reported of the logits before
    all of them. A request may use several constraints: then it may choose the ids that all allow.

    An error in `start`, `advance` or `fill`, a late mask, and one that allows no id (the request's
    own fault) end the request with `finish_reason="error"`. Other requests go on.
    """

    def __init__(self, options: BaseModel, context: ConstraintContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def start(self, arguments: BaseModel, prompt_ids: NDArray[np.int32]) -> object:
        """The state of one sample, before its first id; samples never share one.

        `arguments` is an instance of the spec's `arguments`, and may be shared by samples.
        """

    @abstractmethod
    def advance(self, state: Any, token_id: int) -> None:
        """Take in the id that was chosen; the last mask allowed it.

        Not called for an id that ended the sample. An end-of-sequence id does not always: a request
        with `ignore_eos` goes on behind it, so the masks behind it must allow it again.
        """

    @abstractmethod
    def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
        """Allow ids: `mask`, int32 [W], is all 0; bit i of word j allows id 32 j + i.

        `allow_ids` sets bits. Bits beyond the vocabulary are ignored. It must not change `state`
        in a way that a second call would show, nor keep `mask`.
        """


def allow_ids(mask: NDArray[np.int32], token_ids: Any) -> None:
    """Set the bits of these ids in a mask: integers, of any sequence or array.

    Or those where a boolean array [V] is true. Raises ValueError for ids that the mask has no bit
    for, and for what are no ids.
    """
    ids = np.asarray(token_ids).reshape(-1)
    size = 32 * len(mask)
    if ids.dtype == np.bool_ and len(ids) <= size:
        flags = ids
    elif not len(ids):
        return
    elif not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_ids are {ids.dtype} [{len(ids)}]; they must be ids, or bool [V]")
    elif ids.min() < 0 or ids.max() >= size:
        raise ValueError(
            f"token_ids are {ids.min()} to {ids.max()}; a mask of {len(mask)} words has bits for 0 "
            f"to {size - 1}"
        )
    elif len(ids) < len(mask):  # The cost of each way, up to a factor.
        ids = ids.astype(np.int64)
        bits = np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32))
        np.bitwise_or.at(mask.view(np.uint32), ids >> 5, bits)
        return
    else:
        flags = np.zeros(size, np.bool_)
        flags[ids] = True
    packed = np.packbits(flags, bitorder="little")
    mask.view(np.uint8)[: len(packed)] |= packed


def allows(mask: NDArray[np.int32], token_id: int) -> bool:
    """True where the mask allows this id."""
    return bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)
