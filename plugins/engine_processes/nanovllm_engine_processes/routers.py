"""The routers `load` and `prefix`."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import xxhash

from nanovllm_engine_processes.plugin import PrefixOptions
from nanovllm_engine_processes.routing import EngineLoad, Router

if TYPE_CHECKING:
    from nanovllm_core.frontend import NewRequest


def least_loaded(loads: Mapping[int, EngineLoad]) -> int:
    """The engine with the fewest unfinished tokens, then requests, then the lowest number."""
    return min(loads, key=lambda engine: (loads[engine].tokens, loads[engine].requests, engine))


class LoadRouter(Router):
    """The engine with the least work."""

    def choose(self, request: NewRequest, loads: Mapping[int, EngineLoad]) -> int:
        return least_loaded(loads)


class PrefixRouter(Router):
    """The engine that was sent the longest prefix of the prompt, unless it has too much work.

    Prompts are cut into blocks, and each prefix of whole blocks is named by a hash chain, which
    starts from the request's salt: as in an engine's cache, salts share nothing. Of every engine
    the newest `max_blocks` names are kept: what it was sent, not what its cache still holds.
    """

    options: PrefixOptions

    def __init__(self, options: PrefixOptions, num_engines: int) -> None:
        super().__init__(options, num_engines)
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]
        """By engine: the names of prefixes, the one sent longest ago first."""

    def choose(self, request: NewRequest, loads: Mapping[int, EngineLoad]) -> int:
        names = [*self._names(request.prompt_token_ids, request.cache_salt)]
        least = min(load.requests for load in loads.values())
        free = {
            engine: load
            for engine, load in loads.items()
            if load.requests - least <= self.options.max_excess_requests
        }
        shared = {engine: self._num_shared(engine, names) for engine in free}
        longest = max(shared.values())
        best = {engine: load for engine, load in free.items() if shared[engine] == longest}
        chosen = least_loaded(best)
        self._note(chosen, names)
        return chosen

    def forget(self, engine: int) -> None:
        self._sent[engine].clear()

    def _names(self, ids: Sequence[int], salt: bytes = b"") -> Iterator[int]:
        """The name of each prefix of whole blocks, the shortest first."""
        size, name = self.options.block_size, xxhash.xxh3_64_intdigest(salt)
        data = array("q", ids)
        for end in range(size, len(ids) + 1, size):
            name = xxhash.xxh3_64_intdigest(data[end - size : end].tobytes(), seed=name)
            yield name

    def _num_shared(self, engine: int, names: Sequence[int]) -> int:
        """Leading blocks that the engine was sent; a prefix is kept longer than what extends it."""
        sent = self._sent[engine]
        return next((index for index, name in enumerate(names) if name not in sent), len(names))

    def _note(self, engine: int, names: Sequence[int]) -> None:
        sent = self._sent[engine]
        for name in reversed(names):
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self.options.max_blocks:
            sent.popitem(last=False)
