"""The executor's spec and options; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import ExecutorSpec, hookimpl

AllReduce = Literal["auto", "nccl", "symmetric"]
"""What sums over the GPUs of all ranks."""


class ParallelOptions(BaseModel):
    """Options of `executor: {name: parallel}`: what sums, and the bounds of every wait, in seconds.

    The number of ranks is the engine's `tensor_parallel_size`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_seconds: float = Field(
        1800, gt=0, description="The longest wait for the start of all ranks."
    )
    stall_seconds: float = Field(
        30,
        gt=0,
        description="A rank that does not answer for this long, or a step in which no rank moves "
        "for this long, ends the engine.",
    )
    close_seconds: float = Field(
        10, gt=0, description="The longest wait for ranks to close; then they are killed."
    )
    all_reduce: AllReduce = Field(
        "auto",
        description="What sums over the GPUs of all ranks. symmetric: by the size of the sum, with "
        "the limits of a committed table, a one-shot kernel, a two-shot kernel, or NCCL. auto: "
        "symmetric where it was measured, which is for 2 and 4 ranks on GPUs of compute capability "
        "9.0 or newer; else nccl. CPUs use gloo.",
    )


PARALLEL = ExecutorSpec(
    name="parallel",
    impl="nanovllm_executor_parallel.executor:ParallelExecutor",
    summary="Each layer is split over tensor_parallel_size processes, a device for each.",
    options=ParallelOptions,
    contract=4,
    max_tensor_parallel_size=64,
    needs_warm_up=False,
)


@hookimpl
def nanovllm_executors() -> Sequence[ExecutorSpec]:
    """Tensor parallelism on one host."""
    return [PARALLEL]
