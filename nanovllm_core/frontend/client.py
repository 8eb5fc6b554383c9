"""How a door reaches its engine: the contract of engine clients, and the answers of one call."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any

from pydantic import BaseModel

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.engine import Engine, EngineStats, OutputDelta
from nanovllm_core.errors import EngineClosedError, UnsupportedError
from nanovllm_core.frontend.messages import (
    Abort,
    AddRequests,
    Answer,
    Deliver,
    EndAt,
    Ended,
    GetStats,
    Message,
    NewRequest,
    Refused,
    ResetPrefixCache,
    WaitIdle,
)
from nanovllm_core.frontend.tokenizer import Tokenizer
from nanovllm_core.interfaces.plan import WorkerInfo
from nanovllm_core.interfaces.plugins import Plugins
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.selection.decisions import Decisions


def open_engine(config: EngineConfig, name: str = "engine") -> EngineClient:
    """Start an engine, by the configuration's engine client; returns when it takes requests.

    Raises the error of the start. Ctrl-C ends the start. `name` is how errors call the engine.
    """
    decisions = Decisions(config)
    [client] = decisions.named("engine_client")
    made: EngineClient = make_plugin(client, config, name, decisions.plugins)
    made.start()
    return made


class EngineClient(ABC):
    """Sends messages to a started engine. Threads may share one. Made by `open_engine`.

    Called as `Client(options, config, name, plugins)`: `name` is how errors call the engine,
    `plugins` are the installed ones. One that nobody holds any more closes its engine.
    """

    tokenizer: Tokenizer | None
    sampling_defaults: Mapping[str, float]
    """The checkpoint's, by field of `SamplingParams`."""

    def __init__(
        self, options: BaseModel, config: EngineConfig, name: str, plugins: Plugins
    ) -> None:
        self.options = options
        self.config = config
        self._name = name
        self._pid = os.getpid()
        self._request_ids = count()

    @property
    @abstractmethod
    def info(self) -> WorkerInfo:
        """The state of the started engine."""

    @abstractmethod
    def start(self) -> None:
        """Start the engine, and set the facts above; called once.

        Raises the error of the start. Ctrl-C ends the start. Either way nothing is left behind.
        """

    @property
    def engine(self) -> Engine:
        """The engine itself, once no request is unfinished that came by messages.

        UnsupportedError where it is not in this process.
        """
        raise UnsupportedError(
            f"the engine of this {self._name} runs in another process; set engine_client: thread "
            "and data_parallel_size: 1 for one whose steps the caller takes"
        )

    # -- messages

    @abstractmethod
    def subscribe(self, deliver: Deliver) -> int:
        """The number under which `deliver` gets answers, on a thread of the client's."""

    @abstractmethod
    def unsubscribe(self, number: int) -> None:
        """No more answers for this number."""

    @abstractmethod
    def post(self, message: Message) -> None:
        """Put a message into the inbox, where nobody may read it any more. Never waits.

        A finaliser may call it between any two lines of another call.
        """

    def new_request_id(self) -> str:
        """An id that no other request of this client has."""
        return str(next(self._request_ids))

    def send(self, message: Message) -> None:
        """Put a message into the inbox; EngineClosedError where nobody reads it any more."""
        self.check_open()
        self.post(message)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests, before the engine's next step; of a closed engine too."""
        if request_ids:
            self.post(Abort(tuple(request_ids)))

    def end_at(self, request_id: str, index: int, num_tokens: int, stop: str | None) -> None:
        """`Engine.end_at` as a message."""
        self.post(EndAt(request_id, index, num_tokens, stop))

    def stats(self) -> EngineStats:
        """The counters, between two steps; those at the end where the engine is closed."""
        return self.ask(GetStats)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; returns when that is done."""
        self.ask(ResetPrefixCache)

    def ask(self, question: Callable[[int], GetStats | WaitIdle | ResetPrefixCache]) -> EngineStats:
        """The answer to a question that takes its subscriber."""
        with Mailbox(self) as mailbox:
            self.send(question(mailbox.number))
            stats: EngineStats = mailbox.wait()
            return stats

    # -- the end

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """False once the engine is closed, or is to close."""

    def check_open(self) -> None:
        """Raises EngineClosedError where the engine is closed, or belongs to another process."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this {self._name} was created in process {self._pid}, and this is "
                f"{os.getpid()}: neither threads nor a GPU outlive a fork; create a new one here"
            )
        if not self.is_open:
            raise EngineClosedError(f"this {self._name} is closed; create a new one")

    @abstractmethod
    def close(self) -> None:
        """Free the device, once the step that is under way has ended. Closing twice is fine."""


class Mailbox:
    """The answers for one caller. A context manager: leaving it aborts what is unfinished."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self.unfinished: dict[str, int] = {}
        """By request: samples whose last delta has not come."""
        self._ended: Ended | None = None
        self.refused = 0
        """Which of the requests was refused."""
        self.number = client.subscribe(self._answers.put)

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Send requests, all of which are added before the next step."""
        self.unfinished.update((new.request_id, new.params.n) for new in requests)
        self._client.send(AddRequests(self.number, tuple(requests)))

    def deltas(self) -> Iterator[OutputDelta]:
        """Wait for the next deltas of these requests.

        A sample counts as finished once its caller has dealt with its last delta and takes the
        next. Raises the error for which a request was refused, or which ended the engine.
        """
        for delta in self.wait():
            yield delta
            if delta.finish_reason is not None:
                self.unfinished[delta.request_id] -= 1
                if not self.unfinished[delta.request_id]:
                    del self.unfinished[delta.request_id]

    def wait(self) -> Any:
        """The next answer; an error is raised."""
        self._client.check_open()
        answer = self._ended or self._answers.get()
        if isinstance(answer, Refused):
            self.refused = answer.index
            self.unfinished.clear()
            raise answer.error
        if isinstance(answer, Ended):
            self._ended = answer
            raise answer.error
        return answer

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.unsubscribe(self.number)
        self._client.abort(tuple(self.unfinished))
