"""The plugins that come with the core, found and loaded like all others."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.interfaces import specs
from nanovllm_core.registry.hookspecs import hookimpl


@hookimpl
def nanovllm_schedulers() -> Sequence[specs.SchedulerSpec]:
    return [
        specs.SchedulerSpec(
            name="fcfs",
            impl="nanovllm_core.engine.scheduler:FcfsPolicy",
            contract=1,
            summary="First come, first served.",
            max_overtaking_steps=lambda _options, _request: 0,
        )
    ]


@hookimpl
def nanovllm_executors() -> Sequence[specs.ExecutorSpec]:
    return [
        specs.ExecutorSpec(
            name="single",
            impl="nanovllm_core.worker.executor:SingleProcessExecutor",
            contract=4,
            summary="The model runs in this process, on one device.",
            needs_warm_up=False,
        )
    ]


@hookimpl
def nanovllm_engine_clients() -> Sequence[specs.EngineClientSpec]:
    return [
        specs.EngineClientSpec(
            name="thread",
            impl="nanovllm_core.frontend.thread:ThreadClient",
            contract=1,
            summary="An engine on a thread of this process.",
        )
    ]


@hookimpl
def nanovllm_checkpoints() -> Sequence[specs.CheckpointSpec]:
    return [
        specs.CheckpointSpec(
            name="local",
            impl="nanovllm_core.selection.checkpoint:from_folder",
            contract=2,
            summary="A folder of this machine.",
        ),
        specs.CheckpointSpec(
            name="hub",
            impl="nanovllm_core.selection.checkpoint:from_hub",
            contract=2,
            summary="A model of the Hugging Face hub, downloaded once.",
        ),
    ]


@hookimpl
def nanovllm_samplers() -> Sequence[specs.SamplerSpec]:
    return [
        specs.SamplerSpec(
            name="gumbel",
            impl="nanovllm_core.worker.sampler:GumbelSampler",
            contract=1,
            summary="Greedy and temperature; noise follows from seed, output index and id alone.",
            devices=frozenset({"cpu", "cuda"}),
            cuda_graphs=True,
            needs_warm_up=False,
        )
    ]


@hookimpl
def nanovllm_kernels() -> Sequence[specs.KernelSetSpec]:
    return [
        specs.KernelSetSpec(
            name="torch",
            impl="nanovllm_core.kernels.reference:TorchKernels",
            contract=4,
            summary="The reference: one torch operation after another, on any device.",
            devices=frozenset({"cpu", "cuda"}),
            rank=10,
        ),
    ]
