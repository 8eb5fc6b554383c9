"""What the four plugins say about themselves; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import ExecutorSpec, KernelSetSpec, SamplerSpec, hookimpl
from nanovllm_example_more_kinds.command import steps


class TimedOptions(BaseModel):
    """Options of `executor: {name: timed}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="The file that gets a line of JSON for each step.")


TIMED = ExecutorSpec(
    name="timed",
    impl="nanovllm_example_more_kinds.executor:TimedExecutor",
    summary="One device in this process, and a file with the time of every step.",
    options=TimedOptions,
    contract=4,
)

INVERSE_CDF = SamplerSpec(
    name="inverse_cdf",
    impl="nanovllm_example_more_kinds.sampler:InverseCdfSampler",
    summary="One random number per token, looked up in the cumulative distribution.",
    contract=1,
    devices=frozenset({"cpu"}),
)

FLOAT64 = KernelSetSpec(
    name="float64",
    impl="nanovllm_example_more_kinds.kernels:Float64Kernels",
    summary="Every operation in double precision, to see what rounding does to an answer.",
    contract=4,
    devices=frozenset({"cpu"}),
)


@hookimpl
def nanovllm_executors() -> Sequence[ExecutorSpec]:
    return [TIMED]


@hookimpl
def nanovllm_samplers() -> Sequence[SamplerSpec]:
    return [INVERSE_CDF]


@hookimpl
def nanovllm_kernels() -> Sequence[KernelSetSpec]:
    return [FLOAT64]


@hookimpl
def nanovllm_cli(app: typer.Typer) -> None:
    app.command("steps")(steps)
