"""Engines in processes of their own; several share the requests of one door."""

from nanovllm_engine_processes.routing import EngineLoad, Router, RouterSpec

__all__ = ["EngineLoad", "Router", "RouterSpec"]
