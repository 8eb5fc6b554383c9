"""The constraint's spec and arguments; importing this module imports no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import ConstraintSpec, hookimpl


class ChoicesArguments(BaseModel):
    """What one request may ask: `SamplingParams(constraints={"choices": {"texts": [...]}})`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    texts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1, description="The answer is one of these texts."
    )


SPEC = ConstraintSpec(
    name="choices",
    impl="nanovllm_example_constraint_choices.constraint:Choices",
    summary="The answer is one of the texts that the request gives.",
    arguments=ChoicesArguments,
    contract=1,
)


@hookimpl
def nanovllm_constraints() -> Sequence[ConstraintSpec]:
    return [SPEC]
