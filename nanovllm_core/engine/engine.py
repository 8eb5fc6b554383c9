"""The loop: plan ahead, submit, collect the oldest step, hand out what it gave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.engine.consistency import assert_consistent, named, wrong_result
from nanovllm_core.engine.constraints import LoadedConstraint
from nanovllm_core.engine.deltas import OutputDelta
from nanovllm_core.engine.intake import Intake
from nanovllm_core.engine.limits import EngineLimits
from nanovllm_core.engine.masking import Masking
from nanovllm_core.engine.observation import EngineStats, Observation
from nanovllm_core.engine.planner import PlannedStep, Planner
from nanovllm_core.engine.prefix_cache import PagedKV
from nanovllm_core.engine.request import Request, RequestState
from nanovllm_core.engine.request_factory import RequestBatch, RequestFactory, RequestOptions
from nanovllm_core.engine.rows import RowTable
from nanovllm_core.engine.scheduler import NamedScheduler
from nanovllm_core.errors import (
    ConfigError,
    EngineClosedError,
    InconsistentStateError,
    ModelOutputError,
    NanoVLLMError,
)
from nanovllm_core.interfaces.executor import Executor
from nanovllm_core.interfaces.observer import FinishReason
from nanovllm_core.interfaces.plan import StepResult
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import Scheduler
from nanovllm_core.interfaces.specs import LogitsProcessorSpec


class Engine:
    """Runs requests of token ids on a started executor.

    `steps_ahead` steps are planned and submitted before the oldest result is waited for; 0 waits
    for each step. The tokens do not depend on it. `eos_token_ids` end a request unless it ignores
    them. `sampling_defaults` are the checkpoint's, for fields of `sampling_params.NEUTRAL` that a
    request does not state. `logits_processors` are what requests may ask for, by name; the executor
    runs them. `constraints` are too; the engine runs them, and waits at most `constraint_seconds`
    for each mask.
    `observation` receives a record of every step. `debug` checks every invariant at every step.
    `scheduler_name` stands for the scheduler in errors; its class does if there is none.

    The executor and the observers stay the caller's to close.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        limits: EngineLimits,
        *,
        eos_token_ids: Iterable[int] = (),
        sampling_defaults: Mapping[str, float] | None = None,
        logits_processors: Mapping[str, LogitsProcessorSpec] | None = None,
        constraints: Mapping[str, LoadedConstraint] | None = None,
        constraint_seconds: float = 5.0,
        observation: Observation | None = None,
        prefix_caching: bool = True,
        steps_ahead: int = 1,
        seed: int = 0,
        debug: bool = False,
        scheduler_name: str = "",
    ) -> None:
        if steps_ahead < 0:
            raise ConfigError(
                f"steps_ahead is {steps_ahead}; it must be at least 0, which waits for each step"
            )
        self.limits = limits
        self._executor = executor
        self._steps_ahead = steps_ahead
        self._observation = observation
        self._debug = debug
        self._rows = RowTable(limits.max_num_seqs, limits.max_model_len)
        self._factory = RequestFactory(
            limits=limits,
            table=self._rows,
            eos_token_ids=tuple(eos_token_ids),
            processors=logits_processors or {},
            constraints=constraints or {},
            sampling_defaults=sampling_defaults or {},
            seed=seed,
        )
        self._kv = PagedKV(limits, prefix_caching)
        named = NamedScheduler(scheduler, scheduler_name)
        self._planner = Planner(self._rows, self._kv, named, limits)
        self._running = self._planner.running
        self._intake = Intake(self._planner)
        self._masking = Masking(self._planner, limits.vocab_size, constraint_seconds)
        self._in_flight: deque[PlannedStep] = deque()
        self._is_unsampled = False
        """Only the forward pass of the newest step in flight is launched."""
        self._unfinished: dict[str, Request] = {}
        """The samples that are not finished, by their own ids."""
        self._samples: dict[str, list[Request]] = {}
        """By the id that was given to `add_request`: its samples that have no record yet."""
        self._deltas: list[OutputDelta] = []
        self._num_arrived = 0
        self._num_finished = 0
        self._host_seconds = 0.0
        self._steady_steps = 0
        self._steady_seconds = 0.0
        self._failure: BaseException | None = None
        self._is_busy = False
        self._is_waiting = False
        self._now = 0.0
        """When the results that are being taken in were there, by `perf_counter()`."""
        self._to_abort: deque[str] = deque()

    # -- requests come and go

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.integer],
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Queue a request; its deltas come from `step()`, for each sample its own.

        With `stream` every new token comes at once, otherwise all of them when the sample is
        finished. `searched` streams too: the caller searches the text for stop strings, and calls
        `end_at` for every sample that is not aborted. `cache_salt` separates requests that must not
        share cached blocks. `labels` are texts by name for schedulers and observers; all samples
        carry them. `output_token_ids` are outputs of a single sample that its caller has already,
        of an engine that ended: it goes on behind them, as after a preemption.

        Raises `RequestError` for an id in use, `InvalidPromptError`, `InvalidSamplingError`,
        `InvalidLabelsError`, and `RequestTooLongError` for a request that can never fit. Other
        requests go on. An error of the scheduler ends the engine, as any error in `step()`,
        `abort()` or `reset_prefix_cache()` does.
        """
        batch = self.new_batch()
        batch.add(request_id, prompt_token_ids, params, **options)
        self.enqueue(batch)

    def new_batch(self) -> RequestBatch:
        """For requests that are queued together, or not at all: its `add` checks each of them.

        The engine knows none of them before `enqueue`, and takes no other request until then.
        """
        self._check_alive()
        return RequestBatch(
            factory=self._factory,
            arrival_step=self._planner.step,
            num_arrived=self._num_arrived,
            in_use=(self._unfinished, self._samples),
        )

    def enqueue(self, batch: RequestBatch) -> None:
        """Queue the requests of a batch in their order."""
        with _AtWork(self):  # All parts are made: from here on the requests are known.
            self._num_arrived += len(batch.sample_ids)
            for samples in batch.samples:
                first, *others = samples
                self._samples[first.group_id] = list(samples)
                self._unfinished |= {request.request_id: request for request in samples}
                first.held_samples = others
                self._planner.enqueue(first)
                self._planner.release_samples(first)

    def abort(self, request_id: str) -> None:
        """End a request with all its samples, in whatever state; an unknown id is no error.

        The next `step()` returns what it had, with finish_reason "abort". A finaliser (of a stream
        that nobody holds any more) may run between any two lines of a step: what it aborts waits
        for the end of it.
        """
        if self._failure is not None:
            return  # Nothing runs any more, and what is known of the requests may be half of it.
        self._to_abort.append(request_id)
        if not self._is_busy:
            with _AtWork(self):
                self._carry_out_aborts()

    def _carry_out_aborts(self) -> None:
        while self._to_abort:
            self._now = perf_counter()
            for request in tuple(self._samples.get(self._to_abort.popleft(), ())):
                if request.state is not RequestState.FINISHED:
                    self._finish(request, "abort")
                self._record(request)  # Nobody searches its text any more.

    def end_at(self, request_id: str, index: int, num_tokens: int, stop: str | None) -> None:
        """The caller has searched a sample's text: `stop` ends it at its `num_tokens`-th id.

        With None no stop string was found, and the sample is finished. Ids beyond `num_tokens` are
        dropped: the engine may have computed some, or even finished the sample, before the caller
        had read the id that completes a stop string. The sample's record is made now, and counts as
        the caller does. A sample that is not there, because it was aborted, is no error.
        """
        if self._failure is not None:
            return  # As in `abort`.
        with _AtWork(self):
            for request in tuple(self._samples.get(request_id, ())):
                if request.index == index:
                    if request.state is not RequestState.FINISHED:
                        self._now = perf_counter()
                        self._finish(request, "stop", stop)
                    elif stop is not None:
                        request.finish_reason = "stop"
                    request.num_output_tokens = num_tokens
                    self._record(request)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, so that a second run computes what the first did."""
        self._check_alive()
        with _AtWork(self):
            self._kv.pool.forget()

    def has_unfinished(self) -> bool:
        """True while `step()` has something to do or to return."""
        return bool(self._unfinished or self._deltas or self._in_flight)

    @property
    def stats(self) -> EngineStats:
        planner = self._planner
        running = len(self._running)
        return EngineStats(
            steps=planner.step,
            preemptions=planner.num_preemptions,
            prefix_hit_tokens=planner.prefix_hit_tokens,
            output_tokens=self._intake.num_output_tokens,
            finished=self._num_finished,
            running=running,
            waiting=len(self._unfinished) - running,
            free_blocks=self._kv.pool.num_free,
            blocks=self._kv.pool.num_blocks,
            host_seconds=self._host_seconds,
            steady_steps=self._steady_steps,
            steady_seconds=self._steady_seconds,
            ended=int(self._failure is not None),
        )

    def assert_consistent(self) -> None:
        """Check every invariant; raises `InconsistentStateError`."""
        assert_consistent(self._planner, self._unfinished.values(), self._steps_ahead + 1)

    # -- the loop

    def step(self) -> list[OutputDelta]:
        """Submit steps until enough are in flight, take the oldest result in, return the news.

        Any error here ends the engine: later calls raise `EngineClosedError`. Only Ctrl-C while
        waiting for a result does not; the next call waits for the same one.
        """
        self._check_alive()
        with _AtWork(self):
            began = started = perf_counter()
            self._carry_out_aborts()
            is_steady = self._submit_ahead()
            if self._in_flight:
                waiting = perf_counter()
                self._is_waiting = True
                result = self._executor.collect()
                self._is_waiting = False
                self._now = perf_counter()
                started += self._now - waiting
                taken = self._in_flight.popleft()
                self._absorb(taken, result)
                if self._is_unsampled:
                    self._sample()
                if self._planner.draining:
                    self._planner.requeue_drained()
                if self._observation is not None:
                    self._observation.observe(self.stats, taken, len(self._in_flight), began)
            self._carry_out_aborts()
            if self._debug:
                self.assert_consistent()
            deltas, self._deltas = self._deltas, []
            seconds = perf_counter() - started
            self._host_seconds += seconds
            if is_steady:
                self._steady_steps += 1
                self._steady_seconds += seconds
            return deltas

    def check_workers(self) -> None:
        """Raise where a worker has ended, which ends the engine; for times without requests."""
        self._check_alive()
        with _AtWork(self):
            self._executor.check()

    def _submit_ahead(self) -> bool:
        """Fill the depth; True if the last step submitted decodes the rows of the one before."""
        is_steady = False
        while len(self._in_flight) <= self._steps_ahead and not self._is_unsampled:
            planned = self._planner.plan()
            if planned is not None:
                try:
                    self._executor.submit(planned.plan)
                except ModelOutputError as error:
                    raise named(error, self._running) from error
                self._in_flight.append(planned)
                if planned.plan.samples_later:
                    self._is_unsampled = True
                    self._sample()
                is_steady = planned.plan.decode_rows is None and not planned.chunks
            elif self._in_flight or not self._unfinished:
                break
            else:
                self._planner.unblock()
        return is_steady

    def _sample(self) -> None:
        """Launch the sampling that waits for masks, once every id before it is known."""
        if len(self._in_flight) > 1:
            return
        masks, failed = self._masking.make(self._in_flight[0])
        try:
            self._executor.sample(masks)
        except ModelOutputError as error:
            raise named(error, self._running) from error
        self._is_unsampled = False
        for request, fault in failed:
            self._now = perf_counter()
            self._finish(request, "error", error=fault)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineClosedError(
                f"the engine ended with {type(self._failure).__name__}: {self._failure}; "
                "make a new one"
            ) from self._failure

    # -- results come in

    def _absorb(self, planned: PlannedStep, result: StepResult) -> None:
        """Accept the tokens of one step; share, stream and finish what they complete."""
        plan = planned.plan
        if not isinstance(result, StepResult) or np.shape(result.token_ids) != (plan.num_sampled,):
            raise wrong_result(plan, result, self._executor)
        ended: set[int] = set()
        if np.count_nonzero(result.finished):
            ended.update(np.flatnonzero(result.finished).tolist())
        for entry, request in self._intake.take(planned, result, ended, self._now):
            self._deliver(request, entry, entry in ended, result)

    def _deliver(self, request: Request, entry: int, ended: bool, result: StepResult) -> None:
        """Finish the request at its newest token, or hand the token out if it is streamed."""
        newest, sampling = int(result.token_ids[entry]), request.sampling
        if error := request.refused(newest):
            self._intake.take_back(request)
            self._finish(request, "error", error=error)
            return
        if request.params.logprobs is not None:
            if entry not in result.logprobs:
                raise InconsistentStateError(
                    f"{type(self._executor).__name__} returned no logprobs for entry {entry}, "
                    "which asked for them"
                )
            request.new_logprobs.append(result.logprobs[entry])
        # The device does not check all of many stop ids.
        if newest in sampling.stop_token_ids and request.num_output_ids >= sampling.min_tokens:
            self._finish(request, "stop", newest)
        elif ended:
            self._finish(request, "length")
        elif request.is_streamed:
            self._deltas.append(request.take_delta())

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        stop: int | str | None = None,
        error: NanoVLLMError | None = None,
    ) -> None:
        """The request is over: its last delta, and its record unless its caller is to say more."""
        self._num_finished += 1
        del self._unfinished[request.request_id]
        request.finish_reason, request.finished_time = reason, self._now
        request.num_output_tokens = request.num_output_ids
        self._deltas.append(request.take_delta(reason, stop, error))
        self._planner.retire(request)
        if not request.searched:
            self._record(request)

    def _record(self, request: Request) -> None:
        """Forget a finished request, and report it to the observers."""
        samples = self._samples.get(request.group_id, [])
        if request not in samples:
            return
        samples.remove(request)
        if not samples:
            del self._samples[request.group_id]
        if self._observation is not None:
            self._observation.observe_request(request)


class _AtWork:
    """Aborts wait; any error ends the engine, except Ctrl-C while waiting for a result."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine._is_busy, self._engine._is_waiting = True, False

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        engine = self._engine
        if error is not None and not (engine._is_waiting and isinstance(error, KeyboardInterrupt)):
            engine._failure = error
        engine._is_busy = False
