"""The command `nanovllm steps`: what the file of the executor `timed` says."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nanovllm_core.api import ConfigError


class Step(BaseModel):
    """One line of the file: tokens of prompts, rows that decoded, and the time it took."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill: int = Field(ge=0)
    decode: int = Field(ge=0)
    seconds: float = Field(gt=0)

    @property
    def work(self) -> str:
        """What the step was for."""
        if self.prefill and self.decode:
            return "mixed"
        return "prefill" if self.prefill else "decode"


def steps(
    file: Annotated[Path, typer.Argument(help="What the executor `timed` wrote.")],
) -> None:
    """Print how long the steps of an engine took, by what they computed."""
    by_work: dict[str, list[Step]] = defaultdict(list)
    for step in read_steps(file):
        by_work[step.work].append(step)
    print("work       steps    tokens   median ms  longest ms    tokens/s")
    for work, group in sorted(by_work.items()):
        print(summary(work, group))


def read_steps(file: Path) -> list[Step]:
    """The steps of a file; ConfigError where it cannot be read or has another line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}); name the path that the executor timed was given"
        ) from error
    read = []
    for number, line in enumerate(lines, start=1):
        try:
            read.append(Step.model_validate_json(line))
        except ValidationError as error:
            raise ConfigError(
                f"line {number} of {file} is no step ({error}); name a file that only the executor "
                "timed has written"
            ) from error
    return read


def summary(work: str, group: list[Step]) -> str:
    """One row of the table."""
    times = [step.seconds for step in group]
    tokens = sum(step.prefill + step.decode for step in group)
    rate = tokens / sum(times)
    return (
        f"{work:8}{len(group):8,}{tokens:10,}{median(times) * 1e3:12.2f}{max(times) * 1e3:12.2f}"
        f"{rate:12,.0f}"
    )
