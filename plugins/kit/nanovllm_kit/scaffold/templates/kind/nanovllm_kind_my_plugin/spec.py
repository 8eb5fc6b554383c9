"""What a plugin of this kind says about itself, and the contract that it keeps.

Others import from here. Nothing in this module imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from nanovllm_core.api import PluginSpec, StepRecord
from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSinkSpec(PluginSpec):
    """A place where the numbers of steps go. `impl` is a `StepSink` class.

    `unit` is that of the seconds it writes: "s" or "ms".
    """

    unit: str = "s"


class StepSink(ABC):
    """Takes the record of each step. Made once per engine, as `Class(options)`.

    `write` is called once per step on the engine's thread, `close` once at the end.
    """

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    def write(self, record: StepRecord) -> None:
        """One step was taken in. Steps wait for this."""

    @abstractmethod
    def close(self) -> None:
        """The last call: flush and free what is held."""
