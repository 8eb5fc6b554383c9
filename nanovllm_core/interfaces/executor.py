"""The contract of an executor: it connects the engine to its worker or workers.

Who calls what, and when, all on the engine's own thread:

    Executor(options)     once, at start, before anything is loaded
    start(setup)          once
    submit(plan)          once per step; up to `steps_ahead` + 1 are not collected
    sample(masks)         once per step whose plan `samples_later`, before the next `submit`
    collect()             once per step, in the order of submission
    check()               every second or so while no request is unfinished
    close()               at the end, or where the start failed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm_core.interfaces.attention import KVLayout
from nanovllm_core.interfaces.plan import StepPlan, StepResult, TokenMasks, WorkerInfo
from nanovllm_core.interfaces.specs import ResolvedPlugin

if TYPE_CHECKING:
    from pydantic import BaseModel

    from nanovllm_core.config.settings import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Everything rank 0 resolved at start; a worker imports and loads exactly this.

    `checkpoint` is the folder of the checkpoint, `model_config` its config.json as a dict.
    `tokenizer` is the folder of the tokenizer's files. `device` ("cuda:0", "cpu") and `dtype`
    ("bfloat16") are resolved, never "auto". `max_model_len` is a bound where the configuration says
    `fit`: an executor may offer less, by `WorkerInfo.max_model_len`. `prompt_graph_sizes`: the
    numbers of prompt tokens that steps are padded to, and captured with where `cuda_graphs` is set,
    increasing; empty where the prefill backend cannot be captured. `needs_warm_up`: whether a step
    must run before it is captured; see `PluginSpec`. `clears_blocks`: whether a block is zeroed for
    each new owner, for an attention backend `needs_finite_tail`.
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
    prompt_graph_sizes: tuple[int, ...] = ()
    needs_warm_up: bool = True
    clears_blocks: bool = True


class Executor(ABC):
    """Runs plans in order. Results come in the same order, possibly several steps late.

    `submit` and `sample` must not wait for the device. `collect` waits for the oldest step not yet
    collected. Any error in one of them ends the engine.
    """

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    def start(self, setup: WorkerSetup) -> WorkerInfo:
        """Load the model, size the KV cache, capture graphs.

        Each worker imports exactly the plugins that `setup` resolved (`resolved.impl`, with the
        options as its model). Raises WeightsError, OutOfMemoryError or whatever a plugin raises.
        """

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Apply the plan's deltas, then launch its step.

        Every worker needs every plan, in order: one without decoding rows refers to those that an
        earlier plan of its epoch listed. A worker that lacks them raises InconsistentStateError,
        here or from `collect`.
        """

    @abstractmethod
    def sample(self, masks: TokenMasks) -> None:
        """Launch the sampling of the newest step, whose plan `samples_later`.

        Steps before it may be collected between the two parts. Every worker needs the masks. Where
        the next plan comes first, no step waits for masks, or the rows or shapes are not the
        step's, a worker raises InconsistentStateError, here or from `collect`.
        """

    @abstractmethod
    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return its result.

        Ctrl-C (KeyboardInterrupt) may leave it; the next call then waits for the same step. Raises
        ExecutorError where a worker failed or no step is in flight.
        """

    def check(self) -> None:  # noqa: B027 - optional: workers in this process end with it
        """Raise ExecutorError where a worker has ended; never waits."""

    @abstractmethod
    def close(self) -> None:
        """Free the device. May be called twice, and without a start."""
