"""The executor's spec and options; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import ExecutorSpec, hookimpl


class ProcessOptions(BaseModel):
    """Options of `executor: {name: process}`: the bounds of every wait, in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_seconds: float = Field(1800, gt=0, description="The longest wait for the start.")
    step_seconds: float = Field(60, gt=0, description="The longest wait for a step's result.")
    close_seconds: float = Field(10, gt=0, description="Then a process that goes on is killed.")


PROCESS = ExecutorSpec(
    name="process",
    impl="nanovllm_example_executor_process.executor:ProcessExecutor",
    summary="The model runs in a process of its own, on one device.",
    options=ProcessOptions,
    contract=4,
)


@hookimpl
def nanovllm_executors() -> Sequence[ExecutorSpec]:
    return [PROCESS]
