"""The contract of a router, version 1: the engine that a request goes to.

Who calls what, and when:

    Router(options, num_engines)    once, before the engines start
    choose(request, loads)          for every request, in the order of their arrival
    forget(engine)                  an engine has ended, and gets no more requests

All calls come from one thread, which also hands out the tokens: none may wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from nanovllm_core.api import PluginFailedError, PluginSpec

if TYPE_CHECKING:
    from nanovllm_core.frontend import NewRequest


@dataclass(slots=True)
class EngineLoad:
    """The work that an engine has been sent and has not given back.

    `requests` are unfinished samples; `tokens` their prompts and the outputs that they may still
    have, by `max_tokens`.
    """

    requests: int = 0
    tokens: int = 0


class Router(ABC):
    """Chooses an engine for every request. Its samples stay together."""

    def __init__(self, options: BaseModel, num_engines: int) -> None:
        self.options = options
        self.num_engines = num_engines

    @abstractmethod
    def choose(self, request: NewRequest, loads: Mapping[int, EngineLoad]) -> int:
        """One of the engines in `loads`: those that run, by number, at least one.

        The loads change after the call: copy what is to be kept. An error refuses the request.
        """

    def forget(self, engine: int) -> None:  # noqa: B027 - optional
        """This engine has ended, and what it had cached is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec(PluginSpec):
    """A router. `impl` is a `Router` class, called with its options and the number of engines."""


def choose(router: Router, request: NewRequest, loads: Mapping[int, EngineLoad]) -> int:
    """The router's choice; PluginFailedError where it fails, or chooses no engine that runs."""
    name = type(router).__name__
    try:
        chosen = router.choose(request, loads)
        if chosen in loads:
            return chosen
    except Exception as error:
        raise PluginFailedError(
            f"the router {name} failed: {type(error).__name__}: {error}"
        ) from error
    raise PluginFailedError(
        f"the router {name} chose engine {chosen!r}; those that run are "
        f"{', '.join(map(str, loads))}"
    )
