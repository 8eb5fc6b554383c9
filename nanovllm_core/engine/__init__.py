"""Requests, KV blocks, scheduling and the loop one step ahead. Nothing here imports torch."""

from nanovllm_core.engine.constraints import LoadedConstraint as LoadedConstraint
from nanovllm_core.engine.deltas import OutputDelta as OutputDelta
from nanovllm_core.engine.engine import Engine as Engine
from nanovllm_core.engine.limits import EngineLimits as EngineLimits
from nanovllm_core.engine.observation import (
    EngineStats as EngineStats,
    Observation as Observation,
)
from nanovllm_core.engine.request import Request as Request
from nanovllm_core.engine.scheduler import (
    FcfsPolicy as FcfsPolicy,
    TokenBudgetScheduler as TokenBudgetScheduler,
)
