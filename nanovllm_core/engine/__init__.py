"""Requests, KV pages, scheduling and the loop one step ahead. Nothing here imports torch."""

from nanovllm_core.engine.engine import Engine
from nanovllm_core.engine.limits import EngineLimits
from nanovllm_core.engine.output_processor import (
    Detokenizer,
    DetokenizerFactory,
    RequestOutput,
)
from nanovllm_core.engine.policies import FcfsPolicy
from nanovllm_core.engine.scheduler import TokenBudgetScheduler
from nanovllm_core.engine.stats import EngineStats
from nanovllm_core.interfaces.observer import FinishReason

__all__ = [
    "Detokenizer",
    "DetokenizerFactory",
    "Engine",
    "EngineLimits",
    "EngineStats",
    "FcfsPolicy",
    "FinishReason",
    "RequestOutput",
    "TokenBudgetScheduler",
]
