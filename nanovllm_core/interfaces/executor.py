"""The contract of an executor: the way the engine reaches its worker or workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm_core.interfaces.attention import KVLayout
from nanovllm_core.interfaces.plan import StepPlan, StepResult, WorkerInfo
from nanovllm_core.interfaces.specs import ResolvedPlugin

if TYPE_CHECKING:
    from pydantic import BaseModel

    from nanovllm_core.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Everything rank 0 resolved at start; a worker imports and loads exactly this.

    `checkpoint` is the folder of the checkpoint, `model_config` its config.json as a dict.
    `tokenizer` is the folder of the tokenizer's files. `device` ("cuda:0", "cpu") and `dtype`
    ("bfloat16") are resolved, never "auto".
    """

    config: EngineConfig
    checkpoint: str
    model_config: Mapping[str, Any]
    model: ResolvedPlugin
    prefill_attention: ResolvedPlugin
    decode_attention: ResolvedPlugin
    kernels: ResolvedPlugin
    sampler: ResolvedPlugin
    logits_processors: tuple[ResolvedPlugin, ...]
    tokenizer: str
    kv_layout: KVLayout
    block_size: int
    max_model_len: int
    device: str
    dtype: str
    cuda_graphs: bool


class Executor(ABC):
    """Runs plans in order. Results come in the same order, possibly several steps late.

    `submit` must not wait for the device. `collect` waits for the oldest step not yet collected.
    """

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    def start(self, setup: WorkerSetup) -> WorkerInfo:
        """Load the model, size the KV cache, capture graphs. Called once."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Apply the plan's deltas and launch its step."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return its result."""

    @abstractmethod
    def close(self) -> None:
        """Free the device. Closing twice is fine, and so is closing what was never started."""
