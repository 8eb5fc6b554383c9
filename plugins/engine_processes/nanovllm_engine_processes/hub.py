"""The thread between a door and its engines: it routes requests, and hands out what comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Any

from nanovllm_core.api import (
    EngineClosedError,
    EngineConfig,
    EngineError,
    NanoVLLMError,
    WorkerInfo,
)
from nanovllm_core.frontend import (
    Abort,
    AddRequests,
    Answer,
    Close,
    Deliver,
    EndAt,
    Ended,
    EngineStats,
    GetStats,
    Message,
    NewRequest,
    OutputDelta,
    Refused,
    ResetPrefixCache,
    Started,
    Tokenizer,
    WaitIdle,
    derive_seed,
)
from nanovllm_engine_processes import wire
from nanovllm_engine_processes.child import REQUESTS
from nanovllm_engine_processes.engines import LOOK_SECONDS, Engines, Heard
from nanovllm_engine_processes.facts import Question, check_devices, common_info, sum_stats
from nanovllm_engine_processes.plugin import ProcessesOptions
from nanovllm_engine_processes.routing import Router, choose, forget
from nanovllm_engine_processes.samples import Batch, Sample, Samples
from nanovllm_engine_processes.starting import await_starts

logger = logging.getLogger(__name__)


class Hub:
    """Engines in processes, one inbox for all, and where their answers go.

    `run` is the body of the hub's thread. `post`, `subscribers` and the facts may be used on any.
    The hub holds no door, so that a door that nobody holds can close it.
    """

    def __init__(
        self, config: EngineConfig, name: str, options: ProcessesOptions, router: Router
    ) -> None:
        self.started: Future[Started] = Future()
        self.is_open = True
        self.subscribers: dict[int, Deliver] = {}
        self.close_error: NanoVLLMError | None = None
        self.error: BaseException | None = None
        """A fault that ended the hub's thread."""
        self.last_stats = EngineStats()
        self.info: WorkerInfo
        self.engines: Engines | None = None
        self._config = config
        self._name = name
        self._options = options
        self._router = router
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._infos: dict[int, WorkerInfo] = {}
        """Of the engines that run."""
        self._samples: Samples
        self._questions: dict[int, Question] = {}
        self._numbers = count(REQUESTS + 1)
        """Of questions, and of requests that run again."""
        self._num_arrived = 0
        self._failure: NanoVLLMError | None = None
        """Why no engine is left."""

    def post(self, message: Message) -> None:
        """Put a message into the inbox; never waits."""
        self._inbox.put(message)
        if self.engines is not None:
            self.engines.ring()

    def run(self) -> None:
        """Start, serve until `Close`, end the processes. Every error goes to callers that wait."""
        try:
            self.engines = engines = Engines(self._config, self._options)
            started = self._start(engines)
        except BaseException as error:
            self.is_open = False
            if self.engines is not None:
                self.engines.close()
            self.started.set_exception(error)
            return
        self.started.set_result(started)
        try:
            self._serve(engines)
        except BaseException as error:
            logger.exception("the thread between door and engines failed")
            self.error = error
            self._end_all(error)
        finally:
            self._close(engines)

    # -- the start

    def _start(self, engines: Engines) -> Started:
        began = time.monotonic()
        facts = await_starts(engines, self._inbox, self._name, self._options.start_seconds)
        self._infos = {number: wire.read_info(facts[number][0]) for number in sorted(facts)}
        check_devices(self._infos, self._config)
        size = self._config.data_parallel_size
        self.info = common_info(self._infos, size, time.monotonic() - began)
        self._samples = Samples(len(engines), self.info.max_model_len)
        _, folder, defaults = facts[0]
        kwargs = self._config.chat_template_kwargs
        tokenizer = None if folder is None else Tokenizer.find(folder, kwargs)
        return Started(self.info, tokenizer, defaults)

    # -- serving

    def _serve(self, engines: Engines) -> None:
        looked = time.monotonic()
        while True:
            ended = self._hand_out(engines, engines.receive())
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                heard, found = engines.find_ended()
                said = self._hand_out(engines, [one for one in heard if one[0] not in ended])
                ended = found | said | ended  # an engine's own words say more
            if ended:
                self._lose(engines, ended)
            while not self._inbox.empty():
                message = self._inbox.get()
                if isinstance(message, Close):
                    return
                self._handle(engines, message)

    def _handle(self, engines: Engines, message: Message) -> None:
        match message:
            case AddRequests():
                self._add(engines, message)
            case Abort():
                for sample in self._of_requests(message.request_ids):
                    sample.is_aborted = True
                self._abort(engines, self._of_requests(message.request_ids))
            case EndAt():
                self._end_at(engines, message)
            case GetStats() | WaitIdle() | ResetPrefixCache():
                self._ask(engines, message)

    def _of_requests(self, request_ids: Iterable[str]) -> list[Sample]:
        return [one for name in request_ids for one in self._samples.of_request(name)]

    # -- requests

    def _add(self, engines: Engines, message: AddRequests) -> None:
        """Send each request to the engine that the router chooses; all of them, or none."""
        names = tuple(new.request_id for new in message.requests)
        batch = Batch(message.subscriber, names)
        parts: dict[int, list[wire.PackedRequest]] = {}
        added: list[NewRequest] = []
        try:
            for given in message.requests:
                new = self._with_seed(given)
                packed = wire.pack_request(new)
                engine = self._route(new)
                parts.setdefault(engine, []).append(packed)
                self._samples.add(new, batch, engine)
                added.append(new)
        except NanoVLLMError as error:
            self._samples.drop(self._of_requests(names))
            self._answer(message.subscriber, Refused(error, names, len(added)))
            return
        for engine, requests in parts.items():
            engines.send(engine, wire.encode(wire.ADD, wire.PackedRequests(REQUESTS, requests)))

    def _with_seed(self, new: NewRequest) -> NewRequest:
        """The seed that an engine on a thread would derive: tokens do not depend on the router."""
        arrived = self._num_arrived
        self._num_arrived += new.params.n
        if new.params.seed is not None:
            return new
        seed = derive_seed(self._config.seed, arrived)
        return replace(new, params=replace(new.params, seed=seed))

    def _route(self, request: NewRequest) -> int:
        """The router's choice. Raises PluginFailedError where it fails, or chooses no engine."""
        loads = self._samples.loads
        if self._failure is not None:
            raise self._no_engine()
        return next(iter(loads)) if len(loads) == 1 else choose(self._router, request, loads)

    def _no_engine(self) -> EngineClosedError:
        error = EngineClosedError(f"no engine is left: {self._failure}; make a new {self._name}")
        error.__cause__ = self._failure
        return error

    def _abort(self, engines: Engines, samples: Iterable[Sample]) -> None:
        """End samples on their engines; those that their doors still search are over now."""
        parts: dict[int, dict[str, None]] = {}
        for sample in samples:
            parts.setdefault(sample.engine, {})[sample.part] = None
            self._samples.drop_if_over(sample)
        for engine, names in parts.items():
            engines.send(engine, wire.encode_message(Abort(tuple(names))))

    def _end_at(self, engines: Engines, message: EndAt) -> None:
        for sample in self._samples.of_request(message.request_id):
            if sample.index == message.index:
                sample.end = message
                moved = replace(message, request_id=sample.part, index=sample.part_index)
                engines.send(sample.engine, wire.encode_message(moved))
                self._samples.drop_if_over(sample)
                return

    def _ask(self, engines: Engines, message: GetStats | WaitIdle | ResetPrefixCache) -> None:
        if self._failure is not None:
            self._answer(message.subscriber, Ended(self._no_engine()))
            return
        number = next(self._numbers)
        self._questions[number] = Question(message.subscriber, {*engines})
        frame = wire.encode_message(replace(message, subscriber=number))
        for engine in engines:
            engines.send(engine, frame)

    # -- answers

    def _hand_out(self, engines: Engines, heard: Iterable[Heard]) -> dict[int, NanoVLLMError]:
        """Give each subscriber what came for it: its deltas of each step at once.

        Returns the errors of engines that say that they have ended; what they say later is ignored.
        """
        ended: dict[int, NanoVLLMError] = {}
        for engine, name, content in heard:
            if engine in ended:
                continue
            if name == wire.DELTAS:
                self._deliver(engine, content)
            elif name == wire.REFUSED:
                self._refuse(engines, engine, *content)
            elif name == wire.STATS:
                number, stats = content
                if (question := self._questions.get(number)) is not None:
                    question.answers[engine] = wire.read_stats(stats)
                    question.waiting.discard(engine)
                    self._answer_if_whole(number, question)
            elif name == wire.ENDED:
                ended[engine] = wire.read_error(content)
        return ended

    def _deliver(self, engine: int, rows: list[list[Any]]) -> None:
        by_subscriber: dict[int, list[OutputDelta]] = {}
        for row in rows:
            sample = self._samples.of_part(row[0], row[1], engine)
            if sample is None or sample.is_finished:
                continue
            delta = wire.read_delta(row, sample.request.request_id, sample.index)
            self._samples.take(sample, delta)
            by_subscriber.setdefault(sample.batch.subscriber, []).append(delta)
        for number, deltas in by_subscriber.items():
            self._answer(number, deltas)

    def _refuse(
        self, engines: Engines, engine: int, error: Any, names: list[str], place: int
    ) -> None:
        """An engine refused its part of a batch: the other parts end with it."""
        sample = self._samples.of_part(names[place], 0, engine)
        if sample is None:
            return
        if sample.num_reruns:
            self._finish(sample, finish_reason="error", error=wire.read_error(error))
            return
        batch = sample.batch
        samples = self._of_requests(batch.request_ids)
        self._abort(engines, [one for one in samples if one.part not in names])
        self._samples.drop(samples)
        index = batch.request_ids.index(sample.request.request_id)
        self._answer(batch.subscriber, Refused(wire.read_error(error), batch.request_ids, index))

    def _answer_if_whole(self, number: int, question: Question) -> None:
        if not question.waiting:
            del self._questions[number]
            self._answer(question.subscriber, self._sum(question.answers))

    def _sum(self, each: dict[int, EngineStats]) -> EngineStats:
        stats = [each[engine] for engine in sorted(each)]
        return sum_stats(stats, is_one=self._config.data_parallel_size == 1)

    def _finish(self, sample: Sample, **how: Any) -> None:
        """Give a sample its last delta, where no engine does it."""
        sample.is_aborted = True
        delta = sample.last_delta(**how)
        self._samples.take(sample, delta)
        self._answer(sample.batch.subscriber, [delta])

    def _answer(self, number: int, answer: Answer) -> None:
        """Hand an answer to a subscriber; the requests of one that cannot take it are aborted."""
        deliver = self.subscribers.get(number)
        if deliver is None:
            return
        try:
            deliver(answer)
        except Exception:  # such as an event loop that is closed
            self.subscribers.pop(number, None)
            samples = [one for one in self._samples if one.batch.subscriber == number]
            self.post(Abort(tuple({one.request.request_id: None for one in samples})))

    # -- an engine's end

    def _lose(self, engines: Engines, ended: dict[int, NanoVLLMError]) -> None:
        """Go on without these engines: others take over what they had not given.

        All are removed before any sample moves, so none moves to an engine that has ended too.
        """
        size = self._config.data_parallel_size
        for lost, error in ended.items():
            engines.end(lost)
            del self._infos[lost], self._samples.loads[lost]
            logger.error("%s; %d of %d engines left", error, len(engines), size)
        if not self._infos:
            *_, self._failure = ended.values()
            self._samples.drop([*self._samples])
            self._questions.clear()
            self._end_all(self._failure)
            return
        self.info = common_info(self._infos, size, 0.0, self.info)
        for lost in ended:
            forget(self._router, lost)
        for number, question in tuple(self._questions.items()):
            question.waiting.difference_update(ended)
            self._answer_if_whole(number, question)
        chosen: dict[str, int] = {}
        for sample in self._samples:
            if sample.engine in ended:
                self._run_again(engines, sample, ended[sample.engine], chosen)

    def _run_again(
        self, engines: Engines, sample: Sample, error: NanoVLLMError, chosen: dict[str, int]
    ) -> None:
        """Finish a sample, or move it to the engine that is chosen for all of its request."""
        if sample.is_finished:  # its door still searches the text, for the engine's record alone
            self._samples.drop([sample])
        elif sample.is_aborted:
            self._finish(sample, finish_reason="abort")
        elif sample.end is not None:
            self._finish(sample, finish_reason="stop", stop_reason=sample.end.stop)
        elif sample.num_reruns == self._options.max_reruns:
            fault = EngineError(
                f"{error}; this request had run on {sample.num_reruns + 1} engines that ended "
                f"(max_reruns is {self._options.max_reruns})"
            )
            self._finish(sample, finish_reason="error", error=fault)
        else:
            name = sample.request.request_id
            rest = sample.rest(f"{name}/{next(self._numbers)}")
            try:
                packed = wire.pack_request(rest)
                engine = chosen[name] if name in chosen else self._route(rest)
            except NanoVLLMError as fault:
                self._finish(sample, finish_reason="error", error=fault)
                return
            chosen[name] = engine
            self._samples.move(sample, engine, rest.request_id)
            engines.send(engine, wire.encode(wire.ADD, wire.PackedRequests(REQUESTS, [packed])))

    # -- the end

    def _close(self, engines: Engines) -> None:
        self.last_stats = EngineStats()
        closed: dict[int, EngineStats] = {}
        try:
            for engine in engines:
                engines.send(engine, wire.encode_message(Close()))
            for engine, name, content in engines.await_ends():
                if name == wire.CLOSED:
                    closed[engine] = wire.read_stats(content[0])
                    if content[1] is not None:
                        self.close_error = wire.read_error(content[1])
        finally:
            engines.close()
            self.last_stats = self._sum(closed)
            self.is_open = False
            self._end_all(EngineClosedError(f"this {self._name} is closed; create a new one"))

    def _end_all(self, error: BaseException) -> None:
        for number in tuple(self.subscribers):
            self._answer(number, Ended(error))
