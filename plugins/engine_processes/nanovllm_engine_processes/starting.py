"""The wait for the start of all engines."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import Any

from nanovllm_core.api import EngineClosedError, EngineError
from nanovllm_core.frontend import Close, Message
from nanovllm_engine_processes import wire
from nanovllm_engine_processes.engines import Engines


def await_starts(
    engines: Engines, inbox: SimpleQueue[Message], name: str, seconds: float
) -> dict[int, list[Any]]:
    """The facts that each engine has sent, by its number.

    Raises the error of an engine whose start failed, EngineClosedError if `inbox` brings `Close`,
    and EngineError if the starts take longer than `seconds`.
    """
    began = time.monotonic()
    facts: dict[int, list[Any]] = {}
    while len(facts) < len(engines):
        for number, what, content in engines.receive():
            if what != wire.STARTED:
                raise wire.read_error(content)
            facts[number] = content
            engines.mark_ready(number)
        heard, ended = engines.find_ended()
        failed = [content for _, what, content in heard if what == wire.FAILED]
        if ended:
            raise wire.read_error(failed[0]) if failed else next(iter(ended.values()))
        if not inbox.empty() and isinstance(inbox.get(), Close):
            raise EngineClosedError(f"the start of this {name} was interrupted")
        if time.monotonic() - began > seconds:
            names = ", ".join(engines.name(one) for one in engines if one not in facts)
            raise EngineError(f"{names} did not start within start_seconds ({seconds:g} s)")
    return facts
