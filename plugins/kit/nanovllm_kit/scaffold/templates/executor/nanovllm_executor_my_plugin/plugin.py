"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ExecutorSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field


class MyPluginOptions(BaseModel):
    """Options of `executor: {name: my_plugin}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    csv: str | None = Field(
        default=None,
        description="A file that gets a line for each step: tokens computed, rows that got a "
        "token, seconds from the launch to the result. Left out, only the log gets a summary.",
    )


SPEC = ExecutorSpec(
    name="my_plugin",
    impl="nanovllm_executor_my_plugin.executor:MyPluginExecutor",
    summary="One worker in this process, and the time of each step.",
    contract=4,
    options=MyPluginOptions,
    max_tensor_parallel_size=1,
)


@hookimpl
def nanovllm_executors() -> Sequence[ExecutorSpec]:
    """The executor of this package."""
    return [SPEC]
