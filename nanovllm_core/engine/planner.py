"""Plans the next step: decoding rows, their blocks, preemptions, and the prompts' chunks.

The planner works ahead of the results: it needs to know how many tokens a row will have, never
which ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.engine.limits import EngineLimits
from nanovllm_core.engine.prefix_cache import Append, PagedKV
from nanovllm_core.engine.request import NO_ROW, Request, RequestState
from nanovllm_core.engine.rows import NEVER, DecodeBatch, RowTable
from nanovllm_core.engine.scheduler import NamedScheduler
from nanovllm_core.engine.shares import check_shares
from nanovllm_core.errors import shown
from nanovllm_core.interfaces.plan import Admission, PrefillChunk, StepPlan
from nanovllm_core.interfaces.scheduler import RequestView, SchedulerState


@dataclass(frozen=True, slots=True, eq=False)
class PlannedChunk:
    """A prefill chunk in flight, and which request it was planned for."""

    request: Request
    generation: int
    chunk: PrefillChunk


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A step in flight: what was submitted and whom its result is for."""

    plan: StepPlan
    batch: DecodeBatch
    chunks: tuple[PlannedChunk, ...] = ()


class Planner:
    """Owns the queue, the rows and the blocks; decides nothing that the scheduler may decide."""

    def __init__(
        self, rows: RowTable, kv: PagedKV, scheduler: NamedScheduler, limits: EngineLimits
    ) -> None:
        self.rows = rows
        self.kv = kv
        self.scheduler = scheduler
        self.limits = limits
        self.waiting: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.running: dict[int, Request] = {}
        """The requests with a row, by row."""
        self.draining: list[Request] = []
        """Preempted requests with tokens in flight."""
        self.step = 0
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0
        self._num_unblocked = 0
        """Since a prompt was completed."""
        self._waiting_view = _ValuesView(self.waiting)
        self._decoding: dict[str, Request] = {}
        """Those of the step that the scheduler is asked about."""
        self._steady: PlannedStep | None = None
        """The step to repeat while the decoding rows stay the same."""
        self._epoch = 0
        """That of the last planned step; the workers have its rows."""

    # -- the queue

    def enqueue(self, request: Request) -> None:
        """The request waits for its (next) admission."""
        request.state = RequestState.WAITING
        self.waiting[request.request_id] = request
        self.scheduler.add(request)

    def retire(self, request: Request) -> None:
        """The request is over: its row and blocks are free at once, results in flight are stale."""
        if request.state is RequestState.WAITING:
            self._dequeue(request)
        self.prefilling.pop(request.request_id, None)
        if request in self.draining:
            self.draining.remove(request)
        self.kv.release(request)
        self._leave_row(request)
        request.state = RequestState.FINISHED
        self.release_samples(request)

    def publish(self, request: Request, num_computed: int) -> None:
        """Share the full blocks below `num_computed`, and let samples in that waited for them."""
        self.kv.publish(request, num_computed)
        if request.held_samples:
            self.release_samples(request)

    def release_samples(self, request: Request) -> None:
        """Queue the further samples once the prompt's blocks can be shared, or never will be."""
        sharable = self.kv.num_sharable(request.num_prompt_tokens)
        if request.state is RequestState.FINISHED or request.num_published >= sharable:
            for sample in request.held_samples:
                self.enqueue(sample)
            request.held_samples = []

    # -- a step

    def plan(self) -> PlannedStep | None:
        """The next step, or None where nothing can be planned before more results are in."""
        appends = self._serve_due_rows()
        if self._steady is None:
            batch = self.rows.make_batch()
            plan = StepPlan(
                epoch=self._epoch + 1,
                num_decode=len(batch.rows),
                samples_later=bool(self.rows.constrained[batch.rows].any()),
            )
            self._steady = PlannedStep(plan, batch)
        planned = steady = self._steady
        if self.prefilling or (self.waiting and self.rows.free):
            planned = self._with_prompts(steady, appends)
        elif appends:
            planned = replace(steady, plan=replace(steady.plan, appends=_array(appends)))
        plan = planned.plan
        if not plan.num_decode and not plan.prefill:
            return None
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            rows = steady.batch.rows.astype(np.int32)
            planned = replace(planned, plan=replace(plan, decode_rows=rows))
        self.step += 1
        self.rows.scheduled += self.rows.decoding
        for prompt in planned.chunks:
            self.kv.drop_behind([prompt.request])
            if prompt.chunk.samples:
                self._start_decoding(prompt.request)
        return planned

    def unblock(self) -> None:
        """Nothing runs and nothing could be planned: preempt the newest unfinished prompt.

        Raises `SchedulerError` where that cannot help, or does not.
        """
        if len(self.prefilling) < 2:
            raise self.scheduler.error(
                f"scheduled nothing while nothing runs: {len(self.waiting)} requests wait, "
                f"{len(self.prefilling)} have unfinished prompts, {len(self.rows.free)} rows and "
                f"{self.kv.pool.num_free} blocks are free; schedule() must give the first request "
                "a share that fits"
            )
        self._num_unblocked += 1
        limit = self.rows.num_rows + self.kv.pool.num_blocks
        if self._num_unblocked > limit:
            raise self.scheduler.error(
                f"preempts in a circle: prompts were preempted {self._num_unblocked} times (the "
                f"limit is {limit}) and none was completed; admit a prompt only if the free blocks "
                "hold it and the rest of those admitted before"
            )
        self.preempt(next(reversed(self.prefilling.values())))

    def requeue_drained(self) -> None:
        """Preempted requests whose tokens are all on the host wait again."""
        for request in [r for r in self.draining if r.num_in_flight == 0]:
            self.draining.remove(request)
            self._leave_row(request)
            self.enqueue(request)

    # -- decoding rows

    def _serve_due_rows(self) -> Sequence[Append]:
        """Stop rows whose outputs are all planned; give the others the block they have come to."""
        due = [self.running[row] for row in self.rows.rows_due()]
        for request in due:
            if self._next_due(request) == request.max_length - 1:
                self._stop_decoding(request)
        growing = [request for request in due if request.state is RequestState.DECODING]
        if not growing:
            return ()
        self.kv.drop_behind(growing)
        appends = [
            append
            for request in growing
            if request.state is RequestState.DECODING and self._make_room(request)
            for append in self._append_blocks(request)
        ]
        # A row may have got its block and then been preempted for a later one.
        appends = [append for append in appends if self.rows.decoding[append[0]]]
        return appends + self._append_early()

    def _append_blocks(self, request: Request) -> list[Append]:
        appends = self.kv.add_blocks(request)
        self.rows.due_at[request.row] = self._next_due(request)
        return appends

    def _append_early(self) -> list[Append]:
        """Blocks for the rows that need one soon: one copy to the device then serves many steps.

        Only while there are free blocks for every row: it must not preempt another request now.
        """
        appends: list[Append] = []
        enough = self.rows.num_rows * len(self.kv.windows)
        for row in self.rows.rows_due_within(self.kv.early_steps):
            if self.kv.pool.num_free <= enough:
                break
            request = self.running[row]
            if self._next_due(request) < request.max_length - 1:
                self.kv.drop_behind([request])
                appends += self._append_blocks(request)
        return appends

    def _next_due(self, request: Request) -> int:
        """The scheduled length at which a decoding row needs a block or has everything planned."""
        return min(request.num_blocks * self.kv.block_size, request.max_length - 1)

    def _start_decoding(self, request: Request) -> None:
        """The last chunk of a prompt is planned; from the next step on its row decodes."""
        self._num_unblocked = 0
        del self.prefilling[request.request_id]
        request.state = RequestState.DECODING
        self.rows.decoding[request.row] = 1
        self.rows.due_at[request.row] = self._next_due(request)
        self._steady = None

    def _stop_decoding(self, request: Request) -> None:
        self.rows.decoding[request.row] = 0
        self.rows.due_at[request.row] = NEVER
        request.state = RequestState.DRAINING
        self._steady = None

    # -- preemption

    def _make_room(self, request: Request) -> bool:
        """Preempt until each group can have a block; False if the request itself was preempted."""
        while self.kv.pool.num_free < len(self.kv.windows):
            decoding = [self.running[row] for row in np.flatnonzero(self.rows.decoding).tolist()]
            candidates = {r.request_id: r for r in (*self.prefilling.values(), *decoding)}
            chosen = self.scheduler.choose_victim(tuple(candidates.values()))
            victim = candidates.get(chosen) if isinstance(chosen, str) else None
            if victim is None:
                raise self.scheduler.error(
                    f"chose {shown(chosen)} as the victim, which is not among the "
                    f"{len(candidates)} running requests; return the request_id of one of them"
                )
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Free a request's blocks now; it waits again once its tokens in flight are on the host."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        self.kv.release(request)
        self.rows.publish_at[request.row] = NEVER
        if request.state is RequestState.PREFILLING:
            del self.prefilling[request.request_id]
        else:
            self._stop_decoding(request)
        self.draining.append(request)
        self.requeue_drained()

    def _leave_row(self, request: Request) -> None:
        """The request, if it has a row, takes its known ids along and frees the row."""
        if request.row < 0:
            return
        request.token_ids = request.known_ids().copy()
        if self.rows.decoding[request.row]:
            self._steady = None
        del self.running[request.row]
        self.rows.release(request.row)
        request.row = NO_ROW

    # -- prompts

    def _with_prompts(self, steady: PlannedStep, appends: Sequence[Append]) -> PlannedStep:
        """The decoding rows' step plus what the scheduler gives to prompts."""
        state = self._state(steady)
        shares = self.scheduler.schedule(state)
        if not shares and not appends:
            return steady
        requests = check_shares(shares, state, self._prompt, self.scheduler.error)
        # Blocks to share are taken first, so that no new block of this step evicts them.
        for request in requests:
            if request.state is RequestState.WAITING:
                self._dequeue(request)
                self.kv.share(request)
        admissions: list[Admission] = []
        chunks: list[PlannedChunk] = []
        all_appends = list(appends)
        for share, request in zip(shares, requests, strict=True):
            if request.state is RequestState.WAITING:
                admissions.append(self._admit(request, share.num_tokens))
            else:
                all_appends += self.kv.grow(request, request.num_scheduled + share.num_tokens)
            chunks.append(self._plan_chunk(request, share.num_tokens))
        plan = replace(
            steady.plan,
            admissions=tuple(admissions),
            appends=_array(all_appends),
            prefill=tuple(planned.chunk for planned in chunks),
            samples_later=steady.plan.samples_later
            or any(one.chunk.samples and one.request.sampling.constrained for one in chunks),
        )
        return PlannedStep(plan, steady.batch, tuple(chunks))

    def _state(self, steady: PlannedStep) -> SchedulerState:
        """What the scheduler sees of a step with these decoding rows."""
        decoding = map(self.running.__getitem__, steady.batch.rows.tolist())
        self._decoding = {request.request_id: request for request in decoding}
        return SchedulerState(
            step=self.step,
            waiting=self._waiting_view,
            prefilling=tuple(self.prefilling.values()),
            decoding=_ValuesView(self._decoding),
            token_budget=self.limits.prompt_budget(steady.plan.num_decode),
            free_rows=len(self.rows.free),
            free_blocks=self.kv.pool.num_free,
            num_cached_tokens=self._num_cached_tokens,
            num_new_blocks=self._num_new_blocks,
        )

    def _num_cached_tokens(self, view: RequestView) -> int:
        return len(self.kv.match(self._request(view))[0]) * self.kv.block_size

    def _num_new_blocks(self, view: RequestView, num_tokens: int) -> int:
        return self.kv.num_new_blocks(self._request(view), num_tokens)

    def _request(self, view: RequestView) -> Request:
        return self._prompt(view.request_id) or self._decoding[view.request_id]

    def _prompt(self, request_id: str) -> Request | None:
        """The request of this id that waits or has an unfinished prompt."""
        return self.waiting.get(request_id) or self.prefilling.get(request_id)

    def _dequeue(self, request: Request) -> None:
        del self.waiting[request.request_id]
        self.scheduler.remove(request)

    def _admit(self, request: Request, num_tokens: int) -> Admission:
        num_cached = request.num_published * self.kv.block_size
        self.prefix_hit_tokens += num_cached
        if request.wait_steps is None:
            request.wait_steps = self.step - request.arrival_step
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            request.first_scheduled_time = perf_counter()
        request.row = self.rows.acquire(request.token_ids, num_cached, request.is_watched)
        self.rows.constrained[request.row] = request.sampling.constrained
        self.running[request.row] = request
        request.state = RequestState.PREFILLING
        self.prefilling[request.request_id] = request
        self.kv.grow(request, num_cached + num_tokens)
        self.release_samples(request)
        return Admission(
            row=request.row,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed=num_cached,
            block_ids=np.array(request.block_tables, np.int32),
            max_length=request.max_length,
            sampling=request.sampling,
        )

    def _plan_chunk(self, request: Request, num_tokens: int) -> PlannedChunk:
        start = request.num_scheduled
        end = start + num_tokens
        self.rows.scheduled[request.row] = end
        chunk = PrefillChunk(request.row, start, num_tokens, end == request.num_tokens)
        return PlannedChunk(request, int(self.rows.generation[request.row]), chunk)


def _array(appends: Sequence[Append]) -> NDArray[np.int32] | None:
    return np.array(appends, np.int32) if appends else None


class _ValuesView(Sequence[RequestView]):
    """The values of a dict as a read-only sequence, without copying a long queue every step."""

    def __init__(self, requests: dict[str, Request]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._requests.values())

    def __getitem__(self, index: Any) -> Any:
        """The view at an index, or a tuple of those of a slice."""
        places: int | range = range(len(self))[index]
        if isinstance(places, int):
            return next(islice(self._requests.values(), places, None))
        if places.step < 0:
            return tuple(self)[index]
        return tuple(islice(self._requests.values(), places.start, places.stop, places.step))
