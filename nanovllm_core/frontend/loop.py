"""The thread that owns an engine: it starts it, takes its steps, and closes it."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.engine import (
    Engine,
    EngineLimits,
    EngineStats,
    LoadedConstraint,
    Observation,
    OutputDelta,
)
from nanovllm_core.errors import EngineClosedError
from nanovllm_core.frontend import messages
from nanovllm_core.frontend.gc_freeze import freeze_objects, no_collections, thawed_objects
from nanovllm_core.frontend.tokenizer import Tokenizer, checkpoint_eos_token_ids
from nanovllm_core.interfaces.plan import WorkerInfo
from nanovllm_core.selection.startup import Startup, make_constraints, start

_ASKED = tuple(one.name for one in fields(messages.NewRequest))

CHECK_SECONDS = 1.0
"""An engine without requests looks so often after its workers."""


@dataclass(frozen=True, slots=True)
class Started:
    """The facts of a started engine that its doors need."""

    info: WorkerInfo
    tokenizer: Tokenizer | None
    sampling_defaults: dict[str, float]


class EngineLoop:
    """An engine, its inbox, and where its answers go.

    `run` is the body of the engine's thread. Everything else may be called on any thread. The loop
    holds no door, so that a door that nobody holds can close it.
    """

    def __init__(self, config: EngineConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.inbox: SimpleQueue[messages.Message] = SimpleQueue()
        self.started: Future[Started] = Future()
        self.is_starting = True
        self.is_open = True
        self.subscribers: dict[int, messages.Deliver] = {}
        """A door registers before it looks at `is_open`, so that the last answer reaches it."""
        self.close_error: BaseException | None = None
        self.turns = 0
        """Steps taken and messages handled: it stands still while one of them hangs."""
        self.is_idle = True
        """The loop waits for a message, or does not serve yet."""
        self.engine: Engine
        self.last_stats: EngineStats
        self._startup: Startup
        self._observation: Observation | None = None
        self._is_ready = False
        self._samples: dict[str, tuple[int, int]] = {}
        """By request: its subscriber, and how many samples are not finished."""
        self._waiting_for_idle: list[int] = []
        """Subscribers."""
        self._checked = monotonic()
        """When it last looked after the workers."""
        self._is_lent = False
        """Whether a program may take the engine's steps itself, on another thread."""

    def run(self) -> None:
        """Start, serve until `Close`, free the device. Every error goes to callers that wait."""
        try:
            with no_collections():
                started = self._start()
        except BaseException as error:
            self.is_starting = self.is_open = False
            self.started.set_exception(error)
            return
        self.started.set_result(started)
        if not self._serve().free:
            return  # The process ends: whoever waits for an answer ends with it.
        try:
            self._close()
        except BaseException as error:
            self.close_error = error
        finally:
            self.last_stats = self.engine.stats
            self.is_open = False
            self._end_all(EngineClosedError(f"this {self.name} is closed; create a new one"))

    # -- the start

    def _start(self) -> Started:
        began = perf_counter()
        startup = self._startup = start(self.config)
        if startup.observers:
            self._observation = Observation(startup.observers)
        try:
            tokenizer = Tokenizer.find(startup.setup.tokenizer, self.config.chat_template_kwargs)
            # The tokenizer may lie in another folder; the ids that end a text are the checkpoint's.
            own_ids = () if tokenizer is None else tokenizer.eos_token_ids
            eos = checkpoint_eos_token_ids(startup.setup.checkpoint, own_ids)
            constraints = make_constraints(startup, eos)
            planned = perf_counter() - began
            info = startup.executor.start(startup.setup)
            seconds = {"plan": planned, **info.start_seconds}
            info = replace(info, choices=(*startup.choices, *info.choices), start_seconds=seconds)
            self.engine = self._make_engine(info, eos, constraints)
            freeze_objects()
            self._is_ready = True
            startup.decisions.plugins.hook.nanovllm_engine_started(info=info)
            self.is_starting = False
        except BaseException:
            self.is_starting = False
            self._close()
            raise
        return Started(info, tokenizer, dict(startup.decisions.sampling_defaults))

    def _make_engine(
        self,
        info: WorkerInfo,
        eos_token_ids: tuple[int, ...],
        constraints: dict[str, LoadedConstraint],
    ) -> Engine:
        """The engine of the started executor."""
        config, startup = self.config, self._startup
        return Engine(
            startup.executor,
            startup.scheduler,
            EngineLimits.of(config, info),
            eos_token_ids=eos_token_ids,
            sampling_defaults=startup.decisions.sampling_defaults,
            logits_processors=startup.logits_processors,
            constraints=constraints,
            constraint_seconds=config.limits.constraint_seconds,
            observation=self._observation,
            prefix_caching=config.cache.prefix_caching,
            steps_ahead=config.steps_ahead,
            seed=config.seed,
            debug=config.debug,
            scheduler_name=startup.scheduler_name,
        )

    def _close(self) -> None:
        """Free the device and close the observers; extensions hear of an engine that was ready."""
        with thawed_objects() if self._is_ready else nullcontext():
            try:
                self._startup.executor.close()
            finally:
                if self._observation is not None:
                    self._observation.close()
        if self._is_ready:
            self._startup.decisions.plugins.hook.nanovllm_engine_closed()

    # -- serving

    def _serve(self) -> messages.Close:
        """Handle messages, and take steps while requests are unfinished; wait otherwise.

        An error of the engine reaches every caller; later requests are then refused by the engine.
        """
        while True:
            try:
                while self._samples and self.inbox.empty():
                    if deltas := self.engine.step():
                        self._deliver(deltas)
                    self.turns += 1
                while self._waiting_for_idle and not self._samples:
                    self._is_lent = True
                    self._answer(self._waiting_for_idle.pop(), self.engine.stats)
                self.is_idle = True
                message = self._next_message()
                self.is_idle = False
                self.turns += 1
                if isinstance(message, messages.Close):
                    return message
                self._handle(message)
            except BaseException as error:
                self._samples.clear()
                self._end_all(error)

    def _next_message(self) -> messages.Message:
        """Wait for a message; meanwhile look after the workers of an engine that nobody borrows."""
        while not (self._is_lent or self.engine.stats.ended):
            left = self._checked + CHECK_SECONDS - monotonic()
            if left > 0:
                with suppress(Empty):
                    return self.inbox.get(timeout=left)
            self._checked = monotonic()
            self.engine.check_workers()
        return self.inbox.get()

    def _end_all(self, error: BaseException) -> None:
        for number in tuple(self.subscribers):
            self._answer(number, messages.Ended(error))

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """Give each subscriber its deltas of this step, all at once."""
        by_subscriber: dict[int, list[OutputDelta]] = {}
        for delta in deltas:
            if delta.request_id not in self._samples:
                continue  # It was added by hand, or refused.
            number, left = self._samples[delta.request_id]
            by_subscriber.setdefault(number, []).append(delta)
            if delta.finish_reason is None:
                continue
            if left > 1:
                self._samples[delta.request_id] = number, left - 1
            else:
                del self._samples[delta.request_id]
        for number, its_deltas in by_subscriber.items():
            self._answer(number, its_deltas)

    def _answer(self, number: int, answer: messages.Answer) -> None:
        """Hand an answer to a subscriber; the requests of one that cannot take it are aborted."""
        deliver = self.subscribers.get(number)
        if deliver is None:
            return
        try:
            deliver(answer)
        except Exception:  # such as an event loop that is closed
            self.subscribers.pop(number, None)
            for request_id, (owner, _) in tuple(self._samples.items()):
                if owner == number:
                    self.engine.abort(request_id)

    def _handle(self, message: messages.Message) -> None:
        match message:
            case messages.AddRequests():
                self._add(message)
            case messages.Abort():
                for request_id in message.request_ids:
                    self.engine.abort(request_id)
            case messages.EndAt():
                self.engine.end_at(
                    message.request_id, message.index, message.num_tokens, message.stop
                )
            case messages.GetStats():
                self._answer(message.subscriber, self.engine.stats)
            case messages.WaitIdle():
                self._waiting_for_idle.append(message.subscriber)
            case messages.ResetPrefixCache():
                self.engine.reset_prefix_cache()
                self._answer(message.subscriber, self.engine.stats)

    def _add(self, message: messages.AddRequests) -> None:
        """Add all requests of a message, or none."""
        added = 0
        try:
            batch = self.engine.new_batch()
            with no_collections():  # Each would look at every id of the prompts before.
                for new in message.requests:
                    asked = {name: getattr(new, name) for name in _ASKED}
                    batch.add(**asked, searched=bool(new.params.stop))
                    added += 1
        except Exception as error:
            names = tuple(new.request_id for new in message.requests)
            self._answer(message.subscriber, messages.Refused(error, names, added))
        else:
            self.engine.enqueue(batch)
            for new in message.requests:
                self._samples[new.request_id] = message.subscriber, new.params.n
