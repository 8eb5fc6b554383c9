"""The contract of a logits processor: it changes the logits of the rows that use it.

Who calls what, and when:

    spec.arguments, spec.check        once per request that uses it, before it is queued
    Processor(options, context)       once, at start, before the KV cache is sized
    prepare(arguments)                once per admission of such a request to a row
    process(logits_SV, requests)      once per step that samples for such rows

All of it runs on the current stream, and none is captured in a CUDA graph. A step may be launched
before the host has seen the previous step's token, so the facts of a row are on the device.
Shape suffixes: S rows that use it, V vocabulary, L ids at most (`max_model_len`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsContext:
    """The facts of the engine that a processor is made with.

    `tokenizer` is the folder that holds the tokenizer's files, if the model has one.
    """

    device: torch.device
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    tokenizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsRequest:
    """One row of a call of `process`: its arguments, and its ids on the device.

    `arguments` is an instance of the spec's `arguments`, `state` what `prepare` returned for it.
    `token_ids` [L] int32 holds the row's ids; the first `num_known` (0-dim int32) are valid, of
    which the first `num_prompt` (0-dim int32) are the prompt's, at least one. They may be read on
    the device only (`.item()`, printing or branching on them would wait for it) and are never
    written to. If the device has already ended the row, both are 1, and its choice is
    dropped.
    """

    arguments: BaseModel
    state: object
    token_ids: Tensor
    num_prompt: Tensor
    num_known: Tensor


class LogitsProcessor(ABC):
    """Changes logits in place. One instance serves all requests of an engine.

    It runs before the penalties and before temperature, min_p, top_k and top_p; several run in the
    order of the configuration. Log-probabilities are reported of the logits before all of them.
    """

    def __init__(self, options: BaseModel, context: LogitsContext) -> None:
        self.options = options
        self.context = context

    def prepare(self, arguments: BaseModel) -> object:
        """The state for this row's calls of `process`, such as a tensor of ids on the device.

        Called when a request that uses the processor gets a row, and again after a preemption, so
        the result must depend on `arguments` alone. An error here ends the engine: checks of a
        request belong in the spec's `arguments` and `check`.
        """
        return None

    @abstractmethod
    def process(self, logits_SV: Tensor, requests: Sequence[LogitsRequest]) -> None:
        """Change `logits_SV` [S, V] float32 in place; row i is that of `requests[i]`.

        -inf forbids an id; an earlier processor may have forbidden some. A row must keep one id
        above -inf (its request ends with an error if it does not), and no logit may become NaN or
        +inf; `debug: true` checks both. Must not wait for the device, nor keep the tensors. It sees
        only rows that use it. An error ends the engine, with this plugin's name. If the logits of a
        step's rows do not fit in memory together, it is called for some of them at a time.
        """
